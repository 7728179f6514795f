"""Collectives with a gradient, each with its dual: what is copied forward is summed backward, and the other way round."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.cluster import collectives
from phalanx.cluster.mesh import Axis
from phalanx.errors import ShapeError
from phalanx.layout import split_sizes


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The same tensor, entering a part of the model that each rank of the axis computes differently. Grad: all_reduce."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the axis of what its ranks computed. Grad: identity."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
    """The parts of all ranks joined along `dim`, used alike on every rank afterwards. Grad: this rank's part.

    `sizes` gives the parts where they differ other than by `split_sizes` of their sum; with equal parts leave it out.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim % x.dim(), sizes)


def scatter_to(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's part along `dim` of a tensor that every rank holds. Grad: all_gather of the parts."""
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dim % x.dim(), sizes)


def exchange(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int, sizes: list[int] | None = None) -> torch.Tensor:
    """Whole along `split_dim` and this rank's part along `concat_dim` becomes the other way round (all-to-all).

    `split_dim` is cut by `split_sizes`; `sizes` gives every rank's part of `concat_dim` where they are not equal.
    Grad: the same with the dimensions exchanged.
    """
    if axis.size == 1:
        return x
    split_dim, concat_dim = split_dim % x.dim(), concat_dim % x.dim()
    if split_dim == concat_dim:
        raise ShapeError(f"exchange over dimension {split_dim} twice", allowed="two different dimensions")
    parts = sizes or [x.shape[concat_dim]] * axis.size
    return _Exchange.apply(x, axis, split_dim, concat_dim, parts)


def gather_parts(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """Parts of the given sizes along `dim` joined; without a gradient."""
    lead = x.movedim(dim, 0).contiguous()
    longest = max(sizes)
    if lead.shape[0] != sizes[axis.index]:
        raise ShapeError(
            f"rank {axis.index} of axis {axis.name} has {lead.shape[0]} of dimension {dim}", allowed=f"{sizes[axis.index]} of {sizes}"
        )
    shape = [*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]]
    lead_stride = torch.empty((sum(sizes), *lead.shape[1:]), device="meta").movedim(0, dim).stride()
    out = lead.new_empty_strided(shape, lead_stride)  # no view of another tensor, so that it may be changed in place
    lead_out = out.movedim(dim, 0)
    if min(sizes) == longest:
        collectives.all_gather(lead_out, lead, axis)
    else:  # uneven parts travel exactly: everyone sends its part to all, so no padding is moved
        collectives.all_to_all(lead_out, lead.repeat(axis.size, *[1] * (lead.dim() - 1)), axis, sizes, [lead.shape[0]] * axis.size)
    return out


def exchange_parts(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int, split: list[int], concat: list[int]) -> torch.Tensor:
    """All-to-all of parts `split` along one dimension into parts `concat` along another; without a gradient."""
    pieces = [piece.contiguous() for piece in x.split(split, split_dim)]
    mine = split[axis.index]
    shapes = []
    for size in concat:
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = mine, size
        shapes.append(shape)
    out_counts = [torch.Size(shape).numel() for shape in shapes]
    out = x.new_empty(sum(out_counts))
    collectives.all_to_all(out, torch.cat([piece.view(-1) for piece in pieces]), axis, out_counts, [piece.numel() for piece in pieces])
    parts = [part.view(shape) for part, shape in zip(out.split(out_counts), shapes, strict=True)]
    return torch.cat(parts, concat_dim)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # another consumer may hold the same gradient
        collectives.all_reduce(grad, ctx.axis)
        return grad, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total, axis)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int] | None) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes or [x.shape[dim]] * axis.size
        return gather_parts(x, axis, dim, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _own_part(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int] | None) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes or split_sizes(x.shape[dim], axis.size)
        return _own_part(x, axis, dim, ctx.sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gather_parts(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.split_dim, ctx.concat_dim, ctx.concat = axis, split_dim, concat_dim, sizes
        ctx.split = split_sizes(x.shape[split_dim], axis.size)
        return exchange_parts(x, axis, split_dim, concat_dim, ctx.split, ctx.concat)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return exchange_parts(grad, ctx.axis, ctx.concat_dim, ctx.split_dim, ctx.concat, ctx.split), None, None, None, None


def _own_part(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    return x.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index])
