"""`phalanx plan`: reads a plan, lists every conflict, and predicts what it keeps on each rank."""

from __future__ import annotations

import argparse
import math

from phalanx.cli.memory_plan import plan_memory, print_memory
from phalanx.cli.output import print_json, print_rows, show_bytes
from phalanx.errors import ConfigError

EXAMPLE = "phalanx plan zero2+bf16 --world 8 --parameters 1.3e9 --layers 24"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan text such as zero1+tp2, or a TOML file")
    parser.add_argument("--world", type=int, help="number of ranks (default: the fewest that the plan needs)")
    parser.add_argument("--parameters", type=float, help="parameters of the model; the memory of each rank is then predicted")
    parser.add_argument("--table", action="store_true", help="print what every rank of the pipeline does, and draw a step in characters")
    parser.add_argument("--memory", metavar="MODEL", help="a model as `verify` names it: prints where its state lives, and when it moves")
    parser.add_argument("--layers", type=int, default=1, help="layers of the model, of equal size (default: 1)")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.plan import Plan, validate

    _require_counts(arguments)
    faults = [] if arguments.plan.endswith(".toml") else validate(arguments.plan, world=arguments.world)
    if faults:
        report = {"ok": False, "plan": arguments.plan, "conflicts": faults}
        if arguments.json:
            print_json(report)
        else:
            print_rows([("conflict", fault) for fault in faults])
        return 1
    plan = Plan.from_toml(arguments.plan) if arguments.plan.endswith(".toml") else Plan.parse(arguments.plan)
    world = plan.default_world() if arguments.world is None else arguments.world
    plan.require(None, world)
    report = {"ok": True, "plan": str(plan), "world": world, "sizes": plan.sizes(world)}
    if arguments.parameters is not None:
        report["bytes_per_rank"] = _memory(plan, world, int(arguments.parameters), arguments.layers)
    if arguments.memory is not None:
        report["memory"] = plan_memory(plan, arguments.memory)
    shown = _pipeline(plan, arguments.layers, report) if plan.pp > 1 else ""
    if arguments.json:
        print_json(report)
    else:
        _print(report)
        if arguments.memory is not None:
            print_memory(report["memory"])
        if arguments.table:
            print(shown or "no pipeline, and so no table")
    return 0


def _pipeline(plan, num_layers: int, report: dict) -> str:
    """Adds how long ranks wait, were F, B and W of equal time, and what they hold; returns the table and its step as text."""
    from phalanx.parallel.pipeline.balance import LayerCosts
    from phalanx.parallel.pipeline.picture import print_table, print_timeline
    from phalanx.parallel.pipeline.search import plan_table
    from phalanx.parallel.pipeline.simulate import simulate

    equal = (1.0,) * max(num_layers, plan.pp * plan.num_chunks)
    layers = LayerCosts(forward=equal, input=equal, weight=equal, activation_bytes=(1 / len(equal),) * len(equal))
    table = plan_table(plan.schedule, plan.interleaved, plan.pp, plan.num_micro, plan.num_chunks, layers)
    costs = layers.cut(table.num_stages)
    assert costs is not None
    timeline = simulate(table, costs)
    report["pipeline"] = {"idle": timeline.idle_fraction, "micro_batches_held": max(timeline.peaks) * plan.pp}
    return print_table(table) + "\n" + print_timeline(timeline)


def _require_counts(arguments: argparse.Namespace) -> None:
    for name, works in {"world": "2", "parameters": "1.3e9", "layers": "24"}.items():
        count = getattr(arguments, name)
        if count is not None and not 1 <= count < math.inf:
            raise ConfigError(f"--{name} is {count:g}", allowed="1 or more", remedy=f"--{name} {works}")


def _memory(plan, world: int, num_parameters: int, num_layers: int) -> dict[str, int]:
    """The predicted state of each rank for a model of `num_layers` equal layers, without activations."""
    from phalanx.layout import split_sizes
    from phalanx.planner.memory import predict

    return predict(num_parameters, split_sizes(num_parameters, num_layers), plan, plan.sizes(world)["dp"])


def _print(report: dict) -> None:
    sizes = " x ".join(f"{axis}{size}" for axis, size in report["sizes"].items())
    rows = [("plan", report["plan"]), ("world", f"{report['world']} = {sizes}")]
    rows += [(name.replace("_", " "), show_bytes(count)) for name, count in report.get("bytes_per_rank", {}).items() if count]
    if "pipeline" in report:
        found = report["pipeline"]
        rows.append(
            ("pipeline", f"ranks wait {found['idle']:.1%} of the time, and hold up to {found['micro_batches_held']:.3g} micro-batches")
        )
    print_rows(rows)
