"""How the places of a row are cut over ranks: in zig-zag order over a ring, so that causal work is even, then in runs over Ulysses.

A row is padded inside to a length that divides; the places beyond its end are the last of their part and never enter attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from phalanx.kernels.attention_sight import Range, Tokens
from phalanx.layout import round_up


@dataclass(frozen=True)
class Cut:
    """The cut of rows of `length` tokens over `ring` times `ulysses` ranks.

    Part i of the ring has the chunks i and 2 ring - 1 - i of 2 ring equal ones; its places, ascending, are cut into `ulysses` runs.
    """

    length: int
    ring: int
    ulysses: int

    @property
    def padded(self) -> int:
        """The length with padding: every rank has two tokens at least, since a model may take one token for a step of generation."""
        unit = self.ring * (math.lcm(2, self.ulysses) if self.ring > 1 else self.ulysses)
        return round_up(max(self.length, 2 * self.ring * self.ulysses), unit)

    @property
    def local_length(self) -> int:
        """The tokens of every rank, padding included."""
        return self.padded // (self.ring * self.ulysses)

    def part(self, ring_index: int) -> tuple[Range, ...]:
        """The places of one part of the ring, padding included."""
        if self.ring == 1:
            return ((0, self.padded),)
        chunk, mirror = self.padded // (2 * self.ring), 2 * self.ring - 1 - ring_index
        first, second = (ring_index * chunk, (ring_index + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk)
        return ((first[0], second[1]),) if first[1] == second[0] else (first, second)

    def own(self, ring_index: int, ulysses_index: int) -> Tokens:
        """One rank's tokens, padding included."""
        start = ulysses_index * self.local_length
        return Tokens(self.part(ring_index)).take(slice(start, start + self.local_length))

    def places(self, ring_index: int, ulysses_index: int) -> torch.Tensor:
        """The places of one rank's tokens, ascending; those from `length` on are padding."""
        return self.own(ring_index, ulysses_index).places(torch.device("cpu"))

    def num_real(self, ring_index: int, ulysses_index: int) -> int:
        """How many of one rank's tokens are tokens of the row; they come first."""
        return self.own(ring_index, ulysses_index).numbers_within(0, self.length).stop


@dataclass(frozen=True, eq=False)
class Rows:
    """What attention has to know of the rows of one batch: their cut, documents and hidden tokens.

    Shapes: `documents` and `hidden` (B, length) on the device of the computation; `reach` as in `Tokens`, on the host.
    """

    cut: Cut
    documents: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    reach: torch.Tensor | None = None

    def tokens(self, ring_index: int) -> Tokens:
        """The real tokens of a part of the ring."""
        return self._parts[ring_index]

    @cached_property
    def _parts(self) -> list[Tokens]:
        return [self._part(index) for index in range(self.cut.ring)]

    def _part(self, ring_index: int) -> Tokens:
        length = self.cut.length
        ranges = tuple((start, min(stop, length)) for start, stop in self.cut.part(ring_index) if start < length)
        if (self.documents is None and self.hidden is None) or not ranges:
            return Tokens(ranges, reach=self.reach)
        pick = lambda rows: None if rows is None else torch.cat([rows[:, start:stop] for start, stop in ranges], 1)  # noqa: E731
        return Tokens(ranges, pick(self.documents), pick(self.hidden), self.reach)


def reach_of(documents: torch.Tensor | None, hidden: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """The `reach` of rows whose documents and hidden tokens lie on the host; None for others, and where nothing limits it.

    Shapes: (B, length) each -> (length, 2).
    """
    given = documents if documents is not None else hidden
    if given is None or given.device.type != "cpu" or not given.numel():
        return None
    places = torch.arange(length).expand(given.shape)
    first, last = torch.zeros_like(places), torch.full_like(places, length)
    if documents is not None:
        border = documents[:, 1:] != documents[:, :-1]
        starts = torch.where(torch.nn.functional.pad(border, (1, 0), value=True), places, 0)
        ends = torch.where(torch.nn.functional.pad(border, (0, 1), value=True), places + 1, length)
        first, last = starts.cummax(1).values, ends.flip(1).cummin(1).values.flip(1)
    if hidden is not None:
        seen_first = torch.where(hidden, length, places).amin(1, keepdim=True)
        seen_last = torch.where(hidden, 0, places + 1).amax(1, keepdim=True)
        first, last = torch.maximum(first, seen_first), torch.minimum(last, seen_last)
    return torch.stack([first.amin(0), last.amax(0)], 1)
