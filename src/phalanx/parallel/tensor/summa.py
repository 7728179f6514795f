"""Products of matrices that lie in blocks on a grid of ranks: what is gathered, what is multiplied, what is summed.

A product is three steps, each with its dual. `enter` gathers the features of what goes in over one axis of the grid; `product`
gathers the weight over another and multiplies; `leave` adds up partial products over a third and keeps a part. An axis of one rank
makes a step local. With an axis for `enter` and none for `leave` this is SUMMA with the output at rest (van de Geijn and Watts
1997, one panel as wide as the matrix); with both it is the 3D algorithm (Agarwal et al. 1995; Bian et al. 2021).

Shape suffixes: T tokens (any leading dimensions), K features in, N features out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.cluster.mesh import Axis
from phalanx.parallel.tensor.parts import Gathering, Summing

Slices = tuple[tuple[int, int], ...]


@dataclass
class Entered:
    """What several products take in together: gathered once forward, once again backward unless it is kept, and summed once.

    `local` is what this rank holds of it, or None where it need not be gathered.
    """

    full: torch.Tensor
    local: torch.Tensor | None = None
    axis: Axis | None = None
    sizes: tuple[int, ...] = ()
    _again: Gathering | None = field(default=None, repr=False)

    def start_again(self, local: torch.Tensor) -> Gathering:
        """The gather that the products of one backward share."""
        if self._again is None:
            assert self.axis is not None
            self._again = Gathering(local, self.axis, -1, self.sizes)
        return self._again

    def forget(self) -> None:
        self._again = None


def enter(x: torch.Tensor, axis: Axis, sizes: tuple[int, ...]) -> Entered:
    """The features of all ranks of the axis, joined, for products that each rank makes for itself.

    Cost: (n - 1)/n of the joined tensor, once. Grad: the sum over the axis, of which each rank keeps its features; the same cost.
    """
    if axis.size == 1:
        return Entered(x)
    entered = Entered(x, x.detach(), axis, sizes)
    entered.full = _Enter.apply(x, entered)
    return entered


def product(
    entered: Entered, weight: torch.Tensor, store: Axis, store_dim: int, sizes: tuple[int, ...], *, transposed: bool = False, keep: bool
) -> torch.Tensor:
    """x W^T (x W where `transposed`), with the weight's parts along `store_dim` gathered over the axis `store`.

    `keep` holds what was gathered for the backward; else it is gathered again.
    Shapes: x (T, K); the joined weight (N, K), or (K, N) where `transposed`. Returns (T, N).
    Cost: (n - 1)/n of the joined weight forward, again backward unless kept, and once for its gradient.
    Grad: to x without communication; to the weight the sum over `store`, of which each rank keeps its part.
    """
    local = entered.local if entered.local is not None and not keep else None
    return _Product.apply(entered.full, local, weight, _Gathered(entered, store, store_dim, sizes, transposed, keep))


def stored(weight: torch.Tensor, store: Axis, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """A weight whose parts lie along an axis, whole. Cost: (n - 1)/n of it. Grad: the sum of the parts, the same cost."""
    return weight if store.size == 1 else _Stored.apply(weight, store, dim, sizes)


def leave(partial: torch.Tensor, axis: Axis, parts: tuple[Slices, ...]) -> torch.Tensor:
    """This rank's features of the sum over the axis; `parts` says for each rank which features it keeps. Two may keep the same.

    Cost: (n - 1)/n of the whole. Grad: the parts of all ranks, gathered and put in place; the same cost.
    """
    return partial if axis.size == 1 else _Leave.apply(partial, axis, parts)


@dataclass(frozen=True)
class _Gathered:
    """How one product comes by its weight, and what it keeps."""

    entered: Entered
    store: Axis
    dim: int
    sizes: tuple[int, ...]
    transposed: bool
    keep: bool

    def start(self, weight: torch.Tensor) -> Gathering:
        return Gathering(weight.detach(), self.store, self.dim, self.sizes)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, entered: Entered) -> torch.Tensor:
        ctx.axis, ctx.sizes, ctx.forget = entered.axis, entered.sizes, entered.forget
        return Gathering(x, entered.axis, -1, entered.sizes).joined()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.forget()
        return Summing(grad.split(ctx.sizes, -1), ctx.axis).result(), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, local: torch.Tensor | None, weight: torch.Tensor, how: _Gathered) -> torch.Tensor:
        joined = how.start(weight).joined()
        ctx.how = how
        ctx.save_for_backward(x_TK if local is None else local, joined if how.keep else weight)
        ctx.is_local = local is not None
        return x_TK @ (joined if how.transposed else joined.T)

    @staticmethod
    def backward(ctx: Any, grad_TN: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        how: _Gathered = ctx.how
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        again = how.entered.start_again(x) if ctx.is_local and needs_weight else None
        joined = None
        if needs_x:
            joined = weight if how.keep else how.start(weight).joined()
        grad_x = grad_TN @ (joined.T if how.transposed else joined) if joined is not None else None
        grad_weight = None
        if needs_weight:
            x_TK = again.joined() if again is not None else x
            flat_x, flat_grad = x_TK.reshape(-1, x_TK.shape[-1]), grad_TN.reshape(-1, grad_TN.shape[-1])
            whole = flat_x.T @ flat_grad if how.transposed else flat_grad.T @ flat_x
            grad_weight = Summing(whole.split(how.sizes, how.dim), how.store).result()
        return grad_x, None, grad_weight, None


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
