"""Where the elements of a logical tensor lie: pure arithmetic, and the protocols through which folders of one floor meet.

A *logical* tensor is the one of the single-device program. A rank holds a *box* of it (a slice in every dimension, which
tensor parallelism cuts) and of that box, flattened in row-major order, a *run* of consecutive elements (which ZeRO cuts).
Box and run together are enough to save, load, reshard and export any tensor under any plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from phalanx.errors import ShapeError

Range = tuple[int, int]
Box = tuple[tuple[Range, ...], ...]
# The attribute by which a tensor that only shows a shape says which one has its values here, and its gradient.
STANDS_FOR = "_phalanx_stands_for"


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

    Shapes: `shape` is logical; `box` has ascending ranges (start, stop) for each dimension, one as a rule, several where a dimension
    is made of fused parts that are cut each; `run` is (start, stop) in the flattened box. A single range may be given bare.
    """

    shape: tuple[int, ...]
    box: Box
    run: Range

    def __post_init__(self) -> None:
        object.__setattr__(self, "box", tuple(_as_ranges(dimension) for dimension in self.box))
        edges = [[0, *itertools.chain(*ranges), size] for size, ranges in zip(self.shape, self.box, strict=True)]
        if any(here > there for dimension in edges for here, there in itertools.pairwise(dimension)):
            raise ShapeError(f"the box {self.box} of a tensor of shape {self.shape}", allowed="ascending ranges within each dimension")
        if not 0 <= self.run[0] <= self.run[1] <= math.prod(self.box_shape):
            raise ShapeError(f"the run {self.run} of a box of shape {self.box_shape}", allowed="a range of its elements")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Layout:
        """The layout of a tensor that is held in full."""
        return cls.of_box(shape, [(0, size) for size in shape])

    @classmethod
    def of_box(cls, shape: Sequence[int], box: Sequence[Range | Sequence[Range]]) -> Layout:
        """The layout of a box that is held in full."""
        ranges = tuple(_as_ranges(dimension) for dimension in box)
        return cls(tuple(shape), ranges, (0, math.prod(_extent(dimension) for dimension in ranges)))

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, *ranges: Range) -> Layout:
        """The layout of a tensor cut along one dimension alone."""
        return cls.of_box(shape, [ranges if at == dim % len(shape) else (0, size) for at, size in enumerate(shape)])

    def with_run(self, start: int, stop: int) -> Layout:
        """The same box, cut to the elements start to stop of its row-major order."""
        return Layout(self.shape, self.box, (start, stop))

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(_extent(dimension) for dimension in self.box)

    @property
    def num_elements(self) -> int:
        return self.run[1] - self.run[0]

    @property
    def is_whole(self) -> bool:
        return self.run == (0, math.prod(self.shape))

    @property
    def has_first(self) -> bool:
        """Whether the first element of the logical tensor is here; of a tensor without elements, every holder has it."""
        begins = self.run[0] == 0 and all(ranges and ranges[0][0] == 0 for ranges in self.box)
        return begins and (self.num_elements > 0 or math.prod(self.shape) == 0)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The box of a full tensor; a view where each dimension has one range.

        Shapes: `shape` -> `box_shape`.
        """
        for dim, ranges in enumerate(self.box):
            parts = [full.narrow(dim, start, stop - start) for start, stop in ranges]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return full

    def put(self, full: torch.Tensor, box: torch.Tensor) -> None:
        """Writes the box into a full tensor: the inverse of `take`."""
        for place in itertools.product(*(_with_offsets(ranges) for ranges in self.box)):
            target, source = full, box
            for dim, (start, offset, size) in enumerate(place):
                target, source = target.narrow(dim, start, size), source.narrow(dim, offset, size)
            target.copy_(source)


def _as_ranges(dimension: Any) -> tuple[Range, ...]:
    """One or several ranges, as a tuple of ranges; neighbours that touch are joined."""
    pairs = [dimension] if len(dimension) == 2 and isinstance(dimension[0], int) else dimension
    ranges: list[Range] = []
    for start, stop in pairs:
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)


def _extent(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _with_offsets(ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """For each range its (start, offset among the ranges, size)."""
    sizes = [stop - start for start, stop in ranges]
    return [(start, sum(sizes[:at]), sizes[at]) for at, (start, _) in enumerate(ranges)]


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


class PartState(Protocol):
    """What `memory` hands to a pipeline's table: the state of each part of a model, to be moved when the table says so."""

    def unshard(self, part: Hashable) -> None: ...

    def reshard(self, part: Hashable) -> None: ...

    def reduce(self, part: Hashable) -> None: ...
