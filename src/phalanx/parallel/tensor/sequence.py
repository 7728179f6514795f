"""The residual stream split by sequence: summed and scattered where a split part ends. `entered.py` gathers it where one begins."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.cluster.mesh import Axis
from phalanx.parallel.tensor.parts import Gathering, Summing


def scatter_sums(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks.

    Cost: (n - 1)/n of the whole. Grad: the parts of all ranks, gathered; the same cost.
    """
    return x if axis.size == 1 else _ScatterSums.apply(x, axis, dim, sizes)


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return Summing.along(x.contiguous(), axis, dim, sizes).result()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return Gathering(grad, ctx.axis, ctx.dim, ctx.sizes).joined(), None, None, None
