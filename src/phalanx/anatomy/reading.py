"""Reads a model for tensor parallelism: what can be split together, what by vocabulary, and what stays whole, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from phalanx.anatomy.dataflow import Dataflow
from phalanx.anatomy.groups import Group, find_groups
from phalanx.anatomy.locality import Local
from phalanx.anatomy.narrow import fits, narrowed, widened
from phalanx.anatomy.proof import Proved, prove
from phalanx.anatomy.sequence import sequence_fault
from phalanx.anatomy.specimen import Specimen, Unrunnable, blocks_of, is_linear, make_specimen, num_copied, stacks_of
from phalanx.anatomy.stacks import layer_stacks
from phalanx.anatomy.tables import WHOLE
from phalanx.anatomy.ties import tie_groups


@dataclass
class Anatomy:
    """What a model is made of, by the full names of its modules.

    `layers` are the blocks of its stacks; `seams` the groups that can be split, each with the changes that make its modules local;
    `vocabulary` the embeddings and heads with one row for each token; `whole` what stays whole, and why; `ties` names that share a
    parameter or buffer; `mixing` modules outside of groups that see several tokens at once, and whose; `sequence` says what does not
    compute a part of the sequence as it computes the whole. `draws` tells whether a forward in training draws at random.
    """

    layers: tuple[str, ...]
    seams: tuple[Proved, ...] = ()
    vocabulary: tuple[str, ...] = ()
    whole: dict[str, str] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    mixing: dict[str, str] = field(default_factory=dict)
    sequence: str | None = None
    draws: bool = True

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def roles(self) -> dict[str, str]:
        """The role of each module that takes part: "column", "row", "vocabulary" or "whole"."""
        found = dict.fromkeys(self.whole, "whole")
        for item in self.seams:
            found |= dict.fromkeys(item.group.columns, "column") | dict.fromkeys(item.group.rows, "row")
        return found | dict.fromkeys(self.vocabulary, "vocabulary")

    @property
    def heads(self) -> dict[str, tuple[int, int]]:
        """For each attention, by the name of its module, (heads, key and value heads)."""
        return {item.local.home: (item.group.atoms, item.group.kv_atoms) for item in self.seams if item.group.kind == "heads"}


def read_anatomy(
    model: nn.Module,
    parts: int = 2,
    call: Callable[[nn.Module], Any] | None = None,
    overrule: dict[str, str] | None = None,
) -> Anatomy:
    """Reads `model`, which is left as it is, and proves on a small copy that every group works when cut into `parts`.

    `call` runs a forward on a copy; without it inputs are made up. `overrule` maps patterns of module names to the reason why they
    stay whole.
    Cost: a copy of the first layers in float64, and some dozens of short forwards and backwards on it; of a large model of
    `transformers` a narrower one is built from its config for that.
    Raises: Unrunnable where the copy cannot be run.
    """
    with unset_fake_temporarily():  # also in a rehearsal the copy has numbers
        anatomy = _read_narrower(model, parts, overrule or {})
        return anatomy or _read(model, make_specimen(model, call), parts, overrule or {})


def _read_narrower(model: nn.Module, parts: int, overrule: dict[str, str]) -> Anatomy | None:
    """The reading of a narrower model, made as wide as this one; None where there is no such model, or its reading does not fit."""
    found = narrowed(model, num_copied(model))
    if found is None:
        return None
    small, factor = found
    try:
        anatomy = _read(small, make_specimen(small, None), parts, overrule)
    except Unrunnable:
        return None
    seams = tuple(dataclasses.replace(item, group=widened(item.group, factor)) for item in anatomy.seams)
    if not all(fits(item.group, model) for item in seams):
        return None
    return dataclasses.replace(anatomy, seams=seams, ties=tuple(tie_groups(model)))


def _read(model: nn.Module, specimen: Specimen, parts: int, overrule: dict[str, str]) -> Anatomy:
    flow = Dataflow(specimen)
    inside = tuple(f"{name}." if name else "" for name, _ in blocks_of(specimen.model))
    read_elsewhere = {name.rpartition(".")[0]: "its weight is read outside of it" for name in flow.read_elsewhere()}
    patterns = {**WHOLE.get(type(model).__name__, {}), **overrule}
    told = {name: reason for name in flow.calls for pattern, reason in patterns.items() if re.fullmatch(pattern, name)}
    candidates = {name for name in flow.calls if name.startswith(inside)} - set(read_elsewhere) - set(told)
    vocabulary = _vocabulary(specimen, flow, set(read_elsewhere) | set(told), parts)
    stacks = [name for name, _ in stacks_of(specimen.model)]
    found = find_groups(flow, candidates - set(vocabulary), stacks)
    seams = prove(specimen, found, parts)
    reasons = {**found.reasons, **read_elsewhere, **told}
    anatomy = _for_whole_model(model, specimen, seams, vocabulary, reasons)
    anatomy.mixing = _mixing(flow, anatomy, inside)
    anatomy.sequence = sequence_fault(specimen, seams)
    anatomy.draws = specimen.draws_in_training()
    return anatomy


def _mixing(flow: Dataflow, anatomy: Anatomy, inside: tuple[str, ...]) -> dict[str, str]:
    """Modules within blocks that take in other tokens than their own, though they are no rows of a group; and from where."""
    rows = {name for item in anatomy.seams for name in item.group.rows}
    found = {}
    for name, call in flow.calls.items():
        if call.is_linear and name not in rows and name.startswith(inside):
            source = flow.other_tokens(call)
            if source is not None and source.startswith(inside):
                found[name] = source
    return found


def _vocabulary(specimen: Specimen, flow: Dataflow, excluded: set[str], parts: int) -> tuple[str, ...]:
    """The token embedding and the head, with all that share their weights.

    None where one of those is not called as a module, or a part would have no token.
    """
    model = specimen.model
    embeddings = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    tokens = _named(model, "get_input_embeddings")
    heads = [name for name in flow.reach_results() if flow.calls[name].is_linear and not name.startswith(_inside(model))]
    head = _named(model, "get_output_embeddings")
    if tokens is None:
        sizes = {model.get_submodule(name).weight.shape[0] for name in heads}
        tokens = next((name for name in embeddings if model.get_submodule(name).weight.shape[0] in sizes), None)
    if tokens is None or not isinstance(model.get_submodule(tokens), nn.Embedding):
        return ()
    size = model.get_submodule(tokens).weight.shape[0]
    members = {tokens} | ({head} if head else set()) | {name for name in heads if model.get_submodule(name).weight.shape[0] == size}
    weights = {id(model.get_submodule(name).weight) for name in members}
    members |= {name for name, module in model.named_modules(remove_duplicate=False) if id(getattr(module, "weight", None)) in weights}
    sound = size >= parts and all(_is_sound(model.get_submodule(name)) for name in members) and not members & excluded
    return tuple(sorted(members)) if sound else ()


def _inside(model: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}." for name, _ in blocks_of(model) if name) or ("\0",)


def _is_sound(module: nn.Module) -> bool:
    """Whether rows of the weight can be taken apart: an embedding without a limit on norms, or a projection."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_linear(module)


