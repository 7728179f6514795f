"""A bound on the choices an expert takes: faster where routing is uneven, and no longer the same numbers under every cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phalanx.kernels.grouped_rows import sort_choices
from phalanx.parallel.expert.load import Load


@dataclass(frozen=True)
class Capacity:
    """Every expert takes at most ceil(factor · T · K / E) choices of the T tokens of one rank and pass.

    The drop rule: choices are taken in the order of their tokens, within a token in the order of its choices; those after the bound
    are dropped. A dropped choice adds nothing to its token and leaves the weights of the others as they are. Evaluation drops nothing.
    """

    factor: float

    def bound(self, num_choices: int, num_experts: int) -> int:
        return math.ceil(self.factor * num_choices / num_experts)

    @torch.no_grad()
    def drop(self, experts_TK: torch.Tensor, num_experts: int, load: Load) -> torch.Tensor:
        """The choices with each that exceeds the bound turned into none (-1). Tokens that fill rows up take no places."""
        counted_T = load.share.counted(experts_TK)
        if counted_T is not None:
            experts_TK = experts_TK.masked_fill(~counted_T[:, None], -1)
        sorted_choices = sort_choices(experts_TK, num_experts)
        ends = sorted_choices.counts.cumsum(0)
        starts = torch.cat([ends - sorted_choices.counts, ends[-1:]])
        flat = experts_TK.reshape(-1).long()
        none = (flat < 0) | (flat >= num_experts)
        group = flat.masked_fill(none, num_experts)
        place = torch.empty_like(flat)
        place[sorted_choices.order] = torch.arange(len(flat), device=flat.device)
        beyond = (place - starts[group] >= self.bound(len(flat), num_experts)) & ~none
        load.count_dropped(beyond.sum())
        return flat.masked_fill(beyond | none, -1).view_as(experts_TK)
