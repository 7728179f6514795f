"""Brings saved elements into tensors: only the windows of a file that hold wanted elements are read."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.checkpoint import spans
from phalanx.checkpoint.shard_file import DTYPES, ShardFile
from phalanx.layout import Layout

WINDOW_BYTES = 4 << 20


class Target:
    """A tensor to fill, seen as one flat run of elements, on whatever device it is.

    Cost: a copy of the tensor where it is not contiguous, else nothing.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach()
        self.flat = self._tensor.reshape(-1) if self._tensor.is_contiguous() else torch.empty_like(self._tensor).flatten()

    def close(self) -> None:
        """Writes back a copy."""
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self.flat.view(self._tensor.shape))


def fill(flat: torch.Tensor, shard: ShardFile, key: str, overlap: np.ndarray) -> None:
    """Copies the elements that `spans.overlap` names from a tensor of a file to `flat`, converting the dtype if they differ.

    Cost: one window of memory; no more than the windows that hold wanted elements are read.
    """
    dtype = DTYPES[shard.tensors[key].dtype]
    window = WINDOW_BYTES // dtype.itemsize
    staging = torch.empty(0, dtype=dtype)
    for group in spans.cut(overlap, window):
        first = int(group[0, 1])
        count = int(group[-1, 1] + group[-1, 2]) - first
        if len(group) == 1 and flat.device.type == "cpu" and flat.dtype == dtype:
            start = int(group[0, 0])
            shard.read_into(key, first * dtype.itemsize, flat[start : start + count])
            continue
        if staging.numel() < count:
            staging = torch.empty(count, dtype=dtype)
        shard.read_into(key, first * dtype.itemsize, staging[:count])
        for (to, start, length), repeats, step in spans.strided(group):
            target = _rows(flat, int(to), int(length), repeats, int(step[0]))
            target.copy_(_rows(staging, int(start) - first, int(length), repeats, int(step[1])))


def _rows(flat: torch.Tensor, start: int, length: int, count: int, step: int) -> torch.Tensor:
    """`count` rows of `length` elements of a flat tensor, `step` elements apart."""
    return flat.as_strided((count, length), (step, 1), flat.storage_offset() + start)


def overlaps(wanted: Layout, saved: list[Layout]) -> list[tuple[int, np.ndarray]]:
    """The saved layouts, by index, that share elements with the wanted one, and which elements.

    Cost: a few microseconds for each saved layout that shares none.
    """
    table, bounds = spans.table(wanted), spans.bounds(wanted)
    found = []
    for index, layout in enumerate(saved):
        if layout.box == wanted.box:
            overlap = _same_box(wanted, layout)
        elif _may_meet(wanted, bounds, layout):
            overlap = spans.overlap(table, spans.table(layout))
        else:
            continue
        if len(overlap):
            found.append((index, overlap))
    return found


def _same_box(wanted: Layout, saved: Layout) -> np.ndarray:
    """Two runs of one box have one range in common, whatever the box is."""
    first, last = max(wanted.run[0], saved.run[0]), min(wanted.run[1], saved.run[1])
    rows = [[first - wanted.run[0], first - saved.run[0], last - first]] if first < last else []
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _may_meet(wanted: Layout, bounds: tuple[int, int], saved: Layout) -> bool:
    """False where boxes or the first and last elements of the runs show that there is nothing in common."""
    if not wanted.num_elements or not saved.num_elements:
        return False
    if any(mine[0][0] >= theirs[-1][1] or theirs[0][0] >= mine[-1][1] for mine, theirs in zip(wanted.box, saved.box)):
        return False
    first, last = spans.bounds(saved)
    return first <= bounds[1] and bounds[0] <= last
