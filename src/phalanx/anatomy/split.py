"""How the features of one tensor belong to the parts that tensor parallelism hands out: pure arithmetic.

An *atom* is the smallest thing that can be given to a rank: a head of an attention, a feature of an MLP. Features are counted along
the dimension that is cut. A fused projection, an interleaved one and a plain one differ only in their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.layout import split_range

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `width` features from feature `start` on; block b belongs to the `span` atoms from `first + b * span` on."""

    start: int
    count: int
    width: int
    first: int
    span: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.width

    def owned(self, low: int, high: int) -> tuple[int, int]:
        """The blocks, as a range, that belong to any of the atoms low to high."""
        begin = max(0, (low - self.first) // self.span)
        end = min(self.count, -((self.first - high) // self.span))
        return begin, max(begin, end)

    def scaled(self, factor: int, *, atoms: bool) -> Blocks:
        """The blocks of a model `factor` times as wide: with as many more atoms, or the same atoms and wider blocks."""
        if atoms:
            return Blocks(self.start * factor, self.count * factor, self.width, self.first * factor, self.span)
        return Blocks(self.start * factor, self.count, self.width * factor, self.first, self.span)


@dataclass(frozen=True)
class Split:
    """The blocks of one dimension, in order; together they cover it."""

    blocks: tuple[Blocks, ...]

    @property
    def size(self) -> int:
        return self.blocks[-1].stop

    @classmethod
    def even(cls, atoms: int, width: int = 1) -> Split:
        """Atom after atom, `width` features each."""
        return cls((Blocks(0, atoms, width, 0, 1),))

    @classmethod
    def from_owners(cls, owners: Sequence[tuple[int, int]]) -> Split:
        """From each feature's half-open range of atoms."""
        merged: list[list[int]] = []  # start, width, low, high
        for feature, (low, high) in enumerate(owners):
            if merged and merged[-1][2:] == [low, high]:
                merged[-1][1] += 1
            else:
                merged.append([feature, 1, low, high])
        blocks: list[Blocks] = []
        for start, width, low, high in merged:
            last = blocks[-1] if blocks else None
            follows = last is not None and (last.width, last.span, last.first + last.count * last.span) == (width, high - low, low)
            if follows:
                assert last is not None
                blocks[-1] = Blocks(last.start, last.count + 1, width, last.first, last.span)
            else:
                blocks.append(Blocks(start, 1, width, low, high - low))
        return cls(tuple(blocks))

    def ranges(self, low: int, high: int) -> Ranges:
        """The features that a rank with the atoms low to high needs, as half-open ranges in order."""
        found: list[tuple[int, int]] = []
        for blocks in self.blocks:
            begin, end = blocks.owned(low, high)
            if begin < end:
                start, stop = blocks.start + begin * blocks.width, blocks.start + end * blocks.width
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, stop))
        return tuple(found)

    def is_shared(self, low: int, high: int) -> bool | None:
        """Whether what the rank needs belongs to others as well: False for nothing of it, True for all of it, None for a part."""
        shared = set()
        for blocks in self.blocks:
            for block in range(*blocks.owned(low, high)):
                atom = blocks.first + block * blocks.span
                shared.add(atom < low or atom + blocks.span > high)
        return shared.pop() if len(shared) == 1 else None if shared else False

    def scaled(self, factor: int, *, atoms: bool) -> Split:
        return Split(tuple(blocks.scaled(factor, atoms=atoms) for blocks in self.blocks))


def num_features(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def allot(atoms: int, group: int, parts: int, index: int) -> tuple[int, int]:
    """The atoms of part `index`: whole groups of `group` atoms while there are enough, else a part of one group.

    Heads that share a key and value head form a group, and what runs on one rank must have as many of them in every group.
    """
    groups = atoms // group
    if groups >= parts:
        low, high = split_range(groups, parts, index)
        return low * group, high * group
    for number in range(groups):
        first, last = split_range(parts, groups, number)
        if first <= index < last:
            low, high = split_range(group, last - first, index - first)
            return number * group + low, number * group + high
    raise AssertionError("every part lies in a group")