def _named(model: nn.Module, getter: str) -> str | None:
    """The full name of the module that a `transformers` model gives for its tokens or logits."""
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return next((name for name, other in model.named_modules() if other is module), None) if module is not None else None


def _for_whole_model(model: nn.Module, specimen: Specimen, seams, vocabulary, reasons: dict[str, str]) -> Anatomy:
    """What was read of a block holds for all blocks that it stands for."""
    every: list[Proved] = []
    whole: dict[str, str] = {}
    for block, stand_in in specimen.kinds.items():
        every += [_renamed(item, stand_in, block) for item in seams if _is_in(item.group.rows[0], stand_in)]
        whole |= {_moved(name, stand_in, block): reason for name, reason in reasons.items() if _is_in(name, stand_in)}
    taken = {name for item in every for name in [*item.group.rows, *item.group.columns]} | set(vocabulary)
    for name, module in model.named_modules():
        if (is_linear(module) or isinstance(module, nn.Embedding)) and name not in taken:
            whole.setdefault(name, reasons.get(name, "nothing that it feeds could be split with it"))
    layers = tuple(name for name, _ in layer_stacks(model))
    return Anatomy(
        layers, tuple(every), vocabulary, {name: why for name, why in whole.items() if name not in taken}, tuple(tie_groups(model))
    )


def _is_in(name: str, block: str) -> bool:
    return not block or name.startswith(block + ".")


def _moved(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if old and _is_in(name + ".", old) else name


def _renamed(item: Proved, old: str, new: str) -> Proved:
    move = lambda name: _moved(name, old, new)  # noqa: E731
    group: Group = dataclasses.replace(
        item.group,
        rows=tuple(move(name) for name in item.group.rows),
        columns={move(name): split for name, split in item.group.columns.items()},
        parameters={move(name): split for name, split in item.group.parameters.items()},
    )
    local: Local = dataclasses.replace(item.local, home=move(item.local.home))
    entry = item.entry and dataclasses.replace(item.entry, module=move(item.entry.module))
    return Proved(group, local, entry)
