"""The residual stream split by sequence: gathered where a split part begins, summed and scattered where it ends."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.cluster import comm
from phalanx.cluster.differentiable import gather_parts
from phalanx.cluster.mesh import Axis


def gather_sequence(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """The parts of all ranks joined along `dim`, of which each rank then uses everything for its part of the work.

    Cost: (n - 1)/n of the whole. Grad: `scatter_sums`.
    """
    return x if axis.size == 1 else _Gather.apply(x, axis, dim, sizes)


def scatter_sums(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks.

    Cost: (n - 1)/n of the whole. Grad: `gather_sequence`.
    """
    return x if axis.size == 1 else _ScatterSums.apply(x, axis, dim, sizes)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return gather_parts(x, axis, dim, sizes).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return sum_parts(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return sum_parts(x, axis, dim, sizes).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gather_parts(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


def sum_parts(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks; without a gradient."""
    lead = x.movedim(dim, 0).contiguous()
    own = sizes[axis.index]
    if min(sizes) == max(sizes):
        out = lead.new_empty((own, *lead.shape[1:]))
        comm.reduce_scatter(out, lead, axis)
        return out.movedim(0, dim)
    parts = lead.new_empty((own * axis.size, *lead.shape[1:]))
    comm.all_to_all(parts, lead, axis, [own] * axis.size, sizes)
    return parts.view(axis.size, own, *lead.shape[1:]).sum(0).movedim(0, dim)
