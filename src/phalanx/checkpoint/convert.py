"""Writes a checkpoint anew, with other files: each tensor in one part, in few large files or many small ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.checkpoint import directory, disk, manifest, shard_file
from phalanx.checkpoint.files import Files
from phalanx.checkpoint.inspect import check
from phalanx.checkpoint.manifest import MANIFEST, STATE, Manifest, SavedFile, SavedPiece, SavedTensor, local_name
from phalanx.checkpoint.shard_file import DTYPES
from phalanx.checkpoint.stored import StoredRun
from phalanx.checkpoint.writing import new_token
from phalanx.errors import CheckpointError, DamageError
from phalanx.layout import Layout

Progress = Callable[[int, int], None]


def require_sound(path: Path, progress: Progress = lambda done_bytes, total_bytes: None) -> tuple[Path, Manifest]:
    """Where a checkpoint is, and its manifest. Cost: reads all of it: damage must not get a new checksum.

    Raises: DamageError where something is wrong with it.
    """
    faults = check(path, progress)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise DamageError(faults[0] + more, remedy="an earlier checkpoint")
    source = directory.find(directory.resolve(path))
    return source, manifest.read(source)


def convert(path: str | os.PathLike, target: str | os.PathLike, max_file_bytes: int, progress: Progress = lambda done, total: None) -> None:
    """Writes the checkpoint at `path` anew at `target`, in files of at most `max_file_bytes` of data; all that it holds stays.

    `target` appears as a save does: at once, when it is complete. A checkpoint that is there already is replaced.
    Cost: reads the source twice; memory of one block of 1 MiB and a window of 4 MiB.
    Raises: DamageError where the source is damaged; CheckpointError where both are the same, or `target` holds something else.
    """
    where = directory.resolve(target)
    if where == directory.resolve(path):
        raise CheckpointError(f"{where} cannot be converted to itself", remedy=f"{where}-converted")
    source, saved = require_sound(directory.resolve(path), progress)
    token = new_token()
    growing = directory.begin(where, token)
    try:
        written = Manifest(world=saved.world, phalanx=saved.phalanx, saved_at_s=saved.saved_at_s)
        with Files(source, saved) as files:
            for number, group in enumerate(_groups(saved, files, max_file_bytes)):
                _write_file(growing, f"rank-00000-{number:05d}.safetensors", group, written)
        _copy_states(source, growing, saved, written)
        written.require_whole()
        encoded = written.to_json()
        disk.write_file(growing / MANIFEST, encoded)
        disk.flush_directory(growing)
        directory.finish(growing, where, token, manifest.marker(encoded))
    except OSError as error:
        directory.abandon(where, token)
        raise CheckpointError(f"writing {where} failed ({error.strerror or error})") from error
    except CheckpointError:
        directory.abandon(where, token)
        raise


Run = tuple[str, Layout, StoredRun]


def _groups(saved: Manifest, files: Files, max_file_bytes: int) -> Iterator[list[Run]]:
    """Yields what goes into one file after the other; a tensor that is larger is cut into runs."""
    group: list[Run] = []
    used = 0
    for name, tensor in saved.tensors.items():
        for run in _runs(name, tensor, files, max_file_bytes):
            if group and used + run[2].num_bytes > max_file_bytes:
                yield group
                group, used = [], 0
            group.append(run)
            used += run[2].num_bytes
    if group:
        yield group


def _runs(name: str, tensor: SavedTensor, files: Files, max_file_bytes: int) -> Iterator[Run]:
    whole, step = Layout.whole(tensor.shape), max(1, max_file_bytes // DTYPES[tensor.dtype].itemsize)
    for start in range(0, max(tensor.num_elements, 1), step):
        stop = min(start + step, tensor.num_elements)
        shape = tensor.shape if stop - start == tensor.num_elements else (stop - start,)
        # Runs of one tensor are as large as a file may be, all but the last one, so no two lie in the same file.
        yield name, whole.with_run(start, stop), StoredRun(name, shape, start, stop, tensor, files)


def _write_file(growing: Path, file: str, group: list[Run], written: Manifest) -> None:
    found = shard_file.write(growing / file, [run for _, _, run in group])
    written.files[file] = SavedFile(found.num_bytes, found.header_checksum)
    for name, layout, run in group:
        tensor = written.tensors.setdefault(name, SavedTensor(run.saved.dtype, run.saved.shape))
        tensor.pieces.append(SavedPiece(layout, file, run.key, found.checksums[run.key]))


def _copy_states(source: Path, growing: Path, saved: Manifest, written: Manifest) -> None:
    """What all ranks share and what each alone knows goes along as it is, so that the same number of ranks goes on bit for bit."""
    for name in (STATE, *(local_name(index) for index in range(saved.world))):
        for file in (f"{name}.json", f"{name}.safetensors"):
            if file in saved.files:
                shutil.copyfile(source / file, growing / file)
                with open(growing / file, "rb+", buffering=0) as copied:
                    disk.flush(copied)
                written.files[file] = saved.files[file]
