"""How many choices fell on each expert of a layer: counted on the device, read when someone asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Load:
    """Running counts of one layer on this rank: choices of each expert, and choices dropped.

    Shapes: `chosen` [E] float64. Cost: one small addition a forward, no read by the host.
    """

    def __init__(self, name: str, num_experts: int):
        self.name, self.num_experts = name, num_experts
        self.chosen: torch.Tensor | None = None
        self.dropped: torch.Tensor | None = None

    @torch.no_grad()
    def count(self, experts_TK: torch.Tensor) -> None:
        flat = experts_TK.reshape(-1).long()
        known = ((flat >= 0) & (flat < self.num_experts)).double()
        counts = torch.zeros(self.num_experts, dtype=torch.float64, device=flat.device)
        counts.scatter_add_(0, flat.clamp(0, self.num_experts - 1), known)
        self.chosen = counts if self.chosen is None else self.chosen + counts

    def count_dropped(self, number: torch.Tensor) -> None:
        self.dropped = number if self.dropped is None else self.dropped + number

    def take(self, device: torch.device) -> torch.Tensor:
        """Counts since the last call, with those dropped at the end, and starts anew. Shapes: [E + 1] float64."""
        chosen = self.chosen if self.chosen is not None else torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        dropped = self.dropped if self.dropped is not None else torch.zeros((), dtype=torch.float64, device=device)
        self.chosen = self.dropped = None
        return torch.cat([chosen, dropped.double().view(1)])


def entropy(counts: Sequence[float]) -> float:
    """How evenly choices are spread: 1 where every expert has as many, 0 where one has all; 1 for no choices."""
    total = sum(counts)
    if total <= 0 or len(counts) < 2:
        return 1.0
    shares = [count / total for count in counts if count > 0]
    return -sum(share * math.log(share) for share in shares) / math.log(len(counts))
