"""Where the elements of a logical tensor lie: pure arithmetic, and the protocols through which folders of one floor meet.

A *logical* tensor is the one of the single-device program. A rank holds a *box* of it (a slice in every dimension, which
tensor parallelism cuts) and of that box, flattened in row-major order, a *run* of consecutive elements (which ZeRO cuts).
Box and run together are enough to save, load, reshard and export any tensor under any plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

Box = tuple[tuple[int, int], ...]


def split_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of `total` things that part `index` of `parts` owns: contiguous, sizes differ by at most one."""
    small, rest = divmod(total, parts)
    start = index * small + min(index, rest)
    return start, start + small + (index < rest)


def split_sizes(total: int, parts: int) -> list[int]:
    """The sizes of all parts of `split_range`, in order; parts beyond `total` are 0."""
    small, rest = divmod(total, parts)
    return [small + (index < rest) for index in range(parts)]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """The logical shape of one tensor and the part of it that this rank holds.

    Shapes: `shape` is logical; `box` has one (start, stop) per dimension, `run` is (start, stop) in the flattened box.
    """

    shape: tuple[int, ...]
    box: Box
    run: tuple[int, int]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Layout:
        """The layout of a tensor that is held in full."""
        shape = tuple(shape)
        return cls(shape, tuple((0, size) for size in shape), (0, math.prod(shape)))

    def with_run(self, start: int, stop: int) -> Layout:
        """The same box, cut to the elements start to stop of its row-major order."""
        return Layout(self.shape, self.box, (start, stop))

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def num_elements(self) -> int:
        return self.run[1] - self.run[0]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yields (local offset, logical flat offset, length) of maximal pieces that are contiguous in both orders.

        Cost: one item per innermost row of the box where the box cuts an inner dimension, else one item in all.
        """
        shape, box, inner = self.shape, self.box_shape, len(self.shape)
        length = 1
        while inner > 0 and box[inner - 1] == shape[inner - 1]:
            inner -= 1
            length *= shape[inner]
        if inner > 0:
            inner -= 1
            length *= box[inner]
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        position, (start, stop) = start_of_row(self.run[0], length), self.run
        while position < stop and length:
            row = position // length
            logical = self.box[inner][0] * strides[inner] if inner < len(shape) else 0
            for dim in reversed(range(inner)):
                row, at = divmod(row, box[dim])
                logical += (self.box[dim][0] + at) * strides[dim]
            first, last = max(position, start), min(position + length, stop)
            yield first - start, logical + first - position, last - first
            position += length


def start_of_row(position: int, length: int) -> int:
    """The first element of the row of `length` elements that holds `position`."""
    return position // length * length if length else position


@dataclass
class Piece:
    """A tensor on this rank, with its logical name and place: what checkpoints write and read.

    Shapes: `tensor` has `layout.num_elements` elements, in row-major order of the box. `owned` is False where another
    rank holds the same elements and writes them.
    """

    name: str
    tensor: torch.Tensor
    layout: Layout
    owned: bool = True


@runtime_checkable
class LocalShard(Protocol):
    """What `memory` hands to `optim`: one parameter's elements that this rank updates.

    `tensor` is what the optimizer holds (full precision, its `.grad` filled before a step); `counts_in_norm` is True on exactly
    one rank for each logical element, so that a global sum over ranks counts each once.
    """

    name: str
    tensor: torch.nn.Parameter
    layout: Layout
    counts_in_norm: bool
