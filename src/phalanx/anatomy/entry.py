"""Where activations come into the module that computes a group's heads: the argument that its columns take in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.groups import Group
from phalanx.anatomy.specimen import Specimen, is_linear

Key = int | str


@dataclass(frozen=True)
class Entry:
    """The module whose code sees the activations before its columns do, and its arguments: places or keywords.

    `stream` is the argument from the residual stream, `beside` one from another stack, None where there is none. `hands_on` says that
    the columns take in these themselves, and nothing that was made of them.
    """

    module: str
    stream: Key | None = None
    beside: Key | None = None
    hands_on: bool = True


def find_entries(specimen: Specimen, groups: list[Group]) -> dict[tuple[str, ...], Entry]:
    """The entry of every attention, by its rows, seen in one forward."""
    model = specimen.model
    found: dict[tuple[str, ...], Entry] = {}
    given: dict[str, dict[Key, torch.Tensor]] = {}
    hooks: list[Any] = []

    def remember(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            everything: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
            given[name] = {key: value for key, value in everything.items() if isinstance(value, torch.Tensor)}

        return hook

    def look(group: Group, column: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            entry = found[group.rows]
            x, arguments = args[0] if args else next(iter(kwargs.values())), given.get(entry.module, {})
            key = _key_of(x, arguments)
            if key is not None:
                entry = replace(entry, hands_on=entry.hands_on and arguments[key] is x)
                found[group.rows] = replace(entry, beside=key) if column in group.beside else replace(entry, stream=key)

        return hook

    for group in groups:
        if group.kind != "heads":
            continue
        columns = [name for name in group.columns if is_linear(model.get_submodule(name))]
        home = _innermost(columns)
        found[group.rows] = Entry(home)
        hooks.append(model.get_submodule(home).register_forward_pre_hook(remember(home), with_kwargs=True))
        hooks += [model.get_submodule(name).register_forward_pre_hook(look(group, name), with_kwargs=True) for name in columns]
    try:
        with torch.no_grad():
            specimen.run()
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _innermost(columns: list[str]) -> str:
    """The innermost module that holds all columns."""
    paths = [name.split(".")[:-1] for name in columns]
    common = paths[0]
    for path in paths[1:]:
        length = next((at for at, (one, other) in enumerate(zip(common, path)) if one != other), min(len(common), len(path)))
        common = common[:length]
    return ".".join(common)


def _key_of(x: torch.Tensor, arguments: dict[Key, torch.Tensor]) -> Key | None:
    """The argument that is `x`, else the first of its shape in rows and tokens."""
    for key, value in arguments.items():
        if value is x:
            return key
    return next((key for key, value in arguments.items() if value.dim() == x.dim() == 3 and value.shape[:2] == x.shape[:2]), None)
