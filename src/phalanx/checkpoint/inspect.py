"""What a checkpoint directory holds, without loading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import directory, manifest
from phalanx.checkpoint.files import Files
from phalanx.checkpoint.manifest import STATE, local_name
from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class Summary:
    """What is worth knowing about a checkpoint; `tensors` gives dtype, logical shape and number of saved parts by name.

    Units: `saved_at_s` in seconds since 1970; `num_bytes` as on disk.
    """

    path: Path
    phalanx: str
    saved_at_s: float
    world: int
    num_files: int
    num_bytes: int
    num_elements: int
    tensors: dict[str, tuple[str, tuple[int, ...], int]]


def show(path: str | os.PathLike) -> Summary:
    """A summary of a complete checkpoint. Cost: reads its manifest and the sizes of its files.

    Raises: CheckpointError where it is missing, incomplete, foreign, or its files do not have their sizes.
    """
    target = directory.resolve(path)
    saved = manifest.read(directory.find(target))
    return Summary(
        path=target,
        phalanx=saved.phalanx,
        saved_at_s=saved.saved_at_s,
        world=saved.world,
        num_files=len(saved.files),
        num_bytes=sum(file.num_bytes for file in saved.files.values()),
        num_elements=sum(tensor.num_elements for tensor in saved.tensors.values()),
        tensors={name: (tensor.dtype, tensor.shape, len(tensor.pieces)) for name, tensor in saved.tensors.items()},
    )


def check(path: str | os.PathLike) -> list[str]:
    """Everything that is wrong with a checkpoint, one line each; empty if it is sound. Cost: reads all of it."""
    source = directory.find(directory.resolve(path))
    try:
        saved = manifest.read(source)
    except CheckpointError as error:
        return [str(error)]
    wrong = []
    with Files(source, saved) as files:
        parts = [part for tensor in saved.tensors.values() for part in tensor.pieces]
        for part in sorted(parts, key=lambda part: (part.file, part.key)):
            try:
                files.require_sound(part.file, part.key, part.checksum)
            except CheckpointError as error:
                wrong.append(str(error))
        for name in [STATE, *(local_name(index) for index in range(saved.world))]:
            try:
                files.read_state(name)
            except CheckpointError as error:
                wrong.append(str(error))
    return list(dict.fromkeys(wrong))


def checkpoints(folder: str | os.PathLike) -> list[Summary]:
    """The checkpoints in a directory that can be loaded, oldest first by the time they were saved (names may lie)."""
    where = Path(folder)
    if not where.is_dir():
        raise CheckpointError(f"there is no directory {where}")
    found = []
    for name in sorted({directory.name_of(entry) for entry in where.iterdir()}):
        try:
            found.append(show(where / name))
        except CheckpointError:
            continue  # a listing of what can be loaded; `show` says what is wrong with the others
    return sorted(found, key=lambda summary: summary.saved_at_s)
