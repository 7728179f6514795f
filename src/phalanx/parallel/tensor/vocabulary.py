"""The next-token loss where each rank has the logits of its part of the vocabulary; whole logits never exist.

Shape suffixes: N tokens, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.kernels import cross_entropy
from phalanx.layout import split_range


class VocabularyLoss:
    """A causal loss that takes logits of this rank's tokens of the vocabulary, as well as whole ones."""

    def __init__(self, axis: Axis):
        self.axis = axis

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Called as `transformers` calls its own."""
        low, high = split_range(vocab_size, self.axis.size, self.axis.index)
        if logits.shape[-1] == vocab_size or logits.shape[-1] != high - low:
            return cross_entropy.causal_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        if shift_labels is None:
            shift_labels = cross_entropy.next_tokens(labels, ignore_index)
        loss_sum, count = split_cross_entropy_sum(logits, shift_labels.to(logits.device), self.axis, low, ignore_index)
        return cross_entropy.mean_over(loss_sum, count, num_items_in_batch)


def split_cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, axis: Axis, low: int, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of all labels that are not `ignore_index`, and how many there are, the same on every rank.

    Shapes: logits (..., V), the tokens from `low` on; labels (...), tokens of the whole vocabulary.
    Cost: one maximum and two sums for each label. Grad: to the logits, without communication.
    """
    labels_N = labels.reshape(-1)
    counted_N = labels_N != ignore_index
    return _SplitCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels_N, counted_N, axis, low), counted_N.sum()


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, counted_N: torch.Tensor, axis: Axis, low: int) -> torch.Tensor:
        wide = torch.float32 if logits_NV.dtype in (torch.bfloat16, torch.float16) else logits_NV.dtype
        scores_NV = logits_NV.to(wide)
        highest_N = scores_NV.amax(-1).contiguous()
        comm.all_reduce(highest_N, axis, op="max")
        is_here_N = counted_N & (labels_N >= low) & (labels_N < low + logits_NV.shape[-1])
        place_N = (labels_N - low).masked_fill(~is_here_N, 0)
        shifted_NV = scores_NV - highest_N[:, None]
        chosen_N = shifted_NV.gather(1, place_N[:, None])[:, 0].masked_fill(~is_here_N, 0)
        weights_NV = shifted_NV.exp_()
        sums_2N = torch.stack([weights_NV.sum(-1), chosen_N])
        comm.all_reduce(sums_2N, axis)
        ctx.save_for_backward(weights_NV, sums_2N[0], place_N, is_here_N, counted_N)
        ctx.dtype = logits_NV.dtype
        return (sums_2N[0].log() - sums_2N[1]).masked_fill(~counted_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        weights_NV, sum_N, place_N, is_here_N, counted_N = ctx.saved_tensors
        scale_N1 = (grad * counted_N)[:, None]
        grad_NV = weights_NV * (scale_N1 / sum_N[:, None])
        grad_NV.scatter_add_(1, place_N[:, None], -scale_N1 * is_here_N[:, None])
        return grad_NV.to(ctx.dtype), None, None, None, None
