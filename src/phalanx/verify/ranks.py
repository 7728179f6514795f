"""The run of a plan on ranks, as a person's own script would do it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from phalanx.booster import Booster, Result
from phalanx.cluster.launch import launch
from phalanx.memory import StateEngine
from phalanx.plan import Plan
from phalanx.precision import lift_to_float64
from phalanx.verify.program import Program, Source
from phalanx.verify.reference import Run, start_program
from phalanx.verify.trace import Share, Tensors, Trace, copy_of, digests

MOST_RETRIES = 24


def trace_plan(source: Source, plan: Plan, run: Run, options: dict[str, Any], float64: bool = True) -> Trace:
    """This rank's trace of a run under a plan; rank 0's holds the tensors, the others' only their digests.

    `options` go to the Booster as they are. Under `float64` casts to float32 inside the model are lifted.
    """
    world = launch()
    program = start_program(source, run, float64)
    with lift_to_float64() if float64 else nullcontext():
        trace = _trace(program, plan, run, options)
    return trace if world.rank == 0 else trace.only_digests()


def _trace(program: Program, plan: Plan, run: Run, options: dict[str, Any]) -> Trace:
    booster = Booster(plan, clip_norm=run.clip_norm, forward=run.forward, seed=run.seed, **options)
    optimizer = torch.optim.SGD(program.model.parameters(), lr=run.lr)
    batches = [program.batch(step) for step in range(run.steps)]
    num_elements = sum(parameter.numel() for parameter in program.model.parameters())
    _, optimizer, _, loader, _ = booster.boost(program.model, optimizer, program.criterion, batches, None)
    trace = Trace(start=digests(copy_of(booster.full_state_dict())), share=_share(booster.trainings[0].engine, num_elements))
    for batch in loader:
        gradients, result = _step(booster, optimizer, batch)
        trace.gradients.append(gradients)
        trace.losses.append(float(result.loss))
        trace.norms.append(float(result.grad_norm))
    trace.weights = copy_of(booster.full_state_dict())
    return trace.seal()


def _share(engine: StateEngine, num_elements: int) -> Share:
    """What a plan that does nothing cannot show: ranks that hold less than all."""
    held = sum(slot.num_elements for _, slot in engine.slots)
    updated = sum(slot.shard.numel() for _, slot in engine.shards() if slot.shard is not None)
    return Share(held / max(num_elements, 1), updated / max(num_elements, 1))


def _step(booster: Booster, optimizer: Any, batch: Any) -> tuple[Tensors, Result]:
    """One step in parts, to see its gradients; again where the loss scale of fp16 had to come down first."""
    for _ in range(MOST_RETRIES):
        booster.forward_backward(batch)
        gradients = copy_of(booster.gradients())
        result = optimizer.step()
        if not (result.skipped and booster.precision.scales_loss):
            break
    return gradients, result
