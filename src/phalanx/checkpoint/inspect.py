"""What checkpoints hold and whether they are whole, without loading them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import directory, manifest
from phalanx.checkpoint.files import Files
from phalanx.checkpoint.manifest import STATE, Manifest, SavedPiece, local_name
from phalanx.checkpoint.series import step_of
from phalanx.checkpoint.shard_file import DTYPES
from phalanx.errors import CheckpointError, DamageError

Fact = str | int | float | bool


@dataclass(frozen=True)
class Summary:
    """What is worth knowing about a checkpoint; `tensors` gives dtype, logical shape and number of saved parts by name.

    `facts` are the plain values of its state: of a run, its plan and its step. Units: `saved_at_s` in seconds since 1970;
    `num_bytes` as on disk.
    """

    path: Path
    phalanx: str
    saved_at_s: float
    world: int
    facts: dict[str, Fact]
    num_files: int
    num_bytes: int
    num_elements: int
    tensors: dict[str, tuple[str, tuple[int, ...], int]]


def show(path: str | os.PathLike) -> Summary:
    """A summary of a complete checkpoint. Cost: reads its manifest, its shared state and the sizes of its files.

    Raises: DamageError where it is incomplete, or what is read is damaged; CheckpointError where it is missing or foreign.
    """
    target = directory.resolve(path)
    source = directory.find(target)
    saved = manifest.read(source)
    return Summary(
        path=target,
        phalanx=saved.phalanx,
        saved_at_s=saved.saved_at_s,
        world=saved.world,
        facts=_facts(source, saved),
        num_files=len(saved.files),
        num_bytes=sum(file.num_bytes for file in saved.files.values()),
        num_elements=sum(tensor.num_elements for tensor in saved.tensors.values()),
        tensors={name: (tensor.dtype, tensor.shape, len(tensor.pieces)) for name, tensor in saved.tensors.items()},
    )


def _facts(source: Path, saved: Manifest) -> dict[str, Fact]:
    with Files(source, saved) as files:
        return {name: value for name, value in files.read_state(STATE).items() if isinstance(value, Fact)}


def check(path: str | os.PathLike, progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None) -> list[str]:
    """Everything that is wrong with a checkpoint, one line each; empty if it is sound. Cost: reads all of it.

    `progress` is told how much has been read of how much there is.
    Raises: CheckpointError where there is no checkpoint.
    """
    source = directory.find(directory.resolve(path))
    try:
        saved = manifest.read(source)
    except DamageError as error:
        return [error.found]
    sized = [(part, _num_bytes(tensor.dtype, part)) for tensor in saved.tensors.values() for part in tensor.pieces]
    total_bytes, done_bytes = sum(num_bytes for _, num_bytes in sized), 0
    wrong = []
    with Files(source, saved) as files:
        for part, num_bytes in sorted(sized, key=lambda entry: (entry[0].file, entry[0].key)):
            try:
                files.require_sound(part.file, part.key, part.checksum)
            except DamageError as error:
                wrong.append(error.found)
            done_bytes += num_bytes
            progress(done_bytes, total_bytes)
        for name in [STATE, *(local_name(index) for index in range(saved.world))]:
            try:
                files.read_state(name)
            except DamageError as error:
                wrong.append(error.found)
    return list(dict.fromkeys(wrong))


def _num_bytes(dtype: str, part: SavedPiece) -> int:
    return part.layout.num_elements * DTYPES[dtype].itemsize


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a listing, or what is left of one: `fault` says what is wrong with it, as far as that is known unread.

    Units: `saved_at_s` in seconds since 1970; `num_bytes` as on disk.
    """

    path: Path
    step: int | None
    saved_at_s: float
    num_bytes: int
    plan: str | None
    fault: str | None


def listing(folder: str | os.PathLike) -> list[Listed]:
    """The checkpoints in a folder and what killed saves left of some, by the time they were saved (names may lie).

    Cost: reads manifests, shared states and the sizes of files. Raises: CheckpointError where there is no such folder.
    """
    where = Path(folder)
    if not where.is_dir():
        raise CheckpointError(f"there is no folder {where}", allowed=ALLOWED, remedy=REMEDY)
    entries = [entry for entry in where.iterdir() if entry.is_dir() and directory.is_checkpoint(entry)]
    found = [_listed(where / name, entries) for name in {directory.name_of(entry) for entry in entries}]
    return sorted(found, key=lambda listed: listed.saved_at_s)


def _listed(path: Path, entries: list[Path]) -> Listed:
    try:
        summary = show(path)
    except CheckpointError as error:
        left = [entry for entry in entries if directory.name_of(entry) == path.name]
        fault = error.found if path in left else f"{path} is incomplete: saving or removing it did not finish"
        num_bytes = sum(file.stat().st_size for entry in left for file in entry.iterdir())
        saved_at_s = max(entry.stat().st_mtime for entry in left)
        return Listed(path, step_of(path.name), saved_at_s, num_bytes, None, fault)
    step, plan = summary.facts.get("step", step_of(path.name)), summary.facts.get("plan")
    return Listed(path, step, summary.saved_at_s, summary.num_bytes, plan, None)  # type: ignore[arg-type]


ALLOWED = "a checkpoint, a folder of checkpoints, or the folder of a run"
REMEDY = "phalanx checkpoint list runs/NAME"


def find_all(path: str | os.PathLike) -> list[Listed]:
    """The checkpoints that a path means: itself, or those in it or in its folder `checkpoints`, by the time they were saved.

    Raises: CheckpointError where it means none.
    """
    where = directory.resolve(path)
    alone = [entry for entry in (where, *directory.siblings(where, "old")) if entry.is_dir() and directory.is_checkpoint(entry)]
    found = [_listed(where, alone)] if alone else listing(series_folder(where))
    if not found:
        raise CheckpointError(f"{where} holds no checkpoint", allowed=ALLOWED, remedy=REMEDY)
    return found


def series_folder(path: str | os.PathLike) -> Path:
    """Where the checkpoints of a run lie, given its folder; a folder that is not a run's is itself meant."""
    inside = Path(path) / "checkpoints"
    return inside if inside.is_dir() else Path(path)
