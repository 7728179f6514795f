"""One process in half precision, in plain PyTorch: half weights and activations, float32 masters and gradient sums."""

from __future__ import annotations

import copy

import torch
from torch import nn

from phalanx.verify.batches import map_floats
from phalanx.verify.choices import Choices, mixture_blocks
from phalanx.verify.compare import compare, worst_of
from phalanx.verify.program import Source
from phalanx.verify.reference import Run, norm_of, plain_loss, start_program
from phalanx.verify.trace import ExecutionOrder, Trace, copy_of, digests

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}

# Tensors are measured against at least this part of the largest one: what is smaller is mostly rounding.
FLOOR = 1e-2

# Powers of two change no bit of a gradient that neither overflows nor underflows; halved until nothing overflows.
FP16_SCALE = 1024.0
# Beyond this the precision cannot train the model, and agreement would mean nothing.
MOST_TOLERANCE = 0.5


def half_reference(source: Source, run: Run, precision: str, choices: Choices) -> Trace:
    """The trace of a run in which forward and backward compute in half precision and SGD updates float32 masters.

    `choices` are those of the exact run, which routers of mixtures follow.
    """
    program = start_program(source, run, float64=False)
    dtype, scale = DTYPES[precision], FP16_SCALE if precision == "fp16" else 1.0
    masters, model = program.model, _half_copy(program.model, dtype)
    trace = Trace(start=digests(copy_of(masters.state_dict())))
    optimizer = torch.optim.SGD(masters.parameters(), lr=run.lr)
    order = ExecutionOrder(model)
    for step in range(run.steps):
        _copy_weights(masters, model)
        batch = map_floats(lambda value: value.to(dtype), program.batch(step))
        choices.step = step
        with choices.followed(model, mixture_blocks(model)):
            loss = plain_loss(model, program.criterion, batch, run.forward)
        while not _backward(loss.float() * scale, model) and scale > 1.0:
            scale /= 2
        for master, weight in zip(masters.parameters(), model.parameters()):
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype) / scale
        trace.losses.append(loss.item())
        trace.gradients.append(copy_of({name: p.grad for name, p in masters.named_parameters() if p.grad is not None}))
        trace.norms.append(norm_of(trace.gradients[-1]))
        if run.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), run.clip_norm)
        optimizer.step()
    trace.order = order.finish()
    parameters = dict(masters.named_parameters(remove_duplicate=False))
    trace.weights = copy_of({name: parameters.get(name, value) for name, value in model.state_dict().items()})
    return trace


def _backward(loss: torch.Tensor, model: nn.Module) -> bool:
    """Fills the gradients of the model afresh; whether all are finite."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    return all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def half_tolerances(exact: Trace, half: Trace, precision: str) -> dict[str, float]:
    """How far another order of rounding may move each quantity: twice as far as this precision itself moves it away from float64.

    At least 4 units of roundoff. A wrong reduction or count is off by a tenth and more.
    """
    moved = worst_of(compare(exact, half, FLOOR))
    return {quantity: min(max(2 * error, 4 * ROUNDOFF[precision]), MOST_TOLERANCE) for quantity, error in moved.items()}


def _half_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy whose float32 parameters are in half precision; buffers, and parameters of other dtypes, stay as they are."""
    half = copy.deepcopy(model)
    for parameter in half.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)
    return half


@torch.no_grad()
def _copy_weights(masters: nn.Module, model: nn.Module) -> None:
    for master, weight in zip(masters.parameters(), model.parameters()):
        weight.copy_(master)
