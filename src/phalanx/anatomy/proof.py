"""Tries on a small copy that a group computes with a part of its atoms what it computed with all of them, before it is believed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from phalanx.anatomy.entry import Entry, find_entries
from phalanx.anatomy.groups import Found, Group, Unsplit
from phalanx.anatomy.locality import Local, home_of, make_local, proposals
from phalanx.anatomy.specimen import ROWS, Specimen, is_linear, is_transposed
from phalanx.anatomy.split import Split

TOLERANCE = 1e-9


@dataclass
class Proved:
    """A group, the changes with which it was seen to compute rightly on each part, and where an attention is entered."""

    group: Group
    local: Local
    entry: Entry | None = None


class Whole:
    """One forward of the specimen as it is: the inputs and outputs of rows, the result, and the shapes of modules' arguments."""

    def __init__(self, specimen: Specimen, found: Found):
        self.specimen = specimen
        linears = {name for name, module in specimen.model.named_modules() if is_linear(module)}
        self.homes = {group.rows: home_of(group, linears) for group in found.groups}
        self.calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.arguments: dict[str, dict[Any, torch.Size]] = {}
        model = specimen.model
        rows = [name for group in found.groups for name in group.rows]
        hooks: list[Any] = [model.get_submodule(name).register_forward_hook(self._see(name), with_kwargs=True) for name in rows]
        hooks += [
            model.get_submodule(home).register_forward_pre_hook(self._look_at(home), with_kwargs=True) for home in set(self.homes.values())
        ]
        with removing(hooks), torch.no_grad():
            self.result = _tensors(specimen.run())

    def _see(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
            self.calls.setdefault(name, []).append((_first(args, kwargs).clone(), output.clone()))

        return hook

    def _look_at(self, home: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            given = {**dict(enumerate(args)), **kwargs}
            self.arguments.setdefault(home, {key: value.shape for key, value in given.items() if isinstance(value, torch.Tensor)})

        return hook


def prove(specimen: Specimen, found: Found, parts: int) -> list[Proved]:
    """The groups that were seen to compute rightly when cut into `parts`; the others are given up, with the reason.

    Groups at the same place of several layers are tried together: layers hand each other what belongs to heads.
    """
    whole = Whole(specimen, found)
    proved: list[Proved] = []
    alike: dict[str, list[Group]] = {}
    for group in found.groups:
        alike.setdefault(re.sub(r"\d+", "*", group.rows[0]), []).append(group)
    for groups in alike.values():
        few = next((group for group in groups if group.kind == "heads" and group.atoms < parts), None)
        failure = f"{few.atoms} heads for {parts} ranks" if few else ""
        for candidate in [] if few else _candidates(whole, groups):
            failure = _try(whole, [*proved, *candidate], groups, parts)
            if not failure:
                proved.extend(candidate)
                break
        else:
            names = [name for group in groups for name in [*group.columns, *group.rows]]
            found.reasons.update(dict.fromkeys(names, failure if few else f"a part of it computes something else: {failure}"))
    order = {group.rows: number for number, group in enumerate(found.groups)}
    entries = find_entries(specimen, [item.group for item in proved])
    for item in proved:
        item.entry = entries.get(item.group.rows)
    return sorted(proved, key=lambda item: order[item.group.rows])


def _candidates(whole: Whole, groups: list[Group]) -> Iterator[list[Proved]]:
    """The same kind of change for all groups, the likeliest first."""
    several = []
    for group in groups:
        home = whole.homes[group.rows]
        module = whole.specimen.model.get_submodule(home)
        several.append(list(proposals(group, module, home, whole.arguments.get(home, {}), ROWS)))
    for number in range(max(map(len, several))):
        yield [Proved(group, locals_[min(number, len(locals_) - 1)]) for group, locals_ in zip(groups, several)]


def _try(whole: Whole, cut: list[Proved], newest: list[Group], parts: int) -> str:
    """Runs every different part; returns what went wrong, or nothing."""
    seen = set()
    for index in range(parts):
        shape = []
        for group in newest:
            low, high = group.allotted(parts, index)
            shape.append((high - low, *(split.is_shared(low, high) for split in group.columns.values())))
        if tuple(shape) in seen and index < parts - 1:
            continue
        seen.add(tuple(shape))
        try:
            with torch.no_grad(), _cut_to(whole, cut, parts, index):
                result = _tensors(whole.specimen.run())
            _require_equal(result, whole.result)
        except Different as difference:
            return str(difference)
        except Exception as error:  # whatever a model raises about shapes that do not fit
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


class Different(Unsplit):
    """Numbers that should be equal are not."""


@contextmanager
def _cut_to(whole: Whole, cut: list[Proved], parts: int, index: int) -> Iterator[None]:
    """The specimen as rank `index` of `parts` would have it; its rows give what the whole ones gave, so that only inputs matter."""
    model = whole.specimen.model
    undo: list[Any] = []
    done: set[str] = set()
    with removing(undo):
        for item in cut:
            group = item.group
            low, high = group.allotted(parts, index)
            undo.extend(make_local(model, item.local, group, low, high))
            for name, split in group.columns.items():
                if name not in done:
                    undo.append(_Forward(model.get_submodule(name), _part_of(model.get_submodule(name), split, low, high)))
                done.add(name)
            for name, place in group.parameters.items():
                if place is not None and name not in done:
                    undo.append(_Parameter(model, name, place[0], place[1].ranges(low, high)))
                done.add(name)
            for name in group.rows:
                expected = Split.even(group.atoms, group.width).ranges(low, high)
                undo.append(_Forward(model.get_submodule(name), _Compared(name, whole.calls[name], expected)))
        yield


def _part_of(module: nn.Module, split: Split, low: int, high: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a projection or embedding that gives a rank's features alone."""
    ranges = split.ranges(low, high)
    whole = type(module).forward
    if not is_linear(module):
        return lambda *args, **kwargs: take(whole(module, *args, **kwargs), -1, ranges)
    weight = take(module.weight, 1, ranges).T if is_transposed(module) else take(module.weight, 0, ranges)
    bias = None if module.bias is None else take(module.bias, 0, ranges)
    return lambda x: F.linear(x, weight, bias)


def take(tensor: torch.Tensor, dim: int, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


class _Compared:
    """Stands for a row: compares what comes in with the part of what came in whole, and gives out what it gave then."""

    def __init__(self, name: str, calls: list[tuple[torch.Tensor, torch.Tensor]], ranges: tuple[tuple[int, int], ...]):
        self.name, self.calls, self.ranges, self.number = name, calls, ranges, 0

    def __call__(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        taken, given = self.calls[self.number]
        self.number += 1
        expected = take(taken, -1, self.ranges)
        if x.shape != expected.shape:
            raise Different(f"the input of {self.name} has shape {tuple(x.shape)} and should have {tuple(expected.shape)}")
        if not are_close(x, expected):
            raise Different(f"the input of {self.name} has other numbers")
        return given.clone()


class _Forward:
    """A module's forward replaced for a while."""

    def __init__(self, module: nn.Module, forward: Callable):
        self.module, self.before = module, module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def remove(self) -> None:
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before


class _Parameter:
    """A parameter cut for a while."""

    def __init__(self, model: nn.Module, name: str, dim: int, ranges: tuple[tuple[int, int], ...]):
        owner, _, self.attribute = name.rpartition(".")
        self.parameters = model.get_submodule(owner)._parameters
        self.before = self.parameters[self.attribute]
        assert self.before is not None
        self.parameters[self.attribute] = nn.Parameter(take(self.before.detach(), dim, ranges), requires_grad=False)

    def remove(self) -> None:
        self.parameters[self.attribute] = self.before


@contextmanager
def removing(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in reversed(handles):
            handle.remove()


def _first(args: tuple, kwargs: dict) -> torch.Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def _tensors(output: Any) -> list[torch.Tensor]:
    plain = dict(output) if hasattr(output, "keys") else output
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _require_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected):
        if one.shape == other.shape and not are_close(one, other):
            raise Different("what follows its rows has other numbers")


def are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    largest = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True)
