"""`verify`: a plan on local ranks, or under the launcher that is already there, against one process."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phalanx.cluster import comm, pool
from phalanx.cluster.launch import launch
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.errors import ConfigError, PhalanxError, PlanError
from phalanx.parallel.expert.routing import Routing
from phalanx.plan import Plan
from phalanx.verify.compare import QUANTITIES, compare, unequal_replicas, unequal_start
from phalanx.verify.half import FLOOR, half_reference, half_tolerances
from phalanx.verify.program import Functions, Source, find_source
from phalanx.verify.ranks import trace_plan
from phalanx.verify.reference import Forward, Run, reference
from phalanx.verify.report import Comparison, Report

TOLERANCE = 1e-9


def verify(
    model_fn: Callable[[], Any],
    batch_fn: Callable[..., Any],
    plan: Plan | str,
    world: int | None = None,
    steps: int = 3,
    *,
    criterion: Callable[..., Any] | None = None,
    forward: Forward | None = None,
    count: Callable[[Any], Any] | None = None,
    split: Any = None,
    routing: Routing | None = None,
    rows: int | None = None,
    lr: float = 0.1,
    clip_norm: float | None = None,
    seed: int = 0,
    timeout_s: float = 300,
) -> Report:
    """Whether training under `plan` gives the numbers of one process: loss, every gradient, the norm, the weights after `steps`.

    `model_fn()` builds the model and `batch_fn()` or `batch_fn(step)` the global batch; both run in every process, so they must
    be importable there. Everything runs in float64 with SGD and without dropout; a plan with a precision term is verified a
    second time in that precision. `rows` keeps the first rows of each batch.
    Cost: the model once in this process and once on each of `world` local processes.
    Raises: PlanError where the plan cannot run on this world; ConfigError where `world`, `steps` or `rows` is below 1, and where two
    builds do not start from the same weights, or `routing` adds something that one plain process does not have.
    """
    _require_counts(world=world, steps=steps, rows=rows)
    _require_plain(routing)
    run = Run(steps=steps, lr=lr, seed=seed, clip_norm=clip_norm, forward=forward)
    source = Functions(model_fn, batch_fn, criterion, rows)
    options = {name: value for name, value in (("count", count), ("split", split), ("routing", routing)) if value is not None}
    return verify_source(source, plan, world, run, options, timeout_s)


def verify_named(
    model: str,
    plan: Plan | str,
    world: int | None = None,
    steps: int = 3,
    *,
    rows: int | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    timeout_s: float = 300,
) -> Report:
    """`verify` for a built-in tiny model, a directory with a config.json, or `module.py:function`."""
    _require_counts(world=world, steps=steps, rows=rows)
    run = Run(steps=steps, seed=seed, clip_norm=clip_norm)
    return verify_source(find_source(model, rows), plan, world, run, {}, timeout_s)


def _require_plain(routing: Routing | None) -> None:
    if routing is None or routing == Routing(loads=routing.loads):
        return
    if routing.capacity is not None:
        raise ConfigError(
            f"a capacity of {routing.capacity} drops choices of experts by the tokens of one rank and pass: numbers depend on the cut",
            allowed="plans without drops",
            remedy="Routing(capacity=None)",
        )
    raise ConfigError(
        "losses and biases of a routing are no part of the one plain process", allowed="Routing(loads=...)", remedy="leave routing out"
    )


def _require_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} is {count}", allowed="1 or more", remedy=f"{name} 2, or leave it out")


def verify_source(source: Source, plan: Plan | str, world: int | None, run: Run, options: dict[str, Any], timeout_s: float) -> Report:
    """`verify` for any source; under a launcher every rank calls it, and every rank gets the report."""
    begin = time.perf_counter()
    plan = Plan.from_toml(plan) if isinstance(plan, str) and plan.endswith(".toml") else Plan.of(plan)
    here = launch()
    if here.size > 1 and world not in (None, here.size):
        raise PlanError(f"world {world} was asked for and {here.size} ranks were launched", remedy=f"--world {here.size}, or no launcher")
    size = here.size if here.size > 1 else plan.default_world() if world is None else world
    plan.require(None, size)
    if here.size == 1:
        _require_portable(source, run, options)
    comparisons = [_compare(source, replace(plan, precision="fp32"), run, options, size, timeout_s)]
    if plan.precision != "fp32":
        comparisons.append(_compare(source, plan, run, options, size, timeout_s))
    return Report(
        model=source.name,
        plan=str(plan),
        world=size,
        steps=run.steps,
        seconds=round(time.perf_counter() - begin, 3),
        comparisons=tuple(comparisons),
    )


def _compare(source: Source, plan: Plan, run: Run, options: dict[str, Any], world: int, timeout_s: float) -> Comparison:
    """In float64 where the plan has no precision term, else in that precision."""
    half = plan.precision != "fp32"
    if launch().rank == 0:
        exact = expected = reference(source, run)
        if half:
            expected = half_reference(source, run, plan.precision, exact.choices)
    choices = _known_to_all(exact.choices if launch().rank == 0 else None, world) if half else None
    traces = _on_ranks(world, timeout_s, source, plan, run, options, choices)
    if launch().rank > 0:  # launched beside rank 0, which tells the outcome
        return comm.broadcast_object(None, _all_ranks(world))
    if difference := unequal_start(expected.start, traces[0].start):
        raise ConfigError(
            f"two builds of {source.name} differ in {difference} before the first step",
            allowed="a model function whose weights follow from torch.manual_seed",
            remedy="load the weights from a file inside it",
        )
    outcome = Comparison.of(
        compare(expected, traces[0], FLOOR if half else 1e-6),
        precision=plan.precision if half else "float64",
        tolerance=half_tolerances(exact, expected, plan.precision) if half else dict.fromkeys(QUANTITIES, TOLERANCE),
        replicas=unequal_replicas(traces),
        shares=[trace.share for trace in traces],
    )
    return _known_to_all(outcome, world)


def _known_to_all(value: Any, world: int) -> Any:
    return comm.broadcast_object(value, _all_ranks(world)) if launch().size > 1 else value


def _all_ranks(world: int) -> Axis:
    return Mesh({"dp": world, "pp": 1, "cp": 1, "tp": 1}).world


def _on_ranks(world: int, timeout_s: float, source: Source, *arguments: Any) -> list:
    """The traces of all ranks: of fresh local ones, or of those that the launcher started."""
    here = launch()
    if here.size == 1:
        pool.preload("phalanx.verify.ranks", *_loaded_models())
        return _run_ranks(world, timeout_s, source, *arguments)
    return comm.gather_objects(trace_plan(source, *arguments), _all_ranks(here.size))


def _run_ranks(world: int, timeout_s: float, *arguments: Any) -> list:
    """Traces of local ranks; a refusal that a rank raised is raised here as it was."""
    try:
        return pool.run_ranks(trace_plan, world, *arguments, timeout_s=timeout_s)
    except pool.RankError as error:
        if isinstance(error.__cause__, PhalanxError):
            raise error.__cause__ from None
        raise


def _loaded_models() -> list[str]:
    """Model code that the reference has just used: the ranks' server then loads it once instead of each rank."""
    return [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]


def _require_portable(source: Source, *arguments: Any) -> None:
    try:
        pickle.dumps((source, *arguments))
    except Exception as error:
        raise ConfigError(
            f"{source.name} cannot be handed to other processes: {error}",
            allowed="functions at the top level of a module",
            remedy="phalanx verify --model module.py:function",
        ) from error
