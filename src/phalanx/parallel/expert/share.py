"""What the running pass counts for: known to the training loop, needed deep inside a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from phalanx.cluster.mesh import Axis
from phalanx.layout import split_range


@dataclass
class PassShare:
    """The part that the rows of the running pass have in the sums of a step.

    `weight` is 0 for a pass that only runs a spare row. `count` is what the model's own loss must be multiplied by to become a sum of
    this pass: its labels where the model returns a sum, 1 where it returns their mean. `slope` is what the loss is multiplied by when
    it is differentiated. `is_repeat`: a forward runs again, to be differentiated or to see what it asks for; what it adds was added.
    `num_real` of every row's `length` tokens are the row's, the first ones; the others only fill it up, and nothing counts them.
    Layers see a part of these tokens where ranks along `sequence` divide them.
    """

    weight: float = 1.0
    count: torch.Tensor | float = 1.0
    slope: float = 1.0
    is_repeat: bool = False
    num_real: int = 0
    length: int = 0
    sequence: Axis | None = None
    added: list[torch.Tensor] = field(default_factory=list)

    @contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """A pass of this weight runs inside; what a pass that raised has added is forgotten."""
        self.weight = weight
        try:
            yield
        finally:
            self.weight = 1.0
            self.added.clear()

    @contextmanager
    def repeating(self) -> Iterator[None]:
        before, self.is_repeat = self.is_repeat, True
        try:
            yield
        finally:
            self.is_repeat = before

    @contextmanager
    def filled(self, num_real: int, length: int) -> Iterator[None]:
        """Rows of `length` tokens run inside, of which the first `num_real` are theirs."""
        before, (self.num_real, self.length) = (self.num_real, self.length), (num_real, length)
        try:
            yield
        finally:
            self.num_real, self.length = before

    def counted(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Which tokens, that lie row by row in the first dimension, are those of rows; None where all are. Shapes: (T, ...) -> (T)."""
        if self.num_real == self.length:
            return None
        axis = self.sequence
        start, stop = (0, self.length) if axis is None else split_range(self.length, axis.size, axis.index)
        places = torch.arange(start, stop, device=tokens.device)
        return (places < self.num_real).repeat(tokens.shape[0] // max(1, len(places)))

    def add(self, loss: torch.Tensor) -> None:
        """Notes a loss that a layer adds to the sum of this pass."""
        if not self.is_repeat:
            self.added.append(loss.detach().double())

    def take_added(self) -> torch.Tensor | float:
        """The sum of what was noted since the last call."""
        total = torch.stack(self.added).sum() * self.weight if self.added else 0.0
        self.added.clear()
        return total
