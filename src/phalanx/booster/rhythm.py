"""The order of a step's collective parts: learned once, agreed on by all ranks, and watched from then on."""

from __future__ import annotations

import itertools

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis

_REMEDY = "the same calls on every rank, or booster.no_sync() around backwards that differ"
_numbers = itertools.count(1)


class Rhythm:
    """Finds a rank that calls other parts of a step than the others, before it waits for a collective that nobody joins.

    Cost: an agreement (a millisecond) for every part that the step before did not have at this place; none in a steady loop.
    """

    def __init__(self, axis: Axis):
        self.axis, self.name = axis, f"training {next(_numbers)}"
        self.expected: list[str] = []
        self.position = self.round = 0

    def visit(self, part: str) -> None:
        """Notes that a part with collectives begins here. Raises: CommError on every rank where another one is elsewhere."""
        if self.position >= len(self.expected) or self.expected[self.position] != part:
            comm.agree(f"{self.name}, round {self.round}, part {self.position + 1}", part, self.axis, _REMEDY)
            self.expected = [*self.expected[: self.position], part]
        self.position += 1

    def restart(self) -> None:
        """Notes that gradients were cleared: a new round begins."""
        self.position = 0
        self.round += 1
