"""Products of matrices that lie in blocks on a grid of ranks: what is gathered, what is multiplied, what is summed.

A product is three steps, each with its dual. `enter` gathers the features of what goes in over one axis of the grid; `product`
gathers the weight over another and multiplies; `leave` adds up partial products over a third and keeps a part. An axis of one rank
makes a step local. With an axis for `enter` and none for `leave` this is SUMMA with the output at rest (van de Geijn and Watts
1997, one panel as wide as the matrix); with both it is the 3D algorithm (Agarwal et al. 1995; Bian et al. 2021).

Shape suffixes: T tokens (any leading dimensions), K features in, N features out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from phalanx.cluster.mesh import Axis
from phalanx.parallel.tensor.entered import Entered, WayBack
from phalanx.parallel.tensor.parts import Gathering, Summing

Slices = tuple[tuple[int, int], ...]


def product(
    entered: Entered,
    weight: torch.Tensor,
    store: Axis | None = None,
    store_dim: int = 0,
    sizes: Sequence[int] = (),
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    keep: bool = True,
) -> torch.Tensor:
    """x W^T + b (x W where `transposed`), with the weight's parts along `store_dim` gathered over the axis `store`, if there is one.

    `keep` holds the gathered weight for the backward; else it is gathered again.
    Shapes: x (T, K); the joined weight (N, K), or (K, N) where `transposed`; b (N). Returns (T, N).
    Cost: (n - 1)/n of the joined weight forward, again backward unless kept, and once for its gradient; again backward the gather of
    x unless that is kept.
    Grad: to x without communication of its own; to the weight the sum over `store`, of which each rank keeps its part.
    """
    if entered.way_back is not None:
        entered.way_back.num_products += 1
    how = _How(entered.way_back, store, store_dim, tuple(sizes), transposed, keep)
    return _Product.apply(entered.full, entered.local, weight, bias, how)


def stored(weight: torch.Tensor, store: Axis, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """A weight whose parts lie along an axis, whole. Cost: (n - 1)/n of it. Grad: the sum of the parts, the same cost."""
    return weight if store.size == 1 else _Stored.apply(weight, store, dim, sizes)


def leave(partial: torch.Tensor, axis: Axis, parts: tuple[Slices, ...]) -> torch.Tensor:
    """This rank's features of the sum over the axis; `parts` says for each rank which features it keeps. Two may keep the same.

    Cost: (n - 1)/n of the whole. Grad: the parts of all ranks, gathered and put in place; the same cost.
    """
    return partial if axis.size == 1 else _Leave.apply(partial, axis, parts)


@dataclass(frozen=True)
class _How:
    """How one product comes by its weight, what it keeps, and what it shares with others."""

    way_back: WayBack | None
    store: Axis | None
    dim: int
    sizes: tuple[int, ...]
    transposed: bool
    keep: bool

    def joined(self, weight: torch.Tensor) -> torch.Tensor:
        if self.store is None:
            return weight
        return Gathering(weight.detach(), self.store, self.dim, self.sizes).joined()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, local: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, how: _How
    ) -> torch.Tensor:
        joined = how.joined(weight)
        ctx.how, ctx.is_local = how, local is not None
        ctx.save_for_backward(x_TK if local is None else local, joined if how.keep else weight)
        return F.linear(x_TK, joined.T if how.transposed else joined, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how: _How = ctx.how
        x, weight = ctx.saved_tensors
        wants_x, _, wants_weight, wants_bias, _ = wanted(ctx)
        grad_TN = grad.reshape(-1, grad.shape[-1])
        again = how.way_back.gather_again(x) if ctx.is_local and wants_weight and how.way_back is not None else None
        grad_x = grad_weight = None
        if wants_x:
            joined = weight if how.keep else how.joined(weight)
            weight_NK = joined.T if how.transposed else joined
            if how.way_back is None:
                grad_x = (grad_TN @ weight_NK).view(*grad.shape[:-1], weight_NK.shape[-1])
            else:
                how.way_back.add(grad_TN, weight_NK)
        if wants_weight:
            full = again.joined() if again is not None else x
            x_TK = full.reshape(-1, full.shape[-1])
            whole = x_TK.T @ grad_TN if how.transposed else grad_TN.T @ x_TK
            grad_weight = whole if how.store is None else Summing.along(whole, how.store, how.dim, how.sizes).result()
        return grad_x, None, grad_weight, grad_TN.sum(0) if wants_bias else None, None


def wanted(ctx: Any) -> list[bool]:
    """Which inputs of a function need their gradient in the backward that runs: one may reach a part of the graph alone."""
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # those of the inputs that need a gradient at all
    return [needs and torch._C._will_engine_execute_node(next(nodes)) for needs in ctx.needs_input_grad]


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, store: Axis, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.store, ctx.dim, ctx.sizes = store, dim, sizes
        return Gathering(weight, store, dim, sizes).joined()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return Summing(grad.split(ctx.sizes, ctx.dim), ctx.store).result(), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, axis: Axis, parts: tuple[Slices, ...]) -> torch.Tensor:
        ctx.axis, ctx.parts, ctx.width = axis, parts, partial.shape[-1]
        return Summing([_take(partial, slices) for slices in parts], axis).result()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        blocks = Gathering(grad, ctx.axis, -1, [sum(stop - start for start, stop in slices) for slices in ctx.parts]).blocks()
        whole = grad.new_zeros(*grad.shape[:-1], ctx.width)
        for block, slices in zip(blocks, ctx.parts, strict=True):
            for (start, stop), piece in zip(slices, block.split([stop - start for start, stop in slices], -1), strict=True):
                whole[..., start:stop] += piece
        return whole, None, None


def _take(tensor: torch.Tensor, slices: Slices) -> torch.Tensor:
    pieces = [tensor[..., start:stop] for start, stop in slices]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
