"""The recorded times of a real step: as a timeline beside the simulated one, and as the costs of its stages and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.log import read_events
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.cut import Cut
from phalanx.parallel.pipeline.simulate import Costs, Span, Timeline, peaks, simulate
from phalanx.parallel.pipeline.table import COMPUTE, Action, Kind, Table

ALLOWED_COSTS = "what booster.traced_step returns, the folder of a run that has it, or LayerCosts"


def timeline_of(table: Table, spans: Iterable[Span]) -> Timeline:
    """The timeline of recorded spans, from the first one's start."""
    spans = [span for span in spans if span.action.kind in COMPUTE]
    if not spans:
        raise ConfigError("no times of a pipeline were recorded")
    begin = min(span.start for span in spans)
    moved = tuple(Span(span.rank, span.action, span.start - begin, span.stop - begin) for span in spans)
    busy = [sum(span.stop - span.start for span in moved if span.rank == rank) for rank in range(table.num_ranks)]
    held = peaks(table, Costs.equal(table.num_stages))
    return Timeline(step_s=max(span.stop for span in moved), busy_s=tuple(busy), peaks=tuple(held), spans=moved)


def costs_of(table: Table, spans: Iterable[Span]) -> Costs:
    """The mean times of each stage. A whole backward counts as two equal halves; messages as taking no time."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for span in spans:
        stage = table.stage(span.rank, span.action.chunk)
        kinds = (Kind.INPUT, Kind.WEIGHT) if span.action.kind is Kind.BACKWARD else (span.action.kind,)
        for kind in kinds:
            found.setdefault((kind, stage), []).append((span.stop - span.start) / len(kinds))
    mean = lambda kind, stage: sum(times) / len(times) if (times := found.get((kind, stage))) else 0.0  # noqa: E731
    columns = {
        name: tuple(mean(kind, stage) for stage in range(table.num_stages))
        for name, kind in (("forward", Kind.FORWARD), ("input", Kind.INPUT), ("weight", Kind.WEIGHT))
    }
    return Costs(**columns)


def simulated_beside(table: Table, spans: Sequence[Span]) -> tuple[Timeline, Timeline]:
    """The step as it was, and as it would be with its own mean times and no time for messages."""
    return timeline_of(table, spans), simulate(table, costs_of(table, spans))


def to_record(table: Table, spans: Sequence[Span], cut: Cut) -> dict[str, Any]:
    """A table, its times and what they say of each layer as plain values, for an event."""
    return {
        "layer_costs": asdict(cut.costs.measured(cut.sizes, costs_of(table, spans))),
        "schedule": table.name,
        "num_ranks": table.num_ranks,
        "num_micro": table.num_micro,
        "num_chunks": table.num_chunks,
        "turns": table.turns,
        "spans": [[span.rank, str(span.action.kind), span.action.micro, span.action.chunk, span.start, span.stop] for span in spans],
    }


def from_record(record: Mapping[str, Any]) -> tuple[Table, list[Span]]:
    """The inverse of `to_record`: rows hold the computations alone, in the order in which they ran."""
    spans = [Span(rank, Action(Kind(kind), micro, chunk), start, stop) for rank, kind, micro, chunk, start, stop in record["spans"]]
    sizes = {name: record[name] for name in ("num_ranks", "num_micro", "num_chunks", "turns")}
    table = Table(name=record["schedule"], **sizes)
    rows = [[span.action for span in sorted(spans, key=lambda span: span.start) if span.rank == rank] for rank in range(table.num_ranks)]
    return table.with_rows(rows), spans


def record_of(run: Path) -> dict[str, Any]:
    """The last recorded step of a run. Raises: ConfigError where it has none."""
    path = run / "events.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run} holds no events.jsonl", allowed="the folder of a run", remedy="phalanx train RECIPE --plan pp2")
    found = [event.attrs for event in read_events(path) if event.kind == "pipeline" and event.name == "trace"]
    if not found:
        raise ConfigError(f"{run} has no recorded times of a pipeline", allowed="runs of three steps or more under a plan with pp")
    return found[-1]


def layer_costs_of(source: LayerCosts | Mapping[str, Any] | str | Path) -> LayerCosts:
    """Measured costs in any form: themselves, the record of a traced step, or the folder of a run that has one.

    A layer's time is its part of its stage's, as the costs by which the stages were cut say.
    """
    if isinstance(source, LayerCosts):
        return source
    if not isinstance(source, Mapping | str | Path):
        raise ConfigError(f"layer_costs of type {type(source).__name__}", allowed=ALLOWED_COSTS, remedy="what booster.traced_step returned")
    record = source if isinstance(source, Mapping) else record_of(Path(source))
    if "layer_costs" not in record:
        raise ConfigError("a record without the times of layers", allowed=ALLOWED_COSTS, remedy="trace a step again")
    columns = {name: tuple(value) if isinstance(value, list) else value for name, value in record["layer_costs"].items()}
    if unlike := {part.name for part in fields(LayerCosts)} ^ set(columns):
        raise ConfigError(f"a record with or without {', '.join(sorted(unlike))}", allowed=ALLOWED_COSTS, remedy="trace a step again")
    return LayerCosts(**columns)
