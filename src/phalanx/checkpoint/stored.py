"""The tensors of a checkpoint one after the other, whole, whatever layout they were saved under; for one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from phalanx.checkpoint.files import Files
from phalanx.checkpoint.filling import fill, overlaps
from phalanx.checkpoint.manifest import SavedTensor
from phalanx.checkpoint.shard_file import BLOCK_BYTES, DTYPES, as_bytes
from phalanx.layout import Layout


@dataclass(frozen=True)
class StoredRun:
    """Elements start to stop of a saved tensor, read when they are asked for, to be stored under `key` with `shape`."""

    key: str
    shape: tuple[int, ...]
    start: int
    stop: int
    saved: SavedTensor
    files: Files

    @property
    def dtype(self) -> str:
        return self.saved.dtype

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.dtype].itemsize

    def blocks(self) -> Iterator[memoryview]:
        """Yields the bytes in blocks. Cost: memory of one block, and of one window of a file."""
        step = max(1, BLOCK_BYTES // DTYPES[self.dtype].itemsize)
        for first in range(self.start, self.stop, step):
            yield as_bytes(read_run(self.saved, self.files, first, min(first + step, self.stop)))


def read_whole(saved: SavedTensor, files: Files) -> torch.Tensor:
    """The whole tensor. Cost: its bytes."""
    return read_run(saved, files, 0, saved.num_elements).view(saved.shape)


def read_run(saved: SavedTensor, files: Files, start: int, stop: int) -> torch.Tensor:
    """Elements start to stop of the flattened tensor."""
    flat = torch.empty(stop - start, dtype=DTYPES[saved.dtype])
    layouts = [part.layout for part in saved.pieces]
    for index, overlap in overlaps(Layout.whole(saved.shape).with_run(start, stop), layouts):
        part = saved.pieces[index]
        fill(flat, files[part.file], part.key, overlap)
    return flat
