"""What is split by vocabulary: the head, whose logits stay in parts while a loss is all that needs them, and the next-token loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from phalanx.cluster import comm
from phalanx.kernels import cross_entropy
from phalanx.layout import split_sizes
from phalanx.parallel.tensor.entered import Entered, enter_whole
from phalanx.parallel.tensor.split_logits import SplitLogits, head_losses

Weights = tuple[torch.Tensor, torch.Tensor | None]


class Head:
    """The logits of this rank's part of the vocabulary, whole where no loss is known to read them.

    `multiply` forms them; `weights` gives weight and bias as they are for this rank. `is_chunked` leaves logits to the loss, which forms
    a few at a time: it then calls the module once more, so that whatever brings its parameters does.
    """

    def __init__(
        self,
        module: nn.Module,
        logits: SplitLogits,
        size: int,
        multiply: Callable[[Entered], torch.Tensor],
        weights: Callable[[], Weights],
        *,
        is_chunked: bool = False,
    ):
        self.module, self.logits, self.size, self.multiply, self.weights = module, logits, size, multiply, weights
        self.is_chunked = is_chunked
        self.asked: tuple[torch.Tensor, int] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        axis = self.logits.axis
        if self.asked is not None:
            return head_losses(x, *self.weights(), self.logits.across(self.size), *self.asked)[0]
        entered = enter_whole(x, axis)
        if not self.logits.can_stand_in(self.size):
            return comm.gather_from(self.multiply(entered), axis, -1, split_sizes(self.size, axis.size))
        if self.is_chunked:
            return self.logits.stand_in(entered.full, self.size, self._losses)
        return self.logits.stand_in(self.multiply(entered), self.size)

    def _losses(self, x: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked = labels, ignore_index
        try:
            return self.module(x), (labels != ignore_index).sum()
        finally:
            self.asked = None


class VocabularyLoss:
    """A causal loss that takes logits in parts of the vocabulary, as well as whole ones."""

    def __init__(self, logits: SplitLogits):
        self.logits = logits

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
        if shift_labels is None:
            shift_labels = cross_entropy.next_tokens(labels, ignore_index)
        found = self.logits.causal_sum(logits, shift_labels.to(logits.device), ignore_index)
        if found is None:
            plain = self.logits.plain(logits)
            return cross_entropy.causal_loss(plain, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        return cross_entropy.mean_over(*found, num_items_in_batch)
