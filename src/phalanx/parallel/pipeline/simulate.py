"""Runs a table on paper: with the costs of each stage, when each action runs, how long a step takes, and what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.table import COMPUTE, Action, Kind, Table, done_as


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one micro-batch costs in each stage.

    Units: seconds for `forward`, `input`, `weight` and `transfer` (between two ranks, one way), bytes for `activation_bytes` (held from
    forward to the end of the backward) and `weight_bytes` (the part of it that the weight half still needs; default all).
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0.0
    activation_bytes: tuple[float, ...] = ()
    weight_bytes: tuple[float, ...] = ()

    @classmethod
    def equal(cls, num_stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, transfer: float = 0.0) -> Costs:
        """The same for every stage, and one byte of activation each."""
        return cls(
            forward=(forward,) * num_stages,
            input=(input,) * num_stages,
            weight=(weight,) * num_stages,
            transfer=transfer,
            activation_bytes=(1.0,) * num_stages,
        )

    def seconds(self, kind: Kind, stage: int) -> float:
        if kind is Kind.BACKWARD:
            return self.input[stage] + self.weight[stage]
        return {Kind.FORWARD: self.forward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}[kind][stage]

    def held(self, stage: int) -> float:
        return self.activation_bytes[stage] if self.activation_bytes else 1.0

    def freed(self, kind: Kind, stage: int) -> float:
        """What the end of an action lets go of what its micro-batch holds in this stage."""
        later = self.weight_bytes[stage] if self.weight_bytes else self.held(stage)
        return {Kind.INPUT: self.held(stage) - later, Kind.WEIGHT: later, Kind.BACKWARD: self.held(stage)}.get(kind, 0.0)


@dataclass(frozen=True)
class Span:
    """When a rank does an action, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step on paper. `bubble` is what the step takes beyond the busiest rank's work; `peaks` is per rank, in the units of the costs."""

    step_s: float
    busy_s: tuple[float, ...]
    peaks: tuple[float, ...]
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def bubble_s(self) -> float:
        return self.step_s - max(self.busy_s)

    @property
    def idle_fraction(self) -> float:
        """The part of all ranks' time in which they wait."""
        return 1 - sum(self.busy_s) / (self.step_s * len(self.busy_s)) if self.step_s else 0.0


def simulate(table: Table, costs: Costs) -> Timeline:
    """The table's step: each rank in order, each computation as soon as what it needs has arrived; messages go beside computations.

    Raises: PlanError where the table waits for itself or the costs are of another number of stages.
    """
    if len(costs.forward) != table.num_stages:
        raise PlanError(f"costs of {len(costs.forward)} stages for a table of {table.num_stages}")
    rows = [table.computations(rank) for rank in range(table.num_ranks)]
    ends: dict[tuple[int, Action], float] = {}
    spans: list[Span] = []
    place, clock = [0] * table.num_ranks, [0.0] * table.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                action = row[place[rank]]
                start = ready_at(table, rank, action, ends, costs.transfer)
                if start is None:
                    break
                start = max(start, clock[rank])
                clock[rank] = start + costs.seconds(action.kind, table.stage(rank, action.chunk))
                ends.update(((rank, half), clock[rank]) for half in done_as(action))
                spans.append(Span(rank, action, start, clock[rank]))
                place[rank] += 1
                moved = True
    if any(place[rank] < len(row) for rank, row in enumerate(rows)):
        raise PlanError(f"the table {table.name} waits for itself", remedy="require_valid(table) tells where")
    busy = [sum(span.stop - span.start for span in spans if span.rank == rank) for rank in range(table.num_ranks)]
    return Timeline(step_s=max(clock), busy_s=tuple(busy), peaks=tuple(peaks(table, costs)), spans=tuple(spans))


def ready_at(table: Table, rank: int, action: Action, ends: dict[tuple[int, Action], float], transfer: float) -> float | None:
    """When all that an action needs has arrived at its rank; None while something is not done yet."""
    latest = 0.0
    for other, need in table.needs(rank, action):
        end = ends.get((other, need))
        if end is None:
            return None
        latest = max(latest, end + (transfer if other != rank else 0.0))
    return latest


def peaks(table: Table, costs: Costs) -> list[float]:
    """The most that each rank holds at once, in the units of `activation_bytes`."""
    found: list[float] = []
    for rank, row in enumerate(table.rows):
        held = peak = 0.0
        for action in row:
            if action.kind in COMPUTE:
                stage = table.stage(rank, action.chunk)
                held += costs.held(stage) if action.kind is Kind.FORWARD else 0.0
                peak = max(peak, held)
                held -= costs.freed(action.kind, stage)
        found.append(peak)
    return found


def compare(tables: Sequence[Table], costs: Costs) -> list[tuple[Table, Timeline]]:
    """The tables with their steps, fastest first."""
    return sorted(((table, simulate(table, costs)) for table in tables), key=lambda pair: pair[1].step_s)
