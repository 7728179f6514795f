"""The experts of a layer on a processor, expert by expert: an expert's rows stay in the cache from the gather to the sum.

Between tokens and their weighted sums lie, at once, the rows of one expert; of all experts only the inner activations are kept.
Legend: T tokens, K choices of a token, N rows, R rows of one expert, E experts, H hidden, I inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from phalanx.kernels.grouped import segments
from phalanx.kernels.grouped_rows import GroupedRows


def is_faster(x: torch.Tensor, weights: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether this is the operation to take: half sums would be rounded after each expert, and a device wants one launch for all."""
    return x.device.type == "cpu" and x.dtype == weights.dtype == up.dtype and x.dtype in (torch.float32, torch.float64)


def gated_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    rows: GroupedRows,
    sizes: Sequence[int],
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """For every token the sum over its rows of weight · down(silu(gate) · up), each by its row's expert; 0 for a token without rows.

    Shapes: `up` [E, 2 I, H] with the gate first, `down` [E, H, I], or both with the last two dimensions exchanged where `transposed`
    -> [T, H].
    """
    return _GatedExperts.apply(x_TH, weights_TK, up, down, rows, tuple(sizes), transposed)


class _GatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        rows: GroupedRows,
        sizes: tuple[int, ...],
        transposed: bool,
    ) -> torch.Tensor:
        weights_N = weights.reshape(-1).index_select(0, rows.pairs)
        out, inner = torch.ops.phalanx.gated_experts(x, weights_N, up, down, rows.tokens, sizes, transposed, any(ctx.needs_input_grad))
        ctx.rows, ctx.sizes, ctx.transposed, ctx.shape = rows, sizes, transposed, weights.shape
        ctx.save_for_backward(x, weights_N, up, down, inner)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights_N, up, down, inner = ctx.saved_tensors
        needs_x, needs_weights, needs_up, needs_down = ctx.needs_input_grad[:4]
        grad_x = torch.zeros_like(x) if needs_x else None
        grad_up = _for_groups(up, ctx.sizes) if needs_up else None
        grad_down = _for_groups(down, ctx.sizes) if needs_down else None
        grad_N = torch.empty_like(weights_N)
        for expert, at in segments(ctx.sizes):
            tokens, weight_R1 = ctx.rows.tokens[at], weights_N[at].unsqueeze(1)
            grad_RH = grad.index_select(0, tokens)
            gate, linear = inner[at].chunk(2, -1)
            silu = F.silu(gate)
            active_RI = silu * linear
            # Of a row's result that is not kept, times its gradient: <g, down(a)> = <down'(g), a>.
            grad_RI = grad_RH @ _as_inputs(down, expert, not ctx.transposed)
            torch.linalg.vecdot(grad_RI, active_RI, out=grad_N[at])
            if grad_down is not None:
                _product(active_RI.mul_(weight_R1), grad_RH, grad_down[expert], ctx.transposed)
            if grad_x is None and grad_up is None:
                continue
            grad_RI.mul_(weight_R1)
            grad_inner = torch.cat([torch.ops.aten.silu_backward(grad_RI * linear, gate), grad_RI.mul_(silu)], 1)
            if grad_up is not None:
                _product(x.index_select(0, tokens), grad_inner, grad_up[expert], ctx.transposed)
            if grad_x is not None:
                grad_x.index_add_(0, tokens, grad_inner @ _as_inputs(up, expert, not ctx.transposed))
        grad_weights = grad_N.new_zeros(ctx.shape.numel()).index_copy_(0, ctx.rows.pairs, grad_N).view(ctx.shape) if needs_weights else None
        return grad_x, grad_weights, grad_up, grad_down, None, None, None


def _forward(
    x: torch.Tensor,
    weights_N: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    tokens_N: torch.Tensor,
    sizes: Sequence[int],
    transposed: bool,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of the tokens, inner activations of the rows, or nothing where these are not kept)."""
    out = torch.zeros_like(x)
    kept = x.new_empty(len(tokens_N) if keeps else 0, up.shape[2 if transposed else 1])
    for expert, at in segments(sizes):
        tokens = tokens_N[at]
        rows = x.index_select(0, tokens)
        inner = torch.mm(rows, _as_inputs(up, expert, transposed), out=kept[at]) if keeps else rows @ _as_inputs(up, expert, transposed)
        gate, linear = inner.chunk(2, -1)
        active = F.silu(gate).mul_(linear).mul_(weights_N[at].unsqueeze(1))
        out.index_add_(0, tokens, active @ _as_inputs(down, expert, transposed))
    return out, kept


def _as_inputs(weight: torch.Tensor, expert: int, transposed: bool) -> torch.Tensor:
    """The matrix that rows are multiplied with from the right."""
    return weight[expert] if transposed else weight[expert].t()


def _product(inputs: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, transposed: bool) -> None:
    """The gradient of a matrix."""
    left, right = (inputs, grad) if transposed else (grad, inputs)
    torch.mm(left.t(), right, out=out)


def _for_groups(weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Room for the gradient of every expert; that of an expert without rows is 0."""
    out = torch.empty_like(weight)
    for expert, size in enumerate(sizes):
        if not size:
            out[expert].zero_()
    return out


# An operation of its own, so that selective recompute may keep what it makes.
_library = torch.library.Library("phalanx", "FRAGMENT")
_library.define(
    "gated_experts(Tensor x, Tensor weights, Tensor up, Tensor down, Tensor tokens, int[] sizes, bool transposed, bool keeps)"
    " -> (Tensor, Tensor)"
)
_library.impl("gated_experts", _forward, "CompositeExplicitAutograd")
