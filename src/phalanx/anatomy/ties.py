"""Finds parameters and buffers that one model holds under several names."""

from __future__ import annotations

from torch import nn


def tie_groups(model: nn.Module) -> list[tuple[str, ...]]:
    """The groups of names (two or more each) under which one parameter or buffer is registered; first names in model order."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]
