"""Weights as the safetensors directories that `transformers` writes and reads: `model.safetensors`, or shards with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from phalanx.checkpoint import disk, shard_file
from phalanx.checkpoint.filling import Target, fill, overlaps
from phalanx.checkpoint.names import with_nearest
from phalanx.checkpoint.shard_file import DTYPES, Item, ShardFile
from phalanx.errors import CheckpointError
from phalanx.layout import Layout, Piece

MAX_SHARD_BYTES = 1 << 30
METADATA = {"format": "pt"}


def write_safetensors(
    directory: str | os.PathLike,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    tied: Collection[str] = (),
    metadata: Mapping[str, str] = METADATA,
    stem: str = "model",
) -> list[Path]:
    """Writes full tensors by name, as they come, into files of at most `max_shard_bytes` each (a larger tensor has its own).

    Names in `tied` are left out: they are second names of a tensor that is stored under its first. Files are cut and named as
    `transformers` does, and take the place of those of an earlier export once all are written. Only the rank that writes calls this.
    Cost: memory of one shard, plus the tensor that comes next.
    Raises: CheckpointError for a name that comes twice, and where a write fails; the earlier export is then still there.
    """
    folder, skipped = Path(directory), set(tied)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _Shards(folder, stem, metadata)
    try:
        for name, tensor in tensors:
            if name not in skipped:
                shards.add(Item.whole(name, tensor), max_shard_bytes)
        shards.flush()
        return _put_in_place(folder, stem, shards)
    except OSError as error:
        raise CheckpointError(f"exporting to {folder} failed ({error.strerror or error})") from error
    finally:
        for path, _ in shards.staged:
            path.unlink(missing_ok=True)


class _Shards:
    """Collects tensors until they make a file, and writes files under names that nobody reads yet."""

    def __init__(self, folder: Path, stem: str, metadata: Mapping[str, str]):
        self._folder, self._stem, self._metadata = folder, stem, metadata
        self._group: list[Item] = []
        self._group_bytes = 0
        self._seen: set[str] = set()
        self.staged: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0

    def add(self, item: Item, max_shard_bytes: int) -> None:
        if item.key in self._seen:
            raise CheckpointError(f"{item.key} comes twice", remedy="give the second names of tied weights as `tied`")
        self._seen.add(item.key)
        self.total_bytes += item.num_bytes
        if item.num_bytes > max_shard_bytes:
            self._write([item])
            return
        if self._group_bytes + item.num_bytes > max_shard_bytes:
            self._write(self._group)
            self._group, self._group_bytes = [], 0
        self._group.append(item)
        self._group_bytes += item.num_bytes

    def flush(self) -> None:
        """Writes what is left; one file even if there is nothing at all."""
        if self._group or not self._seen:
            self._write(self._group)

    def _write(self, group: list[Item]) -> None:
        path = self._folder / f".{self._stem}-{len(self.staged):05d}.saving"
        self.staged.append((path, [item.key for item in group]))
        shard_file.write(path, group, self._metadata)


def _put_in_place(folder: Path, stem: str, shards: _Shards) -> list[Path]:
    """Renames finished files, writes the index last, and removes files of an earlier export that are not replaced."""
    count, weight_map, final = len(shards.staged), {}, []
    for number, (path, names) in enumerate(shards.staged, start=1):
        file = f"{stem}-{number:05d}-of-{count:05d}.safetensors" if count > 1 else f"{stem}.safetensors"
        disk.rename(path, folder / file)
        final.append(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = _index_path(folder, stem)
    if count > 1:
        content = {"metadata": {"total_size": shards.total_bytes}, "weight_map": weight_map}
        temporary = folder / f".{index.name}.saving"
        disk.write_file(temporary, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
        disk.rename(temporary, index)
    else:
        index.unlink(missing_ok=True)
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for entry in folder.iterdir():
        if ours.fullmatch(entry.name) and entry not in final:
            entry.unlink()
    disk.flush_directory(folder)
    return final


def _index_path(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.safetensors.index.json"


class Weights:
    """The tensors of a safetensors directory by name; nothing but headers is read until a tensor is asked for."""

    def __init__(self, directory: str | os.PathLike, stem: str = "model"):
        self.directory = Path(directory)
        self._open: dict[str, ShardFile] = {}
        index, single = _index_path(self.directory, stem), self.directory / f"{stem}.safetensors"
        if index.exists():
            self._file_of = _read_index(index)
        elif single.exists():
            self._file_of = dict.fromkeys(self._shard(single.name).tensors, single.name)
        else:
            raise CheckpointError(f"{self.directory} holds no {single.name} and no {index.name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full tensor) one after the other, file by file."""
        for name in sorted(self._file_of, key=lambda name: self._file_of[name]):
            yield name, self.read(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        stored = self._find(name).tensors[name].dtype
        if stored not in DTYPES:
            raise CheckpointError(f"{name} in {self.directory} has dtype {stored}, which is not known here", allowed=", ".join(DTYPES))
        return DTYPES[stored]

    def read(self, name: str) -> torch.Tensor:
        """One full tensor, on the host."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self._find(name).read_into(name, 0, tensor.reshape(-1))
        return tensor

    def fill(self, piece: Piece, *, cast: bool = False) -> None:
        """Fills a piece from the tensor of its name. Cost: reads the windows of 4 MiB that hold its elements.

        Raises: CheckpointError where the name is missing, or shape or dtype (without `cast`) differ.
        """
        shape, dtype = self.shape(piece.name), self.dtype(piece.name)
        if shape != piece.layout.shape:
            raise CheckpointError(f"{piece.name} in {self.directory} has shape {shape} and is wanted with shape {piece.layout.shape}")
        if dtype != piece.tensor.dtype and not cast:
            found = f"{piece.name} in {self.directory} is {dtype} and is wanted as {piece.tensor.dtype}"
            raise CheckpointError(found, remedy="cast=True, which converts")
        target = Target(piece.tensor)
        for _, overlap in overlaps(piece.layout, [Layout.whole(shape)]):
            fill(target.flat, self._find(piece.name), piece.name, overlap)
        target.close()

    def close(self) -> None:
        for shard in self._open.values():
            shard.close()
        self._open.clear()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shard(self, file: str) -> ShardFile:
        if file not in self._open:
            self._open[file] = ShardFile(self.directory / file)
        return self._open[file]

    def _find(self, name: str) -> ShardFile:
        if name not in self._file_of:
            raise CheckpointError(f"{self.directory} does not hold {with_nearest([name], list(self._file_of))}")
        shard = self._shard(self._file_of[name])
        if name not in shard.tensors:
            raise CheckpointError(f"{shard.path} does not hold {name}, which the index places there")
        return shard


def read_safetensors(directory: str | os.PathLike, stem: str = "model") -> Weights:
    """Opens a safetensors directory. Raises: CheckpointError where it has none, or a file is damaged."""
    return Weights(directory, stem)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(path.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files ({error!r})") from error
    elsewhere = [file for file in weight_map.values() if Path(file).name != file]
    if elsewhere:
        raise CheckpointError(f"{path} names a file elsewhere ({elsewhere[0]})")
    return weight_map
