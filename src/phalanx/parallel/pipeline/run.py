"""Executes a table: one interpreter for every schedule, over stages that run a model's own forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.cluster.mesh import Axis
from phalanx.errors import PlanError
from phalanx.parallel.pipeline.buffers import BufferWatch
from phalanx.parallel.pipeline.cut import Cut
from phalanx.parallel.pipeline.gates import Gates, Handover, Visit
from phalanx.parallel.pipeline.halves import Halves
from phalanx.parallel.pipeline.handed import Entry, Handed, arrangement, signature
from phalanx.parallel.pipeline.messages import add_messages, arrivals
from phalanx.parallel.pipeline.post import Announcements, Inbox, Key, Outbox
from phalanx.parallel.pipeline.simulate import Span
from phalanx.parallel.pipeline.table import COMPUTE, Action, Kind, Table

Objective = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]]

# One for each kind of message and direction: what goes one way need not wait for what goes the other. Making them is collective.
CHANNELS = tuple(f"{kind} {way}" for kind in ("activations", "gradients") for way in ("up", "down"))


@dataclass
class MicroBatch:
    """Some rows, the weight of their loss (0 for rows that only keep a rank in step), and what shapes and the forward's way follow from."""

    rows: Any
    weight: float = 1.0
    signature: Hashable = field(init=False)
    arrangement: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.signature, self.arrangement = signature(self.rows), arrangement(self.rows)


@dataclass
class Flight:
    """A micro-batch in one stage between its forward and its backward."""

    received: Handed | None
    place: AbstractContextManager[Any] = field(default_factory=nullcontext)
    handed: Handed | None = None
    roots: list[GradientEdge] = field(default_factory=list)
    halves: Halves | None = None
    gradients: list[torch.Tensor] | None = None  # from a later stage on the same rank


@dataclass(frozen=True)
class Hooks:
    """What surrounds a stage: its forward with the weight of its rows, its backward with the slope of its loss, and its state.

    `placed` gives this rank's part of some rows, and is entered for both.
    `added` is what layers have added to the loss of the last forward by themselves. All may do nothing.
    """

    forward: Callable[[int, float], AbstractContextManager] = lambda stage, weight: nullcontext()
    backward: Callable[[int, Kind, float], AbstractContextManager] = lambda stage, kind, slope: nullcontext()
    placed: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    added: Callable[[float], torch.Tensor | float] = lambda weight: 0.0
    state: Callable[[int, Kind], None] = lambda stage, kind: None


