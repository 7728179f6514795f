"""Cuts a model's parameters into units of execution, and each unit's parameters into chunks.

A unit is what is gathered together: a block of a layer stack, or a module outside of the stacks that holds a large weight of its
own (an embedding, a head). What is left is small, or read in ways that cannot be foreseen; it forms one unit that stays gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from phalanx.anatomy.expert_lists import expert_lists
from phalanx.cluster.placement import Placements
from phalanx.memory.chunk import Chunk, Slot

STREAMED_ELEMENTS = 1 << 16  # below this, gathering a weight again and again costs more in latency than keeping it costs in memory
STREAMED_TYPES = (nn.Linear, nn.Embedding)  # modules whose weight nothing but their own forward reads, as a rule


@dataclass
class Unit:
    """Modules whose parameters are gathered together, and the chunks that hold them.

    `modules` has one entry, or several where a weight is tied between them; it is empty for the unit that stays gathered.
    """

    name: str
    modules: list[nn.Module]
    slots: list[Slot] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        return not self.modules


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers of compiled modules put into it."""
    return name.replace("_orig_mod.", "")


def find_units(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], placements: Placements | None = None) -> list[Unit]:
    """The units of a model in the order in which it registers them; every parameter is in exactly one.

    Tied parameters form one slot. A weight tied between a block and something else, or between blocks, stays gathered.
    """
    slots = find_slots(model)
    for slot in slots:
        slot.placement = placements.of(slot.owners, slot.parameter.shape) if placements else slot.placement
    block_of = {id(module): index for index, (_, block) in enumerate(blocks) for module in block.modules()}
    units: dict[object, Unit] = {}
    rest = Unit("rest", [])
    for slot in slots:
        homes = {block_of.get(id(owner), -1) for owner, _ in slot.owners}
        if homes == {-1}:
            if not _is_streamed(slot):
                rest.slots.append(slot)
                continue
            modules = list(dict.fromkeys(owner for owner, _ in slot.owners))
            key, name = tuple(id(module) for module in modules), slot.name.rpartition(".")[0]
        elif len(homes) == 1:
            index = next(iter(homes))
            key, name, modules = index, clean_name(blocks[index][0]), [blocks[index][1]]
        else:
            rest.slots.append(slot)
            continue
        units.setdefault(key, Unit(name, modules)).slots.append(slot)
    _absorb_small_parts(units, rest)
    return [*units.values(), *([rest] if rest.slots else [])]


def find_slots(model: nn.Module) -> list[Slot]:
    slots: dict[int, Slot] = {}
    in_lists = {id(module) for found in expert_lists(model) for module in found.experts.modules()}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = clean_name(f"{module_name}.{attribute}" if module_name else attribute)
            slot = slots.setdefault(id(parameter), Slot(name, parameter, []))
            slot.owners.append((module, attribute))
            slot.is_occasional |= id(module) in in_lists
    return list(slots.values())


def _is_streamed(slot: Slot) -> bool:
    return slot.num_elements >= STREAMED_ELEMENTS and all(isinstance(owner, STREAMED_TYPES) for owner, _ in slot.owners)


def _absorb_small_parts(units: dict[object, Unit], rest: Unit) -> None:
    """A module outside of the stacks whose weights are split between a unit of its own and the rest (a bias) is one unit."""
    home = {id(module): unit for unit in units.values() for module in unit.modules}
    for slot in list(rest.slots):
        owners = [home.get(id(owner)) for owner, _ in slot.owners]
        first = owners[0]
        if first is not None and all(owner is first for owner in owners):
            first.slots.append(slot)
            rest.slots.remove(slot)


def order_of_completion(units: Sequence[Unit]) -> list[Chunk]:
    """All chunks such that in reverse they are complete in a backward as early as can be foreseen.

    What stays gathered is read all over a pass, so it is complete last; in any other place the rest would wait for it. The same holds
    for experts that a rank may not call at all: when these are complete only the end of the backward tells on every rank alike.
    """
    chunks = [chunk for unit in sorted(units, key=lambda unit: not unit.stays) for chunk in unit.chunks]
    return sorted(chunks, key=lambda chunk: not chunk.is_occasional)


def by_kind(unit: Unit, kind_of) -> Iterator[tuple[object, list[Slot]]]:
    """A unit's slots in groups that can share one flat tensor: the same dtypes and ranks, trainable or frozen, always called or not."""
    groups: dict[tuple[object, ...], list[Slot]] = {}
    for slot in unit.slots:
        groups.setdefault((kind_of(slot), slot.parameter.requires_grad, slot.is_occasional, slot.placement.kind), []).append(slot)
    for (kind, *_), slots in groups.items():
        yield kind, slots
