"""The run of a plan on ranks, as a person's own script would do it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from phalanx.booster import Booster, Result
from phalanx.cluster.launch import launch
from phalanx.memory import StateEngine
from phalanx.plan import Plan
from phalanx.precision import lift_to_float64
from phalanx.verify.choices import Choices, mixture_blocks
from phalanx.verify.program import Program, Source
from phalanx.verify.reference import Run, start_program
from phalanx.verify.trace import Share, Tensors, Trace, copy_of, digests

MOST_RETRIES = 24


def trace_plan(source: Source, plan: Plan, run: Run, options: dict[str, Any], choices: Choices | None = None) -> Trace:
    """This rank's trace of a run under a plan; rank 0's holds the tensors, the others' only their digests.

    `options` go to the Booster as they are. With `choices`, which routers follow, the run is in the plan's own precision, else in
    float64, with casts to float32 inside the model lifted.
    """
    world = launch()
    program = start_program(source, run, float64=choices is None)
    with lift_to_float64() if choices is None else nullcontext():
        trace = _trace(program, plan, run, options, choices)
    return trace if world.rank == 0 else trace.only_digests()


def _trace(program: Program, plan: Plan, run: Run, options: dict[str, Any], choices: Choices | None) -> Trace:
    booster = Booster(plan, clip_norm=run.clip_norm, forward=run.forward, seed=run.seed, **options)
    optimizer = torch.optim.SGD(program.model.parameters(), lr=run.lr)
    batches = [program.batch(step) for step in range(run.steps)]
    num_elements = sum(parameter.numel() for parameter in program.model.parameters())
    blocks = mixture_blocks(program.model)
    model, optimizer, _, loader, _ = booster.boost(program.model, optimizer, program.criterion, batches, None)
    trace = Trace(start=digests(copy_of(booster.full_state_dict())), share=_share(booster.trainings[0].engine, num_elements))
    for step, batch in enumerate(loader):
        with _following(choices, model, blocks, step):
            gradients, result = _step(booster, optimizer, batch)
        trace.gradients.append(gradients)
        trace.losses.append(float(result.loss))
        trace.norms.append(float(result.grad_norm))
    trace.weights = copy_of(booster.full_state_dict())
    return trace.seal()


def _following(choices: Choices | None, model: nn.Module, blocks: list[str], step: int) -> AbstractContextManager[None]:
    if choices is None:
        return nullcontext()
    choices.step = step
    return choices.followed(model, blocks)


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
