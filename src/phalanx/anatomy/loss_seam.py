"""The seam through which the loss of a `transformers` model is exchanged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from phalanx.errors import ConfigError

LossFunction = Callable[..., torch.Tensor]


def replace_causal_loss(model: nn.Module, function: LossFunction) -> LossFunction:
    """Makes `function` the loss of a causal language model, and returns the one it had before.

    `function` is called as the model calls its own: `(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None,
    **keywords)`, with `labels` not yet shifted, and returns a scalar. The former one is kept in `function.replaces`.
    Raises: ConfigError where the model has no such seam or its loss is not the causal one.
    """
    original = getattr(model, "loss_function", None)
    if getattr(original_loss(original), "__name__", None) != "ForCausalLMLoss":
        raise ConfigError(
            f"{type(model).__name__} has no causal loss that could be replaced",
            allowed="transformers models whose loss_function is ForCausalLMLoss",
            remedy="pass a criterion to boost()",
        )

    def replacement(*arguments: object, **keywords: object) -> torch.Tensor:
        return function(*arguments, **keywords)

    replacement.replaces = original  # type: ignore[attr-defined]
    model.loss_function = replacement
    return original


def original_loss(function: LossFunction | None) -> LossFunction | None:
    """The loss function that a model had before any replacement."""
    while hasattr(function, "replaces"):
        function = function.replaces  # type: ignore[union-attr]
    return function
