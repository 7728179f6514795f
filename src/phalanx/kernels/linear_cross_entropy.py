"""A projection to logits and their summed cross entropy in one, chunk by chunk: whole logits are never in memory.

Shape suffixes: N tokens, C those of one chunk, K features, V this process' part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from phalanx.errors import ConfigError
from phalanx.kernels.cross_entropy import cross_entropy_sum
from phalanx.kernels.split_cross_entropy import ALONE, Across, in_full_precision, slope, terms

# Bytes of logits in one chunk: enough rows for matrix products at full speed.
CPU_CHUNK_BYTES = 8 * 1024 * 1024
DEVICE_CHUNK_BYTES = 256 * 1024 * 1024


def linear_cross_entropy_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    across: Across = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed losses of all labels that are not `ignore_index` for the logits x W^T + b, and how many labels there are.

    Shapes: x (..., K); weight (V, K); bias (V); labels (...), tokens of the whole vocabulary.
    Cost: of memory one chunk of logits (two in float32 where they are half), and the gradients of x, weight and bias, which the forward
    forms: the product is made once. Half weights have their gradient summed in float32. Communication as in `split_cross_entropy`.
    Grad: to x, weight and bias, once.
    """
    return choice(across)(x, weight, labels, bias, ignore_index, across)


def choice(across: Across = ALONE) -> Any:
    """The form to use: a compiler fuses the definition itself, where the vocabulary is in one place."""
    return reference if torch.compiler.is_compiling() and across is ALONE else chunked


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    across: Across = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, for a whole vocabulary."""
    return cross_entropy_sum(F.linear(x, weight, bias), labels, ignore_index)


def chunked(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    across: Across = ALONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the logits of a few tokens at a time."""
    labels_N = labels.reshape(-1)
    counted_N = labels_N != ignore_index
    learns = torch.is_grad_enabled()  # within a function it never is, and without it no gradient is to be formed
    loss = _Chunked.apply(x.reshape(-1, x.shape[-1]), weight, bias, labels_N, counted_N, across, learns)
    return loss, counted_N.sum()


def chunk_rows(weight: torch.Tensor, across: Across = ALONE) -> int:
    """How many tokens' logits are formed at once: the same for all who have a part of the vocabulary, since they meet in each chunk."""
    return max(1, _chunk_bytes(weight) // max(1, (across.widest or weight.shape[0]) * weight.itemsize))


def _chunk_bytes(tensor: torch.Tensor) -> int:
    return CPU_CHUNK_BYTES if tensor.device.type == "cpu" else DEVICE_CHUNK_BYTES


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NK: torch.Tensor,
        weight_VK: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        counted_N: torch.Tensor,
        across: Across,
        learns: bool,
    ) -> torch.Tensor:
        wants_x, wants_weight, wants_bias = (learns and needs for needs in ctx.needs_input_grad[:3])
        wide = torch.float32 if weight_VK.dtype in (torch.bfloat16, torch.float16) else weight_VK.dtype
        grad_x = torch.empty_like(x_NK) if wants_x else None
        grad_weight = torch.zeros_like(weight_VK, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros(weight_VK.shape[0], dtype=wide, device=weight_VK.device) if wants_bias else None
        loss = torch.zeros((), dtype=wide, device=x_NK.device)
        size = chunk_rows(weight_VK, across)
        for start in range(0, len(x_NK), size):
            rows = slice(start, start + size)
            part = None if grad_x is None else grad_x[rows]
            loss += _one_chunk(x_NK[rows], weight_VK, bias_V, labels_N[rows], counted_N[rows], across, part, grad_weight, grad_bias)
        ctx.save_for_backward(counted_N.any(), grad_x, grad_weight, grad_bias)
        ctx.dtype = weight_VK.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "the chunked loss was asked for a second derivative (create_graph=True)",
                allowed="one differentiation",
                remedy="a plan without chunked_loss",
            )
        counts, *formed = ctx.saved_tensors
        grad = torch.where(counts, grad, 0)  # of a mean over no labels it is not a number, and what was formed is 0
        grad_x, grad_weight, grad_bias = (None if found is None else _scaled(found, grad, ctx.dtype) for found in formed)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _scaled(found: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in `dtype`, a few rows at a time: what was found stays as it is, and no second copy of its width is made."""
    scaled, factor = torch.empty_like(found, dtype=dtype), factor.to(found.dtype)
    size = max(1, _chunk_bytes(found) // max(1, found[:1].nbytes))
    for rows, room in zip(found.split(size), scaled.split(size), strict=True):
        room.copy_(rows * factor)
    return scaled


def _one_chunk(
    x_CK: torch.Tensor,
    weight_VK: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_C: torch.Tensor,
    counted_C: torch.Tensor,
    across: Across,
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The summed losses of some tokens, whose gradients are written to `grad_x` and added to the other two."""
    found = terms(in_full_precision(F.linear(x_CK, weight_VK, bias_V)), labels_C, counted_C, across)
    loss = found.losses_N.sum()
    if grad_x is None and grad_weight is None and grad_bias is None:
        return loss
    grad_CV = slope(found, counted_C.to(loss.dtype), out_NV=found.weights_NV)
    if grad_bias is not None:
        grad_bias += grad_CV.sum(0)
    narrow_CV = grad_CV.to(weight_VK.dtype)
    if grad_x is not None:
        torch.mm(narrow_CV, weight_VK, out=grad_x)
    if grad_weight is not None:
        _add_product(grad_weight, narrow_CV.T, x_CK)
    return loss


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
