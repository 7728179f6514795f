"""Cross entropy where this process has the logits of a part of the vocabulary; those who have the rest are reached through `Across`.

Shape suffixes: N tokens, V this process' part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Reduce = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Across:
    """Replaces a tensor by its maximum, or by its sum, over all who have a part of the vocabulary.

    `low` is the first token here; `widest` the most tokens that anyone has, `size` all tokens: both 0 where one has all.
    """

    low: int = 0
    widest: int = 0
    size: int = 0
    highest: Reduce = lambda tensor: None
    total: Reduce = lambda tensor: None


ALONE = Across()


def split_cross_entropy(logits_NV: torch.Tensor, labels_N: torch.Tensor, across: Across, ignore_index: int = -100) -> torch.Tensor:
    """The loss of each token, 0 where its label is `ignore_index`; half logits are computed in float32.

    Labels are tokens of the whole vocabulary.
    Cost: one maximum and two sums for each token. Grad: to the logits, without communication.
    Raises: RuntimeError for other labels, as PyTorch's does (on a device when it is reached, without a host read).
    """
    return _SplitCrossEntropy.apply(logits_NV, labels_N, labels_N != ignore_index, across)


@dataclass(frozen=True)
class Terms:
    """What a loss and its slope are made of: exponentials of the scores here, their sum everywhere, and the place of the label."""

    losses_N: torch.Tensor
    weights_NV: torch.Tensor
    sum_N: torch.Tensor
    place_N: torch.Tensor
    is_here_N: torch.Tensor


def terms(scores_NV: torch.Tensor, labels_N: torch.Tensor, counted_N: torch.Tensor, across: Across) -> Terms:
    """The terms of scores in full precision, in whose memory the exponentials are."""
    require_tokens(labels_N, counted_N, across.size or scores_NV.shape[-1])
    highest_N = scores_NV.amax(-1)
    across.highest(highest_N)
    is_here_N = counted_N & (labels_N >= across.low) & (labels_N < across.low + scores_NV.shape[-1])
    place_N = (labels_N - across.low).masked_fill(~is_here_N, 0)
    shifted_NV = scores_NV.sub_(highest_N[:, None])
    chosen_N = shifted_NV.gather(1, place_N[:, None])[:, 0].masked_fill(~is_here_N, 0)
    weights_NV = shifted_NV.exp_()
    sums_2N = torch.stack([weights_NV.sum(-1), chosen_N])
    across.total(sums_2N)
    losses_N = (sums_2N[0].log() - sums_2N[1]).masked_fill(~counted_N, 0)
    return Terms(losses_N, weights_NV, sums_2N[0], place_N, is_here_N)


def slope(found: Terms, scale_N: torch.Tensor, out_NV: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient of the scores where the loss of a token weighs `scale_N`; `out_NV` may be the memory of the exponentials."""
    scale_N1 = scale_N[:, None]
    grad_NV = torch.mul(found.weights_NV, scale_N1 / found.sum_N[:, None], out=out_NV)
    return grad_NV.scatter_add_(1, found.place_N[:, None], -scale_N1 * found.is_here_N[:, None])


def require_tokens(tokens: torch.Tensor, counted: torch.Tensor | None, size: int) -> None:
    """That all tokens, or those counted, are in a vocabulary of `size`: no part of it would miss one that is in none."""
    is_known = (tokens >= 0) & (tokens < size)
    torch._assert_async((is_known if counted is None else is_known | ~counted).all(), f"a token is not among the {size} of the vocabulary")


def in_full_precision(logits: torch.Tensor) -> torch.Tensor:
    """Half logits in float32, others as they are."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, counted_N: torch.Tensor, across: Across) -> torch.Tensor:
        scores_NV = in_full_precision(logits_NV)
        found = terms(scores_NV.clone() if scores_NV is logits_NV else scores_NV, labels_N, counted_N, across)
        ctx.save_for_backward(found.weights_NV, found.sum_N, found.place_N, found.is_here_N, counted_N)
        ctx.dtype = logits_NV.dtype
        return found.losses_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        *parts, counted_N = ctx.saved_tensors
        return slope(Terms(grad_N, *parts), grad_N.masked_fill(~counted_N, 0)).to(ctx.dtype), None, None, None
