"""A narrower model of the same kind, where one of a person's width would be too large to try things out on."""

from __future__ import annotations

import copy
import dataclasses
import math
import re

import torch
from torch import nn

from phalanx.anatomy.groups import Group
from phalanx.anatomy.loss_source import is_pretrained
from phalanx.anatomy.specimen import is_linear, is_transposed
from phalanx.anatomy.split import Split

LARGE_ELEMENTS = 1 << 22  # of the layers that a trial copies: 32 megabytes in float64, and as much of gradients
LEAST_HEAD = 8
WIDTHS = re.compile(r"hidden_size|d_model|n_embd|intermediate|ffn|d_ff|n_inner|head_dim|d_kv|embed|ff_dim|_rank$|proj_dim")
VOCABULARY = 64


def narrowed(model: nn.Module, num_elements: int) -> tuple[nn.Module, int] | None:
    """A model from the config with every width divided, and by how much; None where the model is small enough, or has no such config.

    `num_elements` is the size of what a trial would copy.
    """
    config = getattr(model, "config", None)
    if num_elements <= LARGE_ELEMENTS or not is_pretrained(model) or config is None:
        return None
    small = copy.deepcopy(config)
    widths = {name: value for name, value in vars(small).items() if type(value) is int and WIDTHS.search(name) and value >= LEAST_HEAD}
    heads = getattr(small, "num_attention_heads", 0)
    hidden = getattr(small, "hidden_size", 0)
    head = getattr(small, "head_dim", None) or (hidden // heads if heads else 0)
    if not heads or head < 2 * LEAST_HEAD:
        return None
    factor = math.gcd(2 ** int(math.log2(head // LEAST_HEAD)), *widths.values())
    if factor == 1:
        return None
    for name, value in widths.items():
        setattr(small, name, value // factor)
    small.vocab_size = min(VOCABULARY, small.vocab_size)
    for name in vars(small):
        if name.endswith("token_id"):
            setattr(small, name, 0 if name.startswith("pad") else None)
    try:
        with torch.device("meta"):  # a trial copies the first layers alone, and gives them values of its own
            built = type(model)(small)
    except Exception:  # a config that contradicts itself when it is made narrower
        return None
    return (built, factor) if _modules(built) == _modules(model) else None


def _modules(model: nn.Module) -> list[tuple[str, type, bool]]:
    """Names and classes, and which have a forward of their own: what a person has exchanged in a model, its config does not build."""
    return [(name, type(module), "forward" in vars(module)) for name, module in model.named_modules()]


def widened(group: Group, factor: int) -> Group:
    """The group of the wide model, read from one that is `factor` times narrower."""
    is_features = group.kind == "features"
    scale = lambda split: split.scaled(factor, atoms=is_features)  # noqa: E731
    return dataclasses.replace(
        group,
        atoms=group.atoms * factor if is_features else group.atoms,
        width=group.width if is_features else group.width * factor,
        columns={name: _bias_or(split, group, scale) for name, split in group.columns.items()},
        parameters={name: part and (part[0], _bias_or(part[1], group, scale)) for name, part in group.parameters.items()},
    )


def _bias_or(split: Split, group: Group, scale) -> Split:
    """One value for each head stays one value."""
    return split if group.kind == "heads" and split == Split.even(group.atoms) else scale(split)


def fits(group: Group, model: nn.Module) -> bool:
    """Whether a group's splits have the sizes of the model's projections."""
    for name, split in group.columns.items():
        module = model.get_submodule(name)
        dim = 0 if is_linear(module) and not is_transposed(module) else 1
        if module.weight.shape[dim] != split.size:
            return False
    return all(
        model.get_submodule(name).weight.shape[0 if is_transposed(model.get_submodule(name)) else 1] == group.atoms * group.width
        for name in group.rows
    )
