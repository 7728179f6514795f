"""What several products take in together, and what their backwards share: one gather of the input, and one sum of its gradient.

Both run while matrices are multiplied: the gather beside the product that gives the input's gradient, the sum beside the one that gives
the last weight's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.cluster.mesh import Axis
from phalanx.parallel.tensor.parts import Adding, Gathering, Summing

_ENTERED = "_phalanx_entered"


@dataclass
class Entered:
    """`full` is what products multiply with; from `local`, this rank's part, backwards gather it again: None where it is kept.

    `way_back` is None where no other rank has a part in the gradient.
    """

    full: torch.Tensor
    local: torch.Tensor | None = None
    way_back: WayBack | None = None

    def marked(self) -> torch.Tensor:
        """`full`, which `entered_as` knows again after it was handed on by other code."""
        setattr(self.full, _ENTERED, (self.local, self.way_back))
        return self.full


def entered_as(x: torch.Tensor) -> Entered | None:
    """What a marked tensor entered as; None for any other."""
    found = getattr(x, _ENTERED, None)
    return None if found is None else Entered(x, *found)


def enter(x: torch.Tensor, axis: Axis, sizes: Sequence[int], dim: int = -1, *, keep: bool) -> Entered:
    """The parts of all ranks of the axis joined along `dim`, for products that each rank makes for itself.

    `keep` holds them for the backward; else they are gathered again.
    Cost: (n - 1)/n of the joined tensor, once. Grad: the sum over the axis, of which each rank keeps its part; the same cost.
    """
    if axis.size == 1:
        return Entered(x)
    way_back = WayBack(axis, dim % x.dim(), tuple(sizes))
    return Entered(_Enter.apply(x, way_back), None if keep else x.detach(), way_back)


def enter_whole(x: torch.Tensor, axis: Axis) -> Entered:
    """What every rank of the axis has, for products that each rank makes for itself. Grad: the sum over the axis."""
    if axis.size == 1:
        return Entered(x)
    way_back = WayBack(axis)
    return Entered(_Enter.apply(x, way_back), None, way_back)


class WayBack:
    """Counts the products that took an input in, so that the last of their backwards begins the sum of its gradient.

    A backward that reaches some of them alone begins it when it arrives at the input; what others have added to the gradient by
    then is summed as well. Without `sizes` every rank has the whole.
    """

    def __init__(self, axis: Axis, dim: int = 0, sizes: tuple[int, ...] | None = None):
        self.axis, self.dim, self.sizes = axis, dim, sizes
        self.shape: torch.Size | None = None
        self.num_products = 0
        self._forget()

    def _forget(self) -> None:
        self._gathering: Gathering | None = None
        self._total: torch.Tensor | None = None
        self._sum: Summing | Adding | None = None
        self._num_taken = self._num_added = 0

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """The input in full, as a tensor of its own."""
        whole = x.view_as(x) if self.sizes is None else Gathering(x, self.axis, self.dim, self.sizes).joined()
        self.shape = whole.shape
        return whole

    def gather_again(self, local: torch.Tensor) -> Gathering:
        """The gather that all backwards share."""
        if self._gathering is None:
            assert self.sizes is not None
            self._gathering = Gathering(local, self.axis, self.dim, self.sizes)
        gathering = self._gathering
        self._num_taken += 1
        if self._num_taken >= self.num_products:
            self._gathering, self._num_taken = None, 0
        return gathering

    def add(self, grad_TN: torch.Tensor, weight_NK: torch.Tensor) -> None:
        """Adds one product's gradient of the input, and begins the sum over the ranks after the last one."""
        if self._total is None:
            self._total = grad_TN @ weight_NK
        else:
            self._total.addmm_(grad_TN, weight_NK)
        self._num_added += 1
        if self._num_added == self.num_products:
            self._sum = self._begin(self._total)

    def arrive(self, rest: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of the summed gradient, with `rest` from whatever else took the input in; None where nothing came."""
        total, begun = self._total, self._sum
        self._forget()
        if begun is None:
            parts = [part for part in (total if total is None else total.view(self.shape), rest) if part is not None]  # type: ignore[arg-type]
            return self._begin(sum(parts[1:], parts[0])).result() if parts else None
        found = begun.result()
        return found if rest is None else found + self._begin(rest).result()

    def _begin(self, gradient: torch.Tensor) -> Summing | Adding:
        whole = gradient.contiguous().view(self.shape)  # type: ignore[arg-type]
        return Adding(whole, self.axis) if self.sizes is None else Summing.along(whole, self.axis, self.dim, self.sizes)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way_back: WayBack) -> torch.Tensor:
        ctx.way_back = way_back
        ctx.set_materialize_grads(False)  # products hand their gradients to the way back, and nothing to autograd
        return way_back.join(x)

    @staticmethod
    def backward(ctx: Any, rest: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.way_back.arrive(rest), None
