"""Normalisation of rows whose features lie on several ranks: each rank sums its own, and the sums meet.

Shape suffixes: T tokens (any leading dimensions), K this rank's features, n ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis


def standardised(x: torch.Tensor, axis: Axis, sizes: tuple[int, ...], eps: float) -> torch.Tensor:
    """Rows of mean 0 and variance 1, as in LayerNorm before its weight. Half precision is summed in float32.

    Means and squares about them are combined, so that nothing cancels.
    Shapes: x (T, K); `sizes` are the features of each rank. Cost: 2(n - 1) numbers a row forward, 4(n - 1)/n backward.
    Source: Chan, Golub and LeVeque 1979.
    """
    return _Unit.apply(x, axis, sizes, eps, True)


def scaled_to_one(x: torch.Tensor, axis: Axis, sizes: tuple[int, ...], eps: float) -> torch.Tensor:
    """Rows of mean square 1, as in RMSNorm before its weight.

    Shapes: x (T, K). Cost: 2(n - 1)/n numbers a row forward, the same backward.
    """
    return _Unit.apply(x, axis, sizes, eps, False)


class _Unit(torch.autograd.Function):
    """Rows divided by the root of their mean square, about their mean where they are centred."""

    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, axis: Axis, sizes: tuple[int, ...], eps: float, is_centred: bool) -> torch.Tensor:
        wide = _wide(x_TK)
        if is_centred:
            mean_T, squares_T = _moments(wide, axis, sizes)
            wide = wide - mean_T
        else:
            squares_T = wide.square().sum(-1, keepdim=True)
            comm.all_reduce(squares_T, axis)
        scale_T = (squares_T / sum(sizes) + eps).rsqrt()
        unit_TK = wide * scale_T
        ctx.axis, ctx.width, ctx.dtype, ctx.is_centred = axis, sum(sizes), x_TK.dtype, is_centred
        ctx.save_for_backward(unit_TK, scale_T)
        return unit_TK.to(x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        unit_TK, scale_T = ctx.saved_tensors
        grad_TK = grad.to(unit_TK.dtype)
        sums = [(grad_TK * unit_TK).sum(-1, keepdim=True)]
        if ctx.is_centred:
            sums.append(grad_TK.sum(-1, keepdim=True))
        means = torch.stack(sums)
        comm.all_reduce(means, ctx.axis)
        means /= ctx.width
        slope_TK = grad_TK - unit_TK * means[0]
        if ctx.is_centred:
            slope_TK -= means[1]
        return (slope_TK * scale_T).to(ctx.dtype), None, None, None, None


def _moments(x_TK: torch.Tensor, axis: Axis, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's mean, and the sum of the squares about it, over the features of all ranks."""
    own = max(x_TK.shape[-1], 1)
    mean_T = x_TK.sum(-1, keepdim=True) / own
    squares_T = (x_TK - mean_T).square().sum(-1, keepdim=True)
    if axis.size == 1:
        return mean_T, squares_T
    mine = torch.stack([mean_T, squares_T])
    everyone = mine.new_empty(axis.size, *mine.shape)
    comm.all_gather(everyone, mine, axis)
    means_nT, squares_nT = everyone[:, 0], everyone[:, 1]
    weight_n = torch.tensor(sizes, dtype=mine.dtype, device=mine.device).view(-1, *[1] * mean_T.dim())
    whole_T = (means_nT * weight_n).sum(0) / sum(sizes)
    return whole_T, squares_nT.sum(0) + (weight_n * (means_nT - whole_T).square()).sum(0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
