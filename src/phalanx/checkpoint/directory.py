"""How a checkpoint directory comes to be and is replaced: at every moment the old or the new one can be loaded.

Beside `step-100` stand, while it is saved, `.step-100.saving-TOKEN` (the new one, growing) and, for a moment, `.step-100.old-TOKEN`
(the one that it replaces). Both carry the marker only if they are complete.
One that is deleted is first moved to `.step-100.removed-TOKEN`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from phalanx.checkpoint import disk
from phalanx.checkpoint.disk import MARKER
from phalanx.checkpoint.manifest import MANIFEST, is_ours
from phalanx.errors import CheckpointError
from phalanx.log import get_logger

KINDS = ("saving", "old", "removed")


def resolve(path: str | os.PathLike) -> Path:
    """The absolute path with links followed, so that the directory itself and not a link to it is renamed."""
    return Path(os.path.realpath(os.path.expanduser(path)))


def beside(path: Path, kind: str, token: str) -> Path:
    """The hidden sibling of a checkpoint in which it is written ("saving"), kept while replaced ("old") or deleted ("removed")."""
    return path.parent / f".{path.name}.{kind}-{token}"


def name_of(entry: Path) -> str:
    """The name of the checkpoint that a directory entry is, was until it was moved aside, or would have become."""
    hidden = re.fullmatch(rf"\.(.+)\.({'|'.join(KINDS)})-[0-9a-f]+", entry.name)
    return hidden[1] if hidden else entry.name


def siblings(path: Path, kind: str) -> list[Path]:
    """The hidden siblings of that kind which exist."""
    prefix = f".{path.name}.{kind}-"
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(prefix) and entry.is_dir())


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, or what a killed save or a damaged disk left of one."""
    names = [entry.name for entry in path.iterdir()]
    return MANIFEST in names or (bool(names) and all(map(is_ours, names)))


def remove(path: Path) -> None:
    """Deletes a checkpoint: at once from under its name, and a kill leaves the rest to `sweep`. What is none stays."""
    if path.is_dir() and is_checkpoint(path):
        disk.rename(path, beside(path, "removed", secrets.token_hex(4)))
    for entry in _leftovers(path):
        disk.remove_tree(entry)


def sweep(path: Path) -> None:
    """Deletes what killed saves and removals left beside the place of a checkpoint; the checkpoint itself may be one of these."""
    kept = find(path)
    for entry in _leftovers(path):
        if entry != kept:
            disk.remove_tree(entry)


def _leftovers(path: Path) -> list[Path]:
    return [entry for kind in KINDS for entry in siblings(path, kind)]


def begin(path: Path, token: str) -> Path:
    """Makes the directory in which the checkpoint is written, and removes what killed attempts left.

    Raises: CheckpointError where `path` holds something that is not a checkpoint, which saving would delete.
    """
    if path.exists() and not (path.is_dir() and (is_checkpoint(path) or not any(path.iterdir()))):
        raise CheckpointError(f"{path} exists and is not a Phalanx checkpoint; saving there would delete it", remedy="another directory")
    for stale in siblings(path, "saving"):
        disk.remove_tree(stale)
    growing = beside(path, "saving", token)
    disk.make_directory(growing)
    return growing


def finish(growing: Path, path: Path, token: str, marker: bytes) -> None:
    """Puts a written directory in its place, marks it complete, and only then deletes what it replaces."""
    unfinished = f".{MARKER}"  # the marker appears by a rename, so that it is never there in part
    disk.write_file(growing / unfinished, marker)
    aside = beside(path, "old", token)
    try:
        if path.exists():
            disk.rename(path, aside)
        disk.rename(growing, path)
        disk.rename(path / unfinished, path / MARKER)
    except OSError:
        # A rename may have happened although flushing it failed: go by what is there.
        if path.exists() and not growing.exists():
            disk.rename(path, growing)
        if aside.exists():
            disk.rename(aside, path)
        raise
    for old in siblings(path, "old"):
        try:
            disk.remove_tree(old)
        except OSError as error:
            get_logger().warning("%s is saved; the one it replaces is still in %s (%s), the next save removes it", path, old, error)


def abandon(path: Path, token: str) -> None:
    """Removes what a failed save left; failing disks may keep it, and the next save removes it."""
    shutil.rmtree(beside(path, "saving", token), ignore_errors=True)


def find(path: Path) -> Path:
    """The directory to load: the checkpoint itself, or the complete one that a killed save had moved aside.

    Raises: CheckpointError that says what is wrong with `path`.
    """
    if (path / MARKER).exists():
        return path
    complete = [old for old in siblings(path, "old") if (old / MARKER).exists()]
    if complete:
        return max(complete, key=lambda old: (old / MARKER).stat().st_mtime_ns)
    return path
