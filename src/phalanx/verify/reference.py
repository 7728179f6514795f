"""The one-process run that plans are compared with: plain PyTorch, the whole batch at once, none of this package's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.precision import lift_to_float64
from phalanx.verify.batches import map_floats
from phalanx.verify.choices import mixture_blocks
from phalanx.verify.program import Functions, Program, Source, disable_dropout, use_plain_experts
from phalanx.verify.trace import ExecutionOrder, Trace, copy_of, digests

Forward = Callable[[nn.Module, Any], Any]

# Runs of named sources, so that many plans of one model share one. Functions may read anything: those run afresh.
_kept: dict[tuple, Trace] = {}
_KEPT_AT_MOST = 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a program is run on either side: SGD with `lr`, start weights by `seed`; `clip_norm` and `forward` as the Booster takes them."""

    steps: int = 3
    lr: float = 0.1
    seed: int = 0
    clip_norm: float | None = None
    forward: Forward | None = None


def start_program(source: Source, run: Run, float64: bool) -> Program:
    """The program before its first step: start weights and batches that depend on the seed alone, in training mode, without dropout.

    Everything is made in the program's own precision, outside of any lift, and cast afterwards.
    """
    torch.manual_seed(run.seed)
    program = source.build()
    disable_dropout(program.model.train())
    use_plain_experts(program.model)
    batches = [program.batch(step) for step in range(run.steps)]
    if float64:
        program.model.double()
        batches = [map_floats(torch.Tensor.double, batch) for batch in batches]
    return Program(program.model, program.criterion, batches.__getitem__)


def reference(source: Source, run: Run) -> Trace:
    """The trace of a run in float64 in this process; kept for the next call where the source is named."""
    key = (source, run)
    if key in _kept:
        return _kept[key]
    program = start_program(source, run, float64=True)
    with lift_to_float64():
        trace = _trace(program, run)
    if not isinstance(source, Functions):
        while len(_kept) >= _KEPT_AT_MOST:
            _kept.pop(next(iter(_kept)))
        _kept[key] = trace
    return trace


def _trace(program: Program, run: Run) -> Trace:
    model = program.model
    trace = Trace(start=digests(copy_of(model.state_dict())))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr)
    order = ExecutionOrder(model)
    for step in range(run.steps):
        optimizer.zero_grad()
        trace.choices.step = step
        with trace.choices.recorded(model, mixture_blocks(model)):
            loss = plain_loss(model, program.criterion, program.batch(step), run.forward)
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append(copy_of({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        trace.norms.append(norm_of(trace.gradients[-1]))
        if run.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)
        optimizer.step()
    trace.order = order.finish()
    trace.weights = copy_of(model.state_dict())
    return trace


def plain_loss(model: nn.Module, criterion: Callable[..., Any] | None, batch: Any, forward: Forward | None) -> torch.Tensor:
    """The loss of one batch as a single-device program forms it: the criterion's, else the model's own mean over the batch."""
    if forward is not None:
        output = forward(model, batch)
    elif isinstance(batch, Mapping):
        output = model(**{key: value for key, value in batch.items() if criterion is None or key != "labels"})
    elif isinstance(batch, tuple | list):
        output = model(*(batch if criterion is None else batch[:-1]))
    else:
        output = model(batch)
    if criterion is None:
        return output if isinstance(output, torch.Tensor) else output["loss"] if isinstance(output, Mapping) else output.loss
    loss = criterion(output, batch[-1] if isinstance(batch, tuple | list) else batch)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def norm_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The 2-norm over all gradients, each name once."""
    return float(sum((gradient.double() ** 2).sum() for gradient in gradients.values())) ** 0.5
