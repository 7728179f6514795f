"""Ragged batches for models that come without data: lengths that differ, rows that are nearly empty, odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

LENGTHS = (12, 11, 10, 9, 6, 4, 3, 2)
IGNORED = -100
# Smaller ids are kept for padding, begin and end.
FIRST_TOKEN = 3


def make_batch(kind: str, config: Any, step: int, rows: int = len(LENGTHS)) -> dict[str, torch.Tensor]:
    """The batch of one step for a model of `kind`: "causal", "masked", "seq2seq", "image", "speech" or "classes".

    Shapes: `rows` x 12 tokens, right-padded to the lengths 12 11 10 9 6 4 3 2 (repeated for more rows), -100 in the padding's labels.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    if kind == "image":
        return _images(config, rows, generator)
    if kind == "speech":
        return {**_speech(config, rows, generator), "labels": _tokens(config, rows, generator, reverse=True)["labels"]}
    batch = _tokens(config, rows, generator)
    if kind == "seq2seq":
        batch["labels"] = _tokens(config, rows, generator, reverse=True)["labels"]
    elif kind == "classes":
        batch["labels"] = torch.randint(config.num_labels, (rows,), generator=generator)
    elif kind == "masked":
        hidden = torch.rand(rows, max(LENGTHS), generator=generator) < 0.4
        hidden[:, 0] = True
        batch["labels"] = batch["labels"].masked_fill(~hidden, IGNORED)
    return batch


def _tokens(config: Any, rows: int, generator: torch.Generator, reverse: bool = False) -> dict[str, torch.Tensor]:
    length = max(LENGTHS)
    lengths = torch.tensor([LENGTHS[row % len(LENGTHS)] for row in range(rows)])
    if reverse:
        # Targets whose lengths do not follow those of the input.
        lengths = torch.tensor([LENGTHS[-1 - row % len(LENGTHS)] for row in range(rows)])
    padding = torch.arange(length)[None, :] >= lengths[:, None]
    tokens = torch.randint(FIRST_TOKEN, config.vocab_size, (rows, length), generator=generator)
    pad = config.pad_token_id if getattr(config, "pad_token_id", None) is not None else 0
    return {
        "input_ids": tokens.masked_fill(padding, pad),
        "attention_mask": (~padding).long(),
        "labels": tokens.masked_fill(padding, IGNORED),
    }


def _images(config: Any, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {
        "pixel_values": torch.randn(rows, config.num_channels, height, width, generator=generator),
        "labels": torch.randint(config.num_labels, (rows,), generator=generator),
    }


def _speech(config: Any, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)}


def map_floats(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with `function` of every floating-point tensor in it, in nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: map_floats(function, value) for key, value in batch.items()}
    return type(batch)(map_floats(function, value) for value in batch) if isinstance(batch, tuple | list) else batch
