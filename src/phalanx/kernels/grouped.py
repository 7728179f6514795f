"""Matrix products of rows that lie sorted by group with one matrix per group: PyTorch's grouped kernel, else segment by segment.

Legend: P rows, G groups, I inputs, O outputs. Group g owns `sizes[g]` neighbouring rows; some groups may own none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F


def grouped_linear(
    x_PI: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int], bias_GO: torch.Tensor | None = None, *, transposed: bool = False
) -> torch.Tensor:
    """Every row times the matrix of its group, plus the group's bias.

    Sizes are known on the host, so that nothing waits for the device.
    Shapes: `weight` is [G, O, I] as `nn.Linear` has it, or [G, I, O] where `transposed`.
    """
    return _GroupedLinear.apply(x_PI.to(weight.dtype), weight, bias_GO, tuple(sizes), transposed)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: tuple[int, ...], transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes, ctx.transposed, ctx.has_bias = sizes, transposed, bias is not None
        weight_GIO = weight if transposed else weight.transpose(1, 2)
        out = rows_times(x, weight_GIO, sizes)
        if bias is not None:
            for group, rows in segments(sizes):
                out[rows] += bias[group]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        weight_GOI = weight.transpose(1, 2) if ctx.transposed else weight
        grad_x = rows_times(grad, weight_GOI, ctx.sizes) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            left, right = (x, grad) if ctx.transposed else (grad, x)
            grad_weight = products_of_groups(left, right, ctx.sizes)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = sums_of_groups(grad, ctx.sizes)
        return grad_x, grad_weight, grad_bias, None, None


def rows_times(x_PI: torch.Tensor, weight_GIO: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Every row times the matrix of its group. Shapes: [P, O]."""
    return torch.ops.phalanx.rows_times(x_PI, weight_GIO, sizes)


def products_of_groups(a_PM: torch.Tensor, b_PN: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """For each group the sum over its rows of a's row times b's row; 0 for a group without rows. Shapes: [G, M, N]."""
    return torch.ops.phalanx.products_of_groups(a_PM, b_PN, sizes)


def _rows_times(x_PI: torch.Tensor, weight_GIO: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if _has_grouped_kernel(x_PI, weight_GIO):
        return F.grouped_mm(x_PI, weight_GIO, offs=_ends(sizes, x_PI.device))
    out = x_PI.new_empty(x_PI.shape[0], weight_GIO.shape[2])
    for group, rows in segments(sizes):
        torch.mm(x_PI[rows], weight_GIO[group], out=out[rows])
    return out


def _products_of_groups(a_PM: torch.Tensor, b_PN: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    if _has_grouped_kernel(a_PM, b_PN):
        return F.grouped_mm(a_PM.t(), b_PN, offs=_ends(sizes, a_PM.device))
    out = a_PM.new_empty(len(sizes), a_PM.shape[1], b_PN.shape[1])
    for group, rows in segments(sizes):
        torch.mm(a_PM[rows].t(), b_PN[rows], out=out[group])
    for group, size in enumerate(sizes):
        if not size:
            out[group].zero_()
    return out


# Operations of their own, so that selective recompute sees one product that it may keep, and a rehearsal its shape.
_library = torch.library.Library("phalanx", "DEF")
_library.define("rows_times(Tensor x, Tensor weight, int[] sizes) -> Tensor")
_library.define("products_of_groups(Tensor a, Tensor b, int[] sizes) -> Tensor")
_library.impl("rows_times", _rows_times, "CompositeExplicitAutograd")
_library.impl("products_of_groups", _products_of_groups, "CompositeExplicitAutograd")


def sums_of_groups(x_PO: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The sum of each group's rows. Shapes: [G, O]."""
    out = x_PO.new_zeros(len(sizes), x_PO.shape[1])
    for group, rows in segments(sizes):
        torch.sum(x_PO[rows], 0, out=out[group])
    return out


def segments(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yields (group, its rows) of the groups that have rows."""
    start = 0
    for group, size in enumerate(sizes):
        if size:
            yield group, slice(start, start + size)
        start += size


def _has_grouped_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether PyTorch multiplies these in one launch; for other devices and dtypes its grouped product is a loop that waits."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.bfloat16
        and a.shape[0] > 0
        and all(size % 8 == 0 for tensor in (a, b) for size in tensor.shape[1:])
        and torch.cuda.get_device_capability(a.device) >= (8, 0)
    )


def _ends(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.pin_memory().to(device, non_blocking=True)
