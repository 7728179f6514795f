"""How many choices fell on each expert of a layer: counted on the device, read when someone asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.parallel.expert.share import PassShare


@dataclass(frozen=True)
class LayerLoad:
    """The choices that fell on each expert of a layer, on all ranks together, and how many of them were dropped."""

    name: str
    chosen: tuple[float, ...]
    dropped: float

    @property
    def entropy(self) -> float:
        """How evenly choices are spread: 1 where every expert has as many, 0 where one has all; 1 for no choices."""
        total = sum(self.chosen)
        if total <= 0 or len(self.chosen) < 2:
            return 1.0
        shares = [count / total for count in self.chosen if count > 0]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.chosen))


class Load:
    """Running counts of one layer on this rank. Spare rows, what fills rows up, and forwards that are run again do not count.

    Cost: one small addition a forward, no read by the host.
    """

    def __init__(self, name: str, num_experts: int, share: PassShare | None = None):
        self.name, self.num_experts, self.share = name, num_experts, share or PassShare()
        self.counts: torch.Tensor | None = None

    @torch.no_grad()
    def count(self, experts_TK: torch.Tensor, counted_T: torch.Tensor | None = None) -> None:
        """Adds the choices of these tokens, or of those that `counted_T` names."""
        if counted_T is not None:
            experts_TK = experts_TK.masked_fill(~counted_T[:, None], -1)
        flat = experts_TK.reshape(-1).long()
        known = ((flat >= 0) & (flat < self.num_experts)).double()
        self._add(
            torch.zeros(self.num_experts + 1, dtype=torch.float64, device=flat.device).scatter_add_(
                0, flat.clamp(0, self.num_experts - 1), known
            )
        )

    def count_calls(self, experts: nn.ModuleList) -> None:
        """Counts the tokens that each expert of a list is called with in training from now on; of one at several places, at its first."""
        for number, expert in enumerate(experts):
            if expert not in [*experts][:number]:
                expert.register_forward_pre_hook(partial(self._count_call, number), with_kwargs=True)

    @torch._dynamo.disable
    @torch.no_grad()
    def _count_call(self, number: int, expert: nn.Module, arguments: Any, keywords: Any) -> None:
        x = next((value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)), None)
        if x is not None and expert.training:
            counts = torch.zeros(self.num_experts + 1, dtype=torch.float64, device=x.device)
            counts[number] = math.prod(x.shape[:-1])
            self._add(counts)

    @torch.no_grad()
    def count_dropped(self, number: torch.Tensor) -> None:
        self._add(torch.cat([number.new_zeros(self.num_experts).double(), number.double().reshape(1)]))

    def _add(self, counts: torch.Tensor) -> None:
        if self.share.weight and not self.share.is_repeat:
            self.counts = counts if self.counts is None else self.counts + counts

    def so_far(self, device: torch.device) -> torch.Tensor:
        """Choices of each expert, with those dropped at the end. Shapes: [E + 1] float64."""
        return torch.zeros(self.num_experts + 1, dtype=torch.float64, device=device) if self.counts is None else self.counts


def layer_load(name: str, counts: Sequence[float]) -> LayerLoad:
    return LayerLoad(name, tuple(counts[:-1]), counts[-1])
