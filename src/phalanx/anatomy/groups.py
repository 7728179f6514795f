"""Finds what can be split together: the projections that feed one another feature by feature, or head by head, and nothing else.

A group has *columns*, whose outputs are split, and *rows*, whose inputs are split in the same way and whose outputs are sums. Every
feature of a row's input that belongs to one atom must depend on that atom's features of the columns alone. That is read from
gradients of a small copy, so that fused and interleaved projections need no table.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phalanx.anatomy.dataflow import Call, Dataflow, places
from phalanx.anatomy.split import Split, allot


@dataclass
class Group:
    """`kind` is "heads" or "features". Names are full: of modules, and in `parameters` of parameters read between columns and rows.

    `parameters` maps to (dimension, split), or to None where every atom reads the whole. `span` is the number of atoms that share what
    belongs to several, as query heads share a key and value head. `beside` are columns that read what another stack gave (its states).
    """

    kind: str
    atoms: int
    width: int
    span: int
    rows: tuple[str, ...]
    columns: dict[str, Split]
    parameters: dict[str, tuple[int, Split] | None] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()

    @property
    def kv_atoms(self) -> int:
        return self.atoms // self.span

    def allotted(self, parts: int, index: int) -> tuple[int, int]:
        """The atoms of part `index`, as a range."""
        return allot(self.atoms, self.span, parts, index)


@dataclass
class Found:
    """The groups of a specimen, and why other projections are in none."""

    groups: list[Group] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def find_groups(flow: Dataflow, candidates: set[str], stacks: Sequence[str] = ()) -> Found:
    """Every group among the calls named in `candidates`, in order of execution; `stacks` are the names of layer stacks."""
    found = Found()
    feeders = {name: flow.feeders(call) for name, call in flow.calls.items()}
    to_results = flow.reach_results()
    while True:
        sources, rows = _rows(flow, candidates, feeders)
        together: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            together.setdefault(tuple(sources[row]), []).append(row)
        used = [_used_elsewhere(columns, members, feeders, sources, to_results) for columns, members in together.items()]
        stray = {column: consumer for pair in used if pair for column, consumer in [pair]}
        if not stray:
            break
        # What is used elsewhere stays whole; those that it feeds may then be columns themselves.
        candidates = candidates - set(stray)
        found.reasons |= {column: f"its output is also used by {consumer}" for column, consumer in stray.items()}
    for columns, members in together.items():
        try:
            group = _read_group(flow, columns, members)
            group.beside = frozenset(name for name in columns if _is_beside(name, members[0], feeders, stacks))
            found.groups.append(group)
        except Unsplit as reason:
            found.reasons.update(dict.fromkeys([*columns, *members], str(reason)))
    return found


def _is_beside(column: str, row: str, feeders: dict[str, list[str]], stacks: Sequence[str]) -> bool:
    """Whether a column takes in what a stack other than its row's has made."""
    own = [stack for stack in stacks if row.startswith(f"{stack}.")]
    others = tuple(f"{stack}." for stack in stacks if stack not in own)
    return any(feeder.startswith(others) for feeder in feeders[column]) if others else False


class Unsplit(Exception):
    """Why projections that feed each other cannot be split."""


