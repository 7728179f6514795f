"""Gathers and scattered sums over the grid, begun at once and finished where their result is needed; without a gradient.

Parts of unequal sizes travel exactly: no padding is moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis


class Gathering:
    """The blocks of all ranks on their way here; they differ in their size along `dim` alone.

    Cost: n - 1 blocks sent.
    """

    def __init__(self, block: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int]):
        self.dim = dim % block.dim()
        self.own = block if axis.size == 1 else block.contiguous()
        self.shapes = [_with_size(block.shape, self.dim, size) for size in sizes]
        if axis.size == 1:
            return
        self.counts = [math.prod(shape) for shape in self.shapes]
        self.out = block.new_empty(sum(self.counts))
        if min(self.counts) == max(self.counts):
            self.pending = comm.all_gather(self.out, self.own, axis, wait=False)
        else:
            sent = self.own.view(-1).repeat(axis.size)
            self.pending = comm.all_to_all(self.out, sent, axis, self.counts, [self.own.numel()] * axis.size, wait=False)

    def blocks(self) -> list[torch.Tensor]:
        """All blocks in the order of the axis."""
        if len(self.shapes) == 1:
            return [self.own]
        self.pending.wait()
        return [part.view(shape) for part, shape in zip(self.out.split(self.counts), self.shapes, strict=True)]

    def joined(self) -> torch.Tensor:
        """The blocks side by side along `dim`: no copy where no other dimension is before it."""
        if len(self.shapes) == 1:
            return self.own
        if _leads(self.own.shape, self.dim):
            self.pending.wait()
            return self.out.view(_with_size(self.own.shape, self.dim, sum(shape[self.dim] for shape in self.shapes)))
        return torch.cat(self.blocks(), self.dim)


class Summing:
    """Block i of every rank on its way to rank i, where they are added up in the order of the ranks.

    Cost: n - 1 blocks sent.
    """

    def __init__(self, blocks: Sequence[torch.Tensor], axis: Axis, full: torch.Tensor | None = None):
        self.own = blocks[axis.index]
        self.axis = axis
        if axis.size == 1:
            return
        counts = [block.numel() for block in blocks]
        if full is None:
            full = torch.cat([block.reshape(-1) for block in blocks])
        self.is_even = min(counts) == max(counts)
        if self.is_even:
            self.out = full.new_empty(self.own.shape)
            self.pending = comm.reduce_scatter(self.out, full, axis, wait=False)
        else:
            self.out = full.new_empty(axis.size, *self.own.shape)
            self.pending = comm.all_to_all(self.out.view(-1), full, axis, [self.own.numel()] * axis.size, counts, wait=False)

    @classmethod
    def along(cls, whole: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Summing:
        """The parts of a contiguous tensor along one dimension: no copy where no other dimension is before it."""
        return cls(whole.split(list(sizes), dim), axis, whole.view(-1) if _leads(whole.shape, dim) else None)

    def result(self) -> torch.Tensor:
        if self.axis.size == 1:
            return self.own
        self.pending.wait()
        return self.out if self.is_even else self.out.sum(0)


class Adding:
    """The sum over the axis of what each rank has, on its way in place. Cost: 2 (n - 1)/n of it."""

    def __init__(self, whole: torch.Tensor, axis: Axis):
        self.whole = whole
        self.pending = comm.all_reduce(whole, axis, wait=False)

    def result(self) -> torch.Tensor:
        self.pending.wait()
        return self.whole


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether parts along a dimension follow one another in memory."""
    return math.prod(shape[:dim]) == 1


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    changed = list(shape)
    changed[dim] = size
    return changed
