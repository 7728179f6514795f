"""A model in the stages of a pipeline: how it is cut for a plan, what this rank keeps, and what runs it."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.anatomy import Unrunnable, guess_call, layer_stacks
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis, Mesh, make_axis
from phalanx.cluster.placement import Placements
from phalanx.cluster.random import SplitDraws
from phalanx.errors import PlanError
from phalanx.layout import PartState
from phalanx.memory import StateEngine
from phalanx.memory.partition import find_slots
from phalanx.parallel import recompute
from phalanx.parallel.expert.share import PassShare
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.cut import Cut, Poison, counted, owners, take_out
from phalanx.parallel.pipeline.gates import Gates
from phalanx.parallel.pipeline.reads import places_by_registration, places_by_running
from phalanx.parallel.pipeline.run import CHANNELS, Hooks, Objective, Runner
from phalanx.parallel.pipeline.search import plan_table
from phalanx.parallel.pipeline.state import add_state
from phalanx.parallel.pipeline.table import Kind, Table
from phalanx.precision import Precision

if TYPE_CHECKING:
    from phalanx.plan import Plan


class Stages:
    """One model's cut for one plan; made before any pass changes the model, applied after all others have."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        share: PassShare,
        run: Callable[[], Any] | None,
        sizes: Sequence[int] | None = None,
        costs: LayerCosts | None = None,
    ):
        self.model, self.plan, self.mesh, self.device, self.share = model, plan, mesh, device, share
        self.axis = mesh.axis("pp")
        self.blocks = tuple(layer_stacks(model))
        self.table, self.cut = table_and_cut(model, self.blocks, plan, run, sizes, costs)
        _require_one_cut(model, self.table, self.cut, mesh.world)
        self.stage_of = dict(stages_by_registration(model, self.cut))
        self.mine = [self.table.stage(self.axis.index, chunk) for chunk in range(self.table.num_chunks)]
        self.current = self.mine[0]

    def apply(self, placements: Placements, precision: Precision, draws: SplitDraws | None) -> nn.Module:
        """Takes out what this rank's stages do not read, and puts gates on the layers; `draws` end where a forward is left."""
        for axis, pairs, shape in self._shared():
            placements.add_sums(pairs, shape, axis)
        self.placements, self.poison = placements, Poison(self.device)
        name_of = {pair: slot.name for slot in find_slots(self.model) for pair in slot.owners}
        away = take_out(self.model, self.cut, self.mine, self.poison, lambda own: precision.for_parameter(own).compute)
        self.away = {name_of[entry.pairs[0]]: entry for entry in away}
        self.gates = Gates(self.blocks, self.poison)
        if draws is not None:
            self.gates.at_leave.append(draws.end)
        return self.model

    def _shared(self) -> Iterator[tuple[Axis, list[tuple[nn.Module, str]], torch.Size]]:
        """The parameters that several ranks of the pipeline read, with those ranks."""
        of: dict[int, list[tuple[nn.Module, str]]] = {}
        shapes: dict[int, torch.Size] = {}
        for module, name, parameter in owners(self.model):
            of.setdefault(id(parameter), []).append((module, name))
            shapes[id(parameter)] = parameter.shape
        for key, pairs in of.items():
            ranks = sorted({self.table.home(stage)[0] for stage in self.cut.homes[key]})
            if len(ranks) > 1 and self.axis.index in ranks:
                yield make_axis("pp", [self.axis.ranks[rank] for rank in ranks], self.mesh.rank), pairs, shapes[key]

    def runs(self, module: nn.Module) -> bool:
        """Whether this rank has the stage of a module, and so knows what became of its buffers."""
        return self.stage_of.get(module, 0) in self.mine

    def runner(self, objective: Objective, engine: StateEngine) -> Runner:
        """What executes the table. Halved backwards run whole where activations are recomputed, or parameters come and go by layer."""
        self.engine = engine
        self.within = {
            stage: {chunk.name for chunk in engine.chunks if any(stage in self.cut.homes[slot.identity] for slot in chunk.slots)}
            for stage in self.mine
        }
        self.state: PartState = engine.parts(self.within)
        return Runner(
            self.table,
            self.model,
            self.cut,
            self.gates,
            objective,
            axis=self.axis,
            channels={name: self.mesh.channel(self.axis, name) for name in CHANNELS},
            device=self.device,
            splits=lambda stage: (self.plan.pp_keep or not engine.policy.parameter) and not recomputes(self.cut, stage),
            hooks=Hooks(forward=self._forward, backward=self._backward, added=self._added, state=self._move_state),
        )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All stages on every rank while inside, so that the model can be called and can generate. Collective.

        Cost: the bytes of the other stages' parameters in compute dtype.
        """
        try:
            for name, value in self.engine.full_masters():
                if entry := self.away.get(name):
                    entry.lend(self.placements.of(entry.pairs, entry.shape).layout.take(value))
            with self.gates.opened():
                yield
        finally:
            for entry in self.away.values():
                entry.show(self.poison.like(entry.shape, entry.dtype))

    @contextmanager
    def _forward(self, stage: int, weight: float) -> Iterator[None]:
        self._enter(stage)
        self.share.weight = weight
        try:
            with self.engine.watched():
                yield
        finally:
            self.share.weight = 1.0

    @contextmanager
    def _backward(self, stage: int, kind: Kind, slope: float) -> Iterator[None]:
        self._enter(stage)
        self.share.slope = slope
        keeps_all, reads = kind is Kind.INPUT or self.plan.pp_keep, kind is not Kind.WEIGHT
        with self.engine.backward(False, keeps_all=keeps_all, within=self.within[stage], reads=reads), self.share.repeating():
            yield

    def _move_state(self, stage: int, kind: Kind) -> None:
        {Kind.UNSHARD: self.state.unshard, Kind.RESHARD: self.state.reshard, Kind.REDUCE: self.state.reduce}[kind](stage)

    def _added(self, weight: float) -> torch.Tensor | float:
        """What the layers of a stage have added to the loss of a forward by themselves."""
        self.share.weight = weight
        return self.share.take_added()

    def _enter(self, stage: int) -> None:
        """Random numbers and the order of execution are a stage's own."""
        self.current = stage
        if self.engine.stream is not None:
            self.engine.stream.part = f" of stage {stage}"