def _rows(flow: Dataflow, candidates: set[str], feeders: dict[str, list[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Which calls are rows, and the columns that feed each.

    A call that is fed feature by feature by calls that are no rows is one. Where some of its feeders were taken for rows, they
    share their output with others that are not: then they are columns as well (an adapter beside a projection).
    """
    rows: list[str] = []
    sources: dict[str, list[str]] = {}
    for name, call in flow.calls.items():
        if name not in candidates or not call.is_linear:
            continue
        near = [feeder for feeder in feeders[name] if feeder in candidates]
        local = [feeder for feeder in near if _is_local(flow, call, feeder)]
        if not [feeder for feeder in local if feeder not in rows]:
            continue
        for feeder in local:
            if feeder in rows:
                rows.remove(feeder)
        rows.append(name)
        sources[name] = near
    return sources, rows


def _is_local(flow: Dataflow, call: Call, feeder: str) -> bool:
    """Whether single features of a call's input depend on a part of the feeder's features only."""
    last = call.input.shape[-1] - 1
    for feature in (0, last):
        reached = flow.behind(call, [feature]).get(feeder)
        if reached is not None and not bool((reached != 0).any(0).all()):
            return True
    return False


def _used_elsewhere(columns, rows, feeders, sources, to_results) -> tuple[str, str] | None:
    """A column, and what uses its output other than rows that it may feed."""
    for column in columns:
        for consumer, names in feeders.items():
            if column in names and consumer not in rows and column not in sources.get(consumer, ()):
                return column, consumer
        if column in to_results:
            return column, "the model's result"
    return None


def _read_group(flow: Dataflow, columns: tuple[str, ...], rows: list[str]) -> Group:
    call = flow.calls[rows[0]]
    size = call.input.shape[-1]
    width = _atom_width(flow, call, columns)
    if width == size:
        raise Unsplit("it has one head, or heads that depend on each other")
    if size % width:
        raise Unsplit(f"its {size} input features do not form heads of {width}")
    if width == 1:
        return _features(flow, call, columns, rows)
    return _heads(flow, call, columns, rows, width)


def _atom_width(flow: Dataflow, call: Call, columns: tuple[str, ...]) -> int:
    """The number of neighbouring input features that depend on the same ones: 1 in an MLP, the size of a head in an attention."""
    size = call.input.shape[-1]
    first = _support(flow, call, columns, 0)
    common = lambda feature: int((_support(flow, call, columns, feature) & first).sum())  # noqa: E731
    if size == 1:
        return 1
    wanted = common(1)
    if wanted == 0:
        return 1
    return bisect.bisect_left(range(2, size), True, key=lambda feature: common(feature) != wanted) + 2


def _support(flow: Dataflow, call: Call, columns: tuple[str, ...], feature: int) -> torch.Tensor:
    """Which features of all columns one input feature depends on, as one vector."""
    reached = flow.behind(call, [feature])
    parts = []
    for column in columns:
        gradient = reached.get(column)
        width = flow.calls[column].output.shape[-1]
        parts.append((gradient != 0).any(0) if gradient is not None else torch.zeros(width, dtype=torch.bool))
    return torch.cat(parts)


def _heads(flow: Dataflow, call: Call, columns: tuple[str, ...], rows: list[str], width: int) -> Group:
    atoms = call.input.shape[-1] // width
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in columns}
    read: dict[str, list[torch.Tensor]] = {}
    for head in range(atoms):
        features = slice(head * width, (head + 1) * width)
        reached = flow.behind(call, features)
        for name in columns:
            size = flow.calls[name].output.shape[-1]
            seen[name].append((reached[name] != 0).any(0) if name in reached else torch.zeros(size, dtype=torch.bool))
        for name, gradient in flow.parameters_behind(call, features).items():
            read.setdefault(name, []).append(gradient != 0)
    splits = {name: Split.from_owners(_owners(torch.stack(masks), name)) for name, masks in seen.items()}
    spans = {blocks.span for split in splits.values() for blocks in split.blocks}
    if 1 not in spans:
        raise Unsplit("no projection belongs to single heads")
    span = max(spans)
    if atoms % span:
        raise Unsplit(f"{atoms} heads do not form groups of {span}")
    parameters = {name: _parameter_split(torch.stack(masks), name) for name, masks in read.items() if len(masks) == atoms}
    if partly := [name for name, masks in read.items() if len(masks) != atoms]:
        raise Unsplit(f"{partly[0]} is read by some heads only")
    return Group("heads", atoms, width, span, tuple(rows), splits, parameters)


def _owners(masks: torch.Tensor, name: str) -> list[tuple[int, int]]:
    """For each feature the range of atoms that depend on it. Shapes: masks (atoms, features)."""
    if not bool(masks.any(0).all()):
        raise Unsplit(f"some features of {name} are used by no head")
    low = masks.to(torch.uint8).argmax(0)
    count = masks.sum(0)
    high = masks.shape[0] - masks.flip(0).to(torch.uint8).argmax(0)
    if not bool((high - low == count).all()):
        raise Unsplit(f"features of {name} are used by heads that are no neighbours")
    return list(zip(low.tolist(), high.tolist()))


def _parameter_split(masks: torch.Tensor, name: str) -> tuple[int, Split] | None:
    """The dimension by which atoms share out a parameter, or None where each reads all of it. Shapes: (atoms, *parameter)."""
    atoms = masks.shape[0]
    for dim in range(masks.dim() - 1):
        others = [axis for axis in range(1, masks.dim()) if axis != dim + 1]
        along = masks.amax(others) if others else masks
        if not bool(along.any(0).all()):
            continue
        try:
            owners = _owners(along, name)
        except Unsplit:
            continue
        if any(high - low < atoms for low, high in owners):
            return dim, Split.from_owners(owners)
    return None


def _features(flow: Dataflow, call: Call, columns: tuple[str, ...], rows: list[str]) -> Group:
    """Atoms are single features. Gradients of the sums weighted by 1 and by place tell, by their quotient, the place."""
    atoms = call.input.shape[-1]
    shape = call.input.shape
    plain = flow.behind(call, slice(None), torch.ones(shape))
    placed = flow.behind(call, slice(None), torch.arange(1, atoms + 1).expand(shape))
    splits = {}
    for name in columns:
        if name not in plain:
            raise Unsplit(f"{name} does not reach {rows[0]}")
        owners = places(plain[name], placed[name], atoms)
        if owners is None:
            raise Unsplit(f"the features of {name} and of {rows[0]} are not matched one by one")
        splits[name] = Split.from_owners(owners)
    parameters: dict[str, tuple[int, Split] | None] = {}
    ones = flow.parameters_behind(call, slice(None), torch.ones(shape))
    by_place = flow.parameters_behind(call, slice(None), torch.arange(1, atoms + 1).expand(shape))
    for name, gradient in ones.items():
        owners = places(gradient[None], by_place[name][None], atoms) if gradient.dim() == 1 and gradient.numel() > 1 else None
        parameters[name] = (0, Split.from_owners(owners)) if owners is not None else None
    return Group("features", atoms, 1, 1, tuple(rows), splits, parameters)
