"""Positions of tokens as models without given ones count them, and models whose frequencies depend on how long a row is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

LENGTH_DEPENDENT = ("dynamic", "longrope")
# Position embeddings that count the tokens of the attention mask, by class.
COUNTING_MASK = ("OPTLearnedPositionalEmbedding", "BioGptLearnedPositionalEmbedding")


def own_positions(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The positions that the model itself gives to the tokens of whole rows, where it counts other than 0, 1, 2; None for most models."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    for module in model.modules():
        count = getattr(module, "create_position_ids_from_input_ids", None)
        if count is not None and ids is not None and getattr(module, "padding_idx", None) is not None:
            return count(ids, module.padding_idx)
        if type(module).__name__ in COUNTING_MASK and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return (mask.cumsum(1) * mask - 1).long()
    return None


def length_dependent_positions(model: nn.Module) -> int | None:
    """The length beyond which the model's frequencies depend on the longest position it sees; None for most models."""
    limits = [limit for module in model.modules() for limit in _limits(getattr(module, "config", None))]
    return min(limits, default=None)


def _limits(config: Any) -> list[int]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    kinds = [entry for entry in (found, *found.values()) if isinstance(entry, Mapping)]
    dependent = [entry for entry in kinds if entry.get("rope_type", entry.get("type")) in LENGTH_DEPENDENT]
    longest = getattr(config, "max_position_embeddings", 0)
    return [int(entry.get("original_max_position_embeddings") or longest) for entry in dependent]
