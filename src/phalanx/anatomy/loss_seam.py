"""The seam through which the loss of a `transformers` model is exchanged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from phalanx.anatomy.loss_source import find_speaker

LossFunction = Callable[..., torch.Tensor]


def replace_causal_loss(model: nn.Module, function: LossFunction) -> LossFunction | None:
    """Makes `function` the loss of a causal language model; returns the one it had, or None where the model has no causal loss.

    `function` is called as the model calls its own: `(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None,
    **keywords)`, with `labels` not yet shifted, and returns a scalar. A model inside a wrapper is found.
    """
    speaker, source = find_speaker(model)
    original = getattr(speaker, "loss_function", None) if source.calls_seam else None
    if getattr(original_loss(original), "__name__", None) != "ForCausalLMLoss":
        return None

    def replacement(*arguments: object, **keywords: object) -> torch.Tensor:
        return function(*arguments, **keywords)

    replacement.replaces = original  # type: ignore[attr-defined]
    speaker.loss_function = replacement
    return original


def original_loss(function: LossFunction | None) -> LossFunction | None:
    """The loss function that a model had before any replacement."""
    while hasattr(function, "replaces"):
        function = function.replaces  # type: ignore[union-attr]
    return function
