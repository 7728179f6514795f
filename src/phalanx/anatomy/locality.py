"""What the modules of a group must be told so that they compute with this rank's heads alone: counts, widths, arguments by head."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.groups import Group
from phalanx.anatomy.specimen import is_linear

HEAD_SIZE = re.compile(r"(^|_)head_?(dim|size|width)|dim_per_head|d_kv|proj_dim|head_features")
KEY_VALUE = re.compile(r"kv|key_value")
WIDTH = re.compile(r"split|all_|inner|proj")

Change = tuple[str, str, str]  # module, attribute, quantity
Slice = tuple[str, int | str, int, bool]  # module, place or keyword, dimension, whether rows and heads share it


@dataclass(frozen=True)
class Local:
    """The changes that make one group's modules local, with names relative to `home`, the module that holds the whole group.

    `attributes` are (module, attribute, quantity), `config` the same for the module's config, of which it then has its own copy;
    `slices` are tensors among the arguments of `home` that have one part for each head.
    """

    home: str
    attributes: tuple[Change, ...] = ()
    config: tuple[Change, ...] = ()
    slices: tuple[Slice, ...] = field(default=())


def quantities(group: Group, low: int, high: int) -> dict[str, int]:
    """What is local of a group for a rank with the atoms low to high."""
    heads = high - low
    kv_heads = max(1, heads // group.span)
    return {
        "heads": heads,
        "kv heads": kv_heads,
        "heads per kv head": heads // kv_heads,
        "width": heads * group.width,
        "kv width": kv_heads * group.width,
    }


def home_of(group: Group, linears: set[str]) -> str:
    """The innermost module that holds a group's projections. Columns in other blocks (a bias that all layers share) do not count."""
    rows = group.rows[0].split(".")
    names = [name.split(".") for name in [*group.rows, *(column for column in group.columns if column in linears)]]
    depth = min(_common(rows, name) for name in names)
    return ".".join(rows[: min(depth, len(rows) - 1)])


def _common(one: list[str], other: list[str]) -> int:
    count = 0
    for left, right in zip(one, other):
        if left != right:
            break
        count += 1
    return count


def proposals(group: Group, home: nn.Module, home_name: str, arguments: dict[Any, torch.Size], num_rows: int) -> Iterator[Local]:
    """Sets of changes to try, the likeliest first; the first that is proved right is taken."""
    slices = tuple(_slices(group, arguments, num_rows))
    for chosen_slices in [(), slices] if slices else [()]:
        for attributes in _attribute_sets(group, home):
            yield Local(home_name, attributes, (), chosen_slices)
        for configs in _config_sets(group, home):
            for attributes in _attribute_sets(group, home):
                yield Local(home_name, attributes, configs, chosen_slices)


def _attribute_sets(group: Group, home: nn.Module) -> list[tuple[Change, ...]]:
    found = [
        (name, attribute, quantity)
        for name, module in home.named_modules()
        if not is_linear(module)
        for attribute, value in vars(module).items()
        if type(value) is int and (quantity := _quantity(attribute, value, group)) is not None
    ]
    counts = tuple(change for change in found if "width" not in change[2])
    by_value = tuple(
        (name, attribute, "heads" if value == group.atoms else "kv heads")
        for name, module in home.named_modules()
        if not is_linear(module) and group.kind == "heads"
        for attribute, value in vars(module).items()
        if type(value) is int and value in (group.atoms, group.kv_atoms)
    )
    sure = tuple(change for change in found if "width" not in change[2] or WIDTH.search(change[1]))
    return list(dict.fromkeys([counts, sure, tuple(found), (), by_value]))


def _config_sets(group: Group, home: nn.Module) -> list[tuple[Change, ...]]:
    found = [
        (name, attribute, quantity)
        for name, module in home.named_modules()
        if hasattr(config := getattr(module, "config", None), "__dict__")
        for attribute, value in vars(config).items()
        if type(value) is int and (quantity := _quantity(attribute, value, group)) is not None
    ]
    counts = tuple(change for change in found if "width" not in change[2])
    return [changes for changes in dict.fromkeys([counts, tuple(found)]) if changes]


def _quantity(attribute: str, value: int, group: Group) -> str | None:
    """What a number called `attribute` counts, if it is one of the group's quantities."""
    if group.kind == "features":
        return "width" if value == group.atoms else None
    if "position" in attribute or (value == group.width and HEAD_SIZE.search(attribute)):
        return None
    if "group" in attribute:
        return "heads per kv head" if value == group.span else None
    if KEY_VALUE.search(attribute) and value == group.kv_atoms:
        return "kv heads"
    if "head" in attribute and value == group.atoms:
        return "heads"
    if value == group.atoms * group.width:
        return "width"
    return "kv width" if value == group.kv_atoms * group.width and group.span > 1 and WIDTH.search(attribute) else None


def _slices(group: Group, arguments: dict[Any, torch.Size], num_rows: int) -> Iterator[Slice]:
    if group.kind != "heads":
        return
    for key, shape in arguments.items():
        for dim in range(len(shape) - 2):
            if shape[dim] == group.atoms:
                yield "", key, dim, False
                break
            if dim == 0 and shape[dim] == num_rows * group.atoms:
                yield "", key, dim, True
                break


def make_local(model: nn.Module, local: Local, group: Group, low: int, high: int) -> list[Any]:
    """Applies the changes to a model; returns handles with `remove()` that undo them."""
    values = quantities(group, low, high)
    home = model.get_submodule(local.home)
    undo: list[Any] = []
    for name, attribute, quantity in local.attributes:
        undo.append(Setting(home.get_submodule(name), attribute, values[quantity]))
    for name in dict.fromkeys(name for name, _, _ in local.config):
        module = home.get_submodule(name)
        own = copy.copy(module.config)
        for where, attribute, quantity in local.config:
            if where == name:
                own.__dict__[attribute] = values[quantity]
        undo.append(Setting(module, "config", own))
    if local.slices:
        undo.append(home.register_forward_pre_hook(HeadSlices(local.slices, group.atoms, low, high), with_kwargs=True))
    return undo


class Setting:
    """One attribute set to a local value."""

    def __init__(self, module: nn.Module, attribute: str, value: Any):
        self.module, self.attribute, self.before = module, attribute, module.__dict__[attribute]
        module.__dict__[attribute] = value

    def remove(self) -> None:
        self.module.__dict__[self.attribute] = self.before


class HeadSlices:
    """Cuts arguments that have one part for each head to this rank's heads; those that came local already stay."""

    def __init__(self, slices: tuple[Slice, ...], heads: int, low: int, high: int):
        self.slices, self.heads, self.low, self.high = slices, heads, low, high

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        cut = list(args)
        kwargs = dict(kwargs)
        for _, key, dim, with_rows in self.slices:
            container: Any = cut if isinstance(key, int) else kwargs
            value = container[key] if (key < len(cut) if isinstance(key, int) else key in kwargs) else None
            if isinstance(value, torch.Tensor):
                container[key] = self._cut(value, dim, with_rows)
        return tuple(cut), kwargs

    def _cut(self, tensor: torch.Tensor, dim: int, with_rows: bool) -> torch.Tensor:
        if not with_rows:
            return tensor.narrow(dim, self.low, self.high - self.low) if tensor.shape[dim] == self.heads else tensor
        if tensor.shape[0] % self.heads:
            return tensor
        by_head = tensor.view(-1, self.heads, *tensor.shape[1:])
        return by_head[:, self.low : self.high].reshape(-1, *tensor.shape[1:])
