"""What the running pass counts for: known to the training loop, needed deep inside a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class PassShare:
    """The part that the rows of the running pass have in the sums of a step.

    `weight` is 0 for a pass that only runs a spare row. `count` is what the model's own loss must be multiplied by to become a sum of
    this pass: its labels where the model returns a sum, 1 where it returns their mean. `slope` is what the loss is multiplied by when
    it is differentiated. `is_repeat`: a forward runs again, to be differentiated or to see what it asks for; what it adds was added.
    """

    weight: float = 1.0
    count: torch.Tensor | float = 1.0
    slope: float = 1.0
    is_repeat: bool = False
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

    def add(self, loss: torch.Tensor) -> None:
        """Notes a loss that a layer adds to the sum of this pass."""
        if not self.is_repeat:
            self.added.append(loss.detach().double())

    def take_added(self) -> torch.Tensor | float:
        """The sum of what was noted since the last call."""
        total = torch.stack(self.added).sum() * self.weight if self.added else 0.0
        self.added.clear()
        return total
