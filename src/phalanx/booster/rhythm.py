"""How many backwards with collectives a step has: learned once, agreed on by all ranks, and watched from then on."""

from __future__ import annotations

import itertools

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis

_numbers = itertools.count(1)


class Rhythm:
    """Finds a rank that calls backward more or less often than the others, before it waits for a collective that nobody joins.

    Cost: an agreement (a millisecond) for every backward that the step before did not have; none in a steady loop.
    """

    def __init__(self, axis: Axis):
        self.axis, self.name = axis, f"training {next(_numbers)}"
        self.expected = self.number = self.round = 0

    def backward(self) -> None:
        """Notes that a backward with collectives begins.

        Raises: CommError on every rank where another one does not begin it.
        """
        if self.number >= self.expected:
            self._agree("another backward")
        self.number += 1

    def step(self) -> None:
        """Notes that no more backwards come in this step. Raises: CommError on every rank where another one begins one."""
        if self.number != self.expected:
            self._agree("the end of the step")
        self.expected = self.number

    def restart(self) -> None:
        """Notes that gradients were cleared."""
        self.number = 0
        self.round += 1

    def _agree(self, what: str) -> None:
        comm.agree(f"{self.name}, round {self.round}, after {self.number} backwards", what, self.axis)