def table_and_cut(
    model: nn.Module,
    blocks: tuple,
    plan: Plan,
    run: Callable[[], Any] | None = None,
    sizes: Sequence[int] | None = None,
    costs: LayerCosts | None = None,
) -> tuple[Table, Cut]:
    """The plan's table, and the model's cut into its stages; `run` is a forward that shows who reads what.

    Without measured `costs` they are counted.
    """
    places = places_by_registration(model, blocks) if run is None else places_by_running(model, blocks, run)
    costs = costs or counted(model, blocks, places)
    if len(costs.forward) != len(blocks):
        found = f"costs of {len(costs.forward)} layers for a model of {len(blocks)}"
        raise PlanError(found, allowed="one for each layer", remedy="a record of this model, or no costs: they are then counted")
    table = plan_table(plan.schedule, plan.interleaved, plan.pp, plan.num_micro, plan.num_chunks, costs)
    # Gradients that stay whole are reduced once per step in any case; those of zero2 and zero3 else in every backward.
    table = add_state(table, gathers=plan.pp_keep and plan.zero == 3, reduces=plan.pp_keep or plan.zero < 2)
    return table, Cut.balanced(blocks, places, costs, table.num_stages, sizes)


def _require_one_cut(model: nn.Module, table: Table, cut: Cut, world: Axis) -> None:
    """Raises: PlanError where ranks cut or order the work in different ways, as by times that each has measured for itself."""
    readers = [sorted(cut.stages_of(parameter)) for parameter in model.parameters()]
    everyone = comm.gather_objects((cut.sizes, zlib.crc32(repr((table.rows, readers)).encode())), world)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise PlanError(
                f"rank 0 has stages of {everyone[0][0]} layers, rank {rank} of {other[0]}"
                + (" in another order or with other parameters" if other[0] == everyone[0][0] else ""),
                allowed="the same model, stage_sizes and layer_costs on every rank",
                remedy="the layer_costs of one rank for all",
            )


def recompute_by_stage(plan: Plan, table: Table, cut: Cut) -> None:
    """Has the blocks recompute as the plan says: all of them in one way, or those of each stage in its own."""
    if isinstance(plan.recompute, tuple):
        for stage in range(cut.num_stages):
            recompute.apply(cut.blocks_of(stage), plan.recompute_of(stage, table.home(stage)[0]) or 0.0)
    elif plan.recompute is not None:
        recompute.apply([block for _, block in cut.blocks], plan.recompute)


def recomputes(cut: Cut, stage: int) -> bool:
    """Whether any block of a stage recomputes."""
    return any(map(recompute.recomputes, cut.blocks_of(stage)))


def stages_by_registration(model: nn.Module, cut: Cut) -> Iterator[tuple[nn.Module, int]]:
    """Every module with its stage: that of the block it is in, or of the one that is registered before it."""
    number = {block: index for index, (_, block) in enumerate(cut.blocks)}
    here = 0
    for module in model.modules():
        here = number.get(module, here)
        yield module, bisect_right(cut.starts, here) - 1


def forward_to_watch(model: nn.Module, example: Any, objective: Callable[[nn.Module, Any], Any]) -> Callable[[], Any] | None:
    """A forward that shows which stage reads which parameter: on rows of the loader where it shows them, else on made-up inputs."""
    if example is not None:
        return lambda: objective(model, example)
    try:
        call = guess_call(model)
    except Unrunnable:
        return None
    return lambda: call(model)
