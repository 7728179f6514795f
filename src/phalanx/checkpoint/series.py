"""The checkpoints of a run, a directory for each step that was saved: which is the newest whole one, and which may go."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import directory
from phalanx.checkpoint.disk import MARKER
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import DamageError
from phalanx.log import get_logger


def step_of(name: str) -> int | None:
    """The step that the name of a checkpoint tells, if it is one of a series."""
    match = re.fullmatch(r"step-(\d+)", name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Series:
    """The checkpoints in one folder, by step."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def paths(self) -> dict[int, Path]:
        """step -> where its checkpoint stands or should stand, first steps first, also of what killed saves left."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        names = {directory.name_of(entry) for entry in entries if entry.is_dir() and _is_of_a_checkpoint(entry)}
        found = {step: self.folder / name for name in names if (step := step_of(name)) is not None}
        return dict(sorted(found.items()))

    def load_newest(self, load: Callable[[Path], None], axis: Axis) -> int | None:
        """Loads the newest whole checkpoint, collectively, and returns its step, or None where no save has finished yet.

        One that is half-written or damaged is passed over with a warning; one that is whole but does not fit is not.
        Raises: DamageError on all ranks where saves have finished and all of them are damaged; whatever `load` raises otherwise.
        """
        damage: DamageError | None = None
        for step, path, finished in comm.broadcast_object(self._newest_first(), axis):
            if not finished:
                _warn(axis, f"passing over {path}: saving it did not finish")
                continue
            try:
                load(path)
                return step
            except DamageError as error:
                _warn(axis, f"passing over {path}: {error.found}")
                damage = damage or error
        if damage is None:
            return None
        found = f"every checkpoint in {self.folder} is damaged: {damage.found}"
        raise DamageError(found, remedy="undamaged copies of the files, or another folder to start anew") from damage

    def prune(self, newest: int, *, keep_last: int, keep_every: int) -> None:
        """Removes old checkpoints once that of step `newest` is complete; one rank calls this.

        There stay the `keep_last` newest complete ones up to `newest` (0: all), those of each multiple of `keep_every` (0: none),
        and those of later steps, which a run that went back to an earlier one will replace. A disk that fails to remove is told
        in the log and tried again after the next save.
        """
        paths = self.paths()
        complete = [step for step, path in paths.items() if step <= newest and _is_finished(path)]
        kept = {step for step in complete if keep_every and step % keep_every == 0} | {*complete[-keep_last:], newest}
        for step, path in paths.items():
            try:
                # A link was put there by a person, and what it leads to is theirs.
                if keep_last and step < newest and step not in kept and not path.is_symlink():
                    directory.remove(path)
                else:
                    directory.sweep(path)
            except OSError as error:
                get_logger().warning("%s could not be removed (%s); the next save tries again", path, error)

    def _newest_first(self) -> list[tuple[int, Path, bool]]:
        return [(step, path, _is_finished(path)) for step, path in reversed(self.paths().items())]


def _is_of_a_checkpoint(entry: Path) -> bool:
    """Whether a directory is a checkpoint or was moved aside from one; a directory of a person's own is neither."""
    return directory.name_of(entry) != entry.name or directory.is_checkpoint(entry)


def _is_finished(path: Path) -> bool:
    """Whether saving it has finished, wherever it is now."""
    return (directory.find(path) / MARKER).exists()


def _warn(axis: Axis, text: str) -> None:
    if axis.index == 0:
        get_logger().warning(text)