class Runner:
    """Runs micro-batches through the stages that this rank holds, in the order of a table.

    `channels` are the ranks of the pipeline once for each of `CHANNELS`. `splits` says of a stage whether its backwards run in halves;
    where not, a halved backward runs whole in its first half (what recomputes would compute once for each weight).
    """

    def __init__(
        self,
        table: Table,
        model: nn.Module,
        cut: Cut,
        gates: Gates,
        objective: Objective,
        *,
        axis: Axis,
        channels: Mapping[str, Axis],
        device: torch.device,
        splits: Callable[[int], bool] = lambda stage: True,
        hooks: Hooks | None = None,
    ):
        self.table, self.model, self.cut, self.gates, self.objective = table, model, cut, gates, objective
        self.axis, self.channels, self.device, self.splits, self.hooks = axis, channels, device, splits, hooks or Hooks()
        self.rank = axis.index
        self.forwards = _forwards_of(table)
        self.arrivals = arrivals(table)[axis.index]
        self.chosen: dict[tuple, frozenset[int]] = {}
        self.sent: dict[int, Announcements] = {}
        self.heard: dict[int, Announcements] = {}
        self.spans: list[Span] | None = None  # a list where times are to be recorded
        self.begun = 0.0
        self.state_kinds: set[Kind] = set()
        self.num_steps = 0
        self.around: Callable[[int], AbstractContextManager[None]] = _unwatched
        self.outbox = Outbox()
        self._forget()

    @property
    def num_micro(self) -> int:
        return self.table.num_micro

    def _forget(self) -> None:
        self.flights: dict[Key, Flight] = {}
        self.inboxes: dict[tuple[Kind, int], Inbox] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.count = torch.zeros((), dtype=torch.float64, device=self.device)

    # -- whole tables --------------------------------------------------------------------------------------------------

    def step(
        self, micro_batches: Sequence[MicroBatch], scale: float = 1.0, *, opens: bool = True, closes: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All forwards and backwards; returns the sum of losses and its count, which are 0 but on the rank of the last stage.

        Gradients are those of the sum times `scale`. Of several passes over one state the first `opens` it, and the last `closes` it.
        """
        self.state_kinds = ({Kind.UNSHARD} if opens else set()) | ({Kind.REDUCE, Kind.RESHARD} if closes else set())
        if opens and self.num_steps == 0:
            self.around = BufferWatch(self.model).around
        result = self._run(self.table, micro_batches, scale)
        if closes:
            self.num_steps, self.around = self.num_steps + 1, _unwatched
        return result

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """The forwards alone."""
        return self._run(self.forwards, micro_batches, 1.0)

    @torch.no_grad()
    def try_out(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward of some rows as they are, through all stages: (sum of losses, count), 0 but on the rank of the last stage."""
        single = _forwards_of(make_single(self.table))
        self.hooks, before = replace(self.hooks, placed=nullcontext), self.hooks
        try:
            return self._run(single, [MicroBatch(rows)], 1.0)
        finally:
            self.hooks = before

    def _run(self, table: Table, micro_batches: Sequence[MicroBatch], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.gates.require_closed()
        self._forget()
        self.micro_batches, self.scale, self.running = micro_batches, scale, table
        for action in table.rows[self.rank]:
            self._do(action)
            if self.spans is not None and action.kind in COMPUTE:
                self.spans.append(Span(self.rank, action, self.begun, self._now()))
        self.outbox.flush()
        result = self.loss_sum, self.count
        self._forget()
        return result

    def _now(self) -> float:
        """The time of day, which ranks share, when the device has done what it was given; called only while times are recorded."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device.type).synchronize(self.device)
        return time.time()

    def _begin(self) -> None:
        """Notes that a computation has all it needs and begins now."""
        if self.spans is not None:
            self.begun = self._now()

    def _do(self, action: Action) -> None:
        stage, key = self.table.stage(self.rank, action.chunk), (action.micro, action.chunk)
        match action.kind:
            case Kind.FORWARD:
                self._forward(stage, key)
            case Kind.BACKWARD | Kind.INPUT:
                self._backward(stage, key, action.kind)
            case Kind.WEIGHT:
                self._weight(stage, key)
            case Kind.RECV_FORWARD | Kind.RECV_BACKWARD:
                self._inbox(action).begin(key)
            case Kind.SEND_FORWARD:
                self._send_forward(action, stage, key)
            case Kind.SEND_BACKWARD:
                self._send_backward(action, key)
            case _ if action.kind in self.state_kinds:
                self.hooks.state(stage, action.kind)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, key: Key) -> None:
        micro, received = self.micro_batches[key[0]], self._received(stage, key)
        self._begin()
        mode = (stage, self.model.training, torch.is_grad_enabled(), micro.arrangement)
        visit = Visit(stage, *self.cut.range(stage), received, self.chosen.get(mode))
        place = self.hooks.placed(micro.rows)
        result = self._visit(visit, micro, place)
        self.loss_sum += self.hooks.added(micro.weight)
        if visit.chosen is None:
            self._require_sound(visit, micro, place, result)
            self.chosen[mode] = result.header.places if isinstance(result, Handed) else frozenset()
        flight = self.flights[key] = Flight(received, place)
        if not isinstance(result, Handed):
            self._end_forward(flight, visit, result[0] * micro.weight, result[1] * micro.weight)
            if not torch.is_grad_enabled():
                del self.flights[key]
            return
        flight.handed = result
        flight.roots = [get_gradient_edge(tensor) for tensor in result.learning]
        if self._next_is_here(stage):
            self.flights[key[0], key[1] + 1] = Flight(self._as_received(result))
            flight.handed = Handed(result.header, [])

    def _visit(self, visit: Visit, micro: MicroBatch, place: AbstractContextManager[Any]) -> Handed | tuple[torch.Tensor, torch.Tensor]:
        """Runs the model's own forward for one stage: what it hands on, or (sum of losses, count) of the last one."""
        try:
            with (
                self.around(visit.stage),
                self.gates.visiting(visit, self.model.parameters),
                self.hooks.forward(visit.stage, micro.weight),
                place as rows,
            ):
                return self.objective(self.model, rows)
        except Handover as signal:
            return signal.handed

    def _end_forward(self, flight: Flight, visit: Visit, loss_sum: torch.Tensor, count: torch.Tensor) -> None:
        if visit.stage != self.cut.num_stages - 1:
            raise PlanError(
                f"the forward ended after {visit.reached + 1} layers, before the stage's next one",
                allowed="forwards that run all layers",
                remedy="zero3 in place of the pipeline",
            )
        if loss_sum.requires_grad:
            flight.roots = [get_gradient_edge(loss_sum)]
            flight.gradients = [torch.full_like(loss_sum, self.scale)]
        self.loss_sum += loss_sum.detach()
        self.count += count

    @torch.no_grad()
    def _require_sound(self, visit: Visit, micro: MicroBatch, place: AbstractContextManager[Any], result: Any) -> None:
        """A first result that is not a number is so because of the person's own numbers, not because of what is not here."""
        if not _has_nan(result):
            return
        self.gates.poison.show(0.0)
        again = self._visit(Visit(visit.stage, visit.first, visit.last, visit.received, visit.found), micro, place)
        self.gates.poison.show(float("nan"))
        if not _has_nan(again):
            raise PlanError(
                f"stage {visit.stage} reads a parameter outside of the layers that another stage holds: no forward showed who reads it",
                allowed="models whose parameters outside of the layers are registered in the order in which they are read",
                remedy="zero3 in place of the pipeline",
            )

    def _received(self, stage: int, key: Key) -> Handed | None:
        if stage == 0:
            return None
        here = self.flights.get(key)
        if here is not None:  # handed on by the chunk before, on this rank
            return here.received
        tensors = self._take(Action(Kind.RECV_FORWARD, *key))
        header = self.heard[stage].known[self._signature(key)]
        return self._as_received(Handed(header, tensors))

    def _as_received(self, handed: Handed) -> Handed:
        """The tensors as the leaves of a graph of their own."""
        is_learning, pairs = torch.is_grad_enabled(), zip(handed.header.entries, handed.tensors)
        return Handed(handed.header, [entry.mark(tensor.detach()).requires_grad_(entry.learns and is_learning) for entry, tensor in pairs])

    def _send_forward(self, action: Action, stage: int, key: Key) -> None:
        flight = self.flights[key]
        assert flight.handed is not None
        axis, peer = self._channel(action), self.running.peer(self.rank, action)
        told = self.sent.setdefault(stage, Announcements())
        told.announce(action, self._signature(key), flight.handed.header, self.outbox, axis, peer)
        for tensor in flight.handed.tensors:
            self.outbox.send(action, tensor, axis, peer)
        flight.handed = Handed(flight.handed.header, [])  # only the graph still needs what it keeps
        if not torch.is_grad_enabled():
            del self.flights[key]

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, stage: int, key: Key, kind: Kind) -> None:
        flight = self.flights[key]
        gradients = flight.gradients
        if gradients is None:
            gradients = self._take(Action(Kind.RECV_BACKWARD, *key)) if flight.roots else []
        inputs = flight.received.learning if flight.received is not None else []
        self._begin()
        if kind is Kind.INPUT and self.splits(stage):
            flight.halves = Halves(flight.roots, gradients, inputs)
            with self.hooks.backward(stage, kind, self._slope(key)), flight.place:
                flight.halves.run_input()
        elif flight.roots:
            with self.hooks.backward(stage, Kind.BACKWARD, self._slope(key)), flight.place:
                torch.autograd.backward(flight.roots, gradients)
        flight.roots, flight.gradients = [], None
        if stage > 0 and self._previous_is_here(stage):
            self.flights[key[0], key[1] - 1].gradients = self._input_gradients(flight)
        if flight.halves is None and (stage == 0 or self._previous_is_here(stage)):
            del self.flights[key]

    def _weight(self, stage: int, key: Key) -> None:
        self._begin()
        flight = self.flights.get(key)
        if flight is None or flight.halves is None:
            return  # it ran whole
        with self.hooks.backward(stage, Kind.WEIGHT, self._slope(key)), flight.place:
            flight.halves.run_weight()
        del self.flights[key]

    def _send_backward(self, action: Action, key: Key) -> None:
        flight = self.flights[key]
        axis, peer = self._channel(action), self.running.peer(self.rank, action)
        for gradient in self._input_gradients(flight):
            self.outbox.send(action, gradient, axis, peer)
        if flight.halves is None:
            del self.flights[key]

    def _input_gradients(self, flight: Flight) -> list[torch.Tensor]:
        assert flight.received is not None
        inputs = flight.received.learning
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        return gradients

    def _slope(self, key: Key) -> float:
        return self.micro_batches[key[0]].weight * self.scale

    # -- neighbours ----------------------------------------------------------------------------------------------------

    def _next_is_here(self, stage: int) -> bool:
        return self.table.home(stage + 1)[0] == self.rank

    def _previous_is_here(self, stage: int) -> bool:
        return self.table.home(stage - 1)[0] == self.rank

    def _signature(self, key: Key) -> Hashable:
        return (self.model.training, torch.is_grad_enabled(), self.micro_batches[key[0]].signature)

    def _channel(self, action: Action) -> Axis:
        forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        peer = self.running.peer(self.rank, action)
        is_sent = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        rises = (self.rank < peer) == is_sent
        return self.channels[f"{'activations' if forward else 'gradients'} {'up' if rises else 'down'}"]

    def _take(self, receive: Action) -> list[torch.Tensor]:
        """What a receive was for; it shows as well which of this rank's sends have arrived."""
        tensors = self._inbox(receive).take((receive.micro, receive.chunk))
        self.outbox.forget(self.arrivals.get(receive, ()))
        return tensors

    def _inbox(self, action: Action) -> Inbox:
        peer = self.running.peer(self.rank, action)
        if (action.kind, peer) not in self.inboxes:
            axis = self._channel(action)
            entries_of = self._expected_forward(axis, peer) if action.kind is Kind.RECV_FORWARD else self._expected_backward
            self.inboxes[action.kind, peer] = Inbox(axis, peer, self.device, entries_of)
        return self.inboxes[action.kind, peer]

    def _expected_forward(self, axis: Axis, peer: int) -> Callable[[Key, bool], Sequence[Entry] | None]:
        def entries_of(key: Key, must: bool) -> Sequence[Entry] | None:
            heard = self.heard.setdefault(self.table.stage(self.rank, key[1]), Announcements())
            header = heard.known.get(self._signature(key))
            if header is None and must:
                header = heard.receive(self._signature(key), axis, peer)
            return None if header is None else header.entries

        return entries_of

    def _expected_backward(self, key: Key, must: bool) -> Sequence[Entry] | None:
        flight = self.flights.get(key)
        return None if flight is None or flight.handed is None else flight.handed.header.learning


def _unwatched(stage: int) -> AbstractContextManager[None]:
    return nullcontext()


def make_single(table: Table) -> Table:
    """The table's stages with one micro-batch."""
    rows = [[action for action in row if action.micro == 0 and action.kind in COMPUTE] for row in table.rows]
    return replace(table, num_micro=1).with_rows(rows)


def _forwards_of(table: Table) -> Table:
    """The table without backwards."""
    return add_messages(table.with_rows([[action for action in row if action.kind is Kind.FORWARD] for row in table.rows]))


def _has_nan(result: Handed | tuple[torch.Tensor, torch.Tensor]) -> bool:
    tensors = result.tensors if isinstance(result, Handed) else result[:1]
    return any(bool(tensor.isnan().any()) for tensor in tensors if tensor.is_floating_point())
