"""Makes up inputs for a model, so that a forward can be watched before there is any batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

ROWS, LENGTH = 2, 12


def first_batch(loader: Any) -> Any:
    """The first rows that a loader would give, without taking them from it; None where it does not show them."""
    if isinstance(loader, Sequence) and len(loader):
        return loader[0]
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__getitem__"):
        try:
            return loader.collate_fn([loader.dataset[0]])
        except Exception:  # a person's dataset may be read in its own way
            return None
    return None


def sample_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Inputs by the names that the forward takes, from the model's configuration or its first embedding; None where neither tells."""
    accepted = inspect.signature(model.forward).parameters
    config, dtype = getattr(model, "config", None), next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64) if embedding is not None else None
    if config is None:
        required = [item.name for item in accepted.values() if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
        return {required[0]: tokens} if len(required) == 1 and tokens is not None else None
    inputs: dict[str, Any] = {}
    if "pixel_values" in accepted and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs["pixel_values"] = torch.zeros(ROWS, config.num_channels, height, width, dtype=dtype)
    elif "input_features" in accepted and hasattr(config, "max_source_positions"):
        inputs["input_features"] = torch.zeros(ROWS, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
    elif "input_ids" in accepted and tokens is not None:
        inputs["input_ids"] = tokens
    else:
        return None
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = tokens
    if "use_cache" in accepted or any(item.kind is item.VAR_KEYWORD for item in accepted.values()):
        inputs["use_cache"] = False
    return inputs


def watchable_forward(model: nn.Module, loader: Any, run: Callable[[Any], Any]) -> Callable[[], Any] | None:
    """A forward to watch: `run` on the loader's first rows where it shows them, else the model on made-up inputs, else None."""
    batch = first_batch(loader)
    if batch is not None:
        return lambda: run(batch)
    inputs = sample_inputs(model)
    return None if inputs is None else lambda: model(**inputs)
