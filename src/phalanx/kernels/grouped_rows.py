"""Rows sorted by group and added up again: what lies between tokens that each chose several groups and one matrix product a group.

Legend: T tokens, K choices of a token, N rows (the choices that name a group, sorted by it), H hidden, G groups.
Both directions are gathers and sums in a fixed order, so that the same bits come out every time on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class Choices:
    """The group of every choice, G for none, and how many there are of each; not yet known on the host.

    Shapes: `groups` [T K], `counts` [G].
    """

    groups: torch.Tensor
    counts: torch.Tensor
    num_tokens: int
    num_choices: int

    @cached_property
    def order(self) -> torch.Tensor:
        """The choices sorted by group, those of no group last. Shapes: [T K]."""
        return torch.argsort(self.groups, stable=True)

    def rows(self, total: int) -> GroupedRows:
        """The rows, once their number `total` (the sum of `counts`) is known."""
        pairs = self.order[:total]
        return GroupedRows(pairs, pairs // self.num_choices, self.num_tokens, self.num_choices)


@dataclass(frozen=True)
class GroupedRows:
    """Where each row comes from, and which rows belong to each token.

    Shapes: `pairs` [N] number token · K + choice, `tokens` [N]; `by_token` [N] lists rows by token, token t's from `starts[t]` on.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    num_tokens: int
    num_choices: int

    @cached_property
    def by_token(self) -> torch.Tensor:
        return torch.argsort(self.tokens, stable=True)

    @cached_property
    def starts(self) -> torch.Tensor:
        counts = self.tokens.new_zeros(self.num_tokens).scatter_add_(0, self.tokens, torch.ones_like(self.tokens))
        return counts.cumsum(0) - counts

    def take(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The token of every row. Shapes: [N, H]. Grad: `add_up`."""
        return _Take.apply(x_TH, self)

    def add_up(self, y_NH: torch.Tensor, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
        """For every token the sum of its rows, each times the weight of its choice; 0 for a token without rows.

        Shapes: [T, H]. Grad: `take`.
        """
        if weights_TK is None:
            return _AddUp.apply(y_NH, self)
        if weights_TK.dtype != y_NH.dtype:  # as multiplied without a fused sum: in the wider dtype
            weights_N = _Take.apply(weights_TK.reshape(-1, 1), _PairsAsTokens(self))
            return _AddUp.apply(y_NH * weights_N, self).to(y_NH.dtype)
        return _WeightedAddUp.apply(y_NH, weights_TK, self)

    def sums(self, y_NH: torch.Tensor, weights_N: torch.Tensor | None = None) -> torch.Tensor:
        """The sums of `add_up` without a gradient; `weights_N` in the order of `by_token`."""
        if not len(self.tokens):
            return y_NH.new_zeros(self.num_tokens, y_NH.shape[1])
        return torch.embedding_bag(y_NH, self.by_token, self.starts, False, 0, False, weights_N)[0]


class _PairsAsTokens:
    """The view of rows in which every choice is a token of its own, of which at most one row exists."""

    def __init__(self, rows: GroupedRows):
        self.tokens = rows.pairs
        self.total = rows.num_tokens * rows.num_choices

    def sums(self, y_NH: torch.Tensor) -> torch.Tensor:
        return y_NH.new_zeros(self.total, y_NH.shape[1]).index_copy_(0, self.tokens, y_NH)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: GroupedRows | _PairsAsTokens) -> torch.Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.sums(grad.contiguous()), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, rows: GroupedRows) -> torch.Tensor:
        ctx.rows = rows
        return rows.sums(y.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.rows.tokens), None


class _WeightedAddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor, rows: GroupedRows) -> torch.Tensor:
        y = y.contiguous()
        weights_N = weights.reshape(-1).index_select(0, rows.pairs)
        ctx.rows, ctx.shape = rows, weights.shape
        ctx.save_for_backward(y, weights_N)
        return rows.sums(y, weights_N.index_select(0, rows.by_token))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        y, weights_N = ctx.saved_tensors
        grad_N = grad.index_select(0, ctx.rows.tokens)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            products = torch.linalg.vecdot(grad_N, y)
            grad_weights = products.new_zeros(ctx.shape.numel()).index_copy_(0, ctx.rows.pairs, products).view(ctx.shape)
        return grad_N.mul_(weights_N.unsqueeze(1)), grad_weights, None


def sort_choices(groups_TK: torch.Tensor, num_groups: int, *, once: bool = False) -> Choices:
    """Sorts choices by group, and within one by token; a group outside of 0 to G - 1 is no choice.

    `once`: a token that names a group twice is one row of it.
    """
    num_tokens, num_choices = groups_TK.shape
    none = (groups_TK < 0) | (groups_TK >= num_groups)
    if once and num_choices > 1:
        same = groups_TK.unsqueeze(2) == groups_TK.unsqueeze(1)  # [T, K, K]: choices k and j name one group
        none = none | same.tril(-1).any(2)
    flat = groups_TK.masked_fill(none, num_groups).reshape(-1)
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat.long(), torch.ones_like(flat).long())
    return Choices(flat, counts[:num_groups], num_tokens, num_choices)
