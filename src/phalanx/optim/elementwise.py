"""Whether an optimizer may work on shards: only if it treats every element by itself. It is tried out, not looked up."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.errors import ConfigError

STEPS = 3
ROWS, COLUMNS = 4, 3


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Runs an optimizer of the same kind and settings on a small matrix, whole and in two flat halves, and compares bit by bit.

    Raises: ConfigError where they differ, or where the optimizer needs a closure or whole matrices.
    """
    kind = type(optimizer)
    try:
        with _disable_current_modes():  # in a rehearsal tensors hold no numbers, and these must
            whole = _run(optimizer, [(ROWS, COLUMNS)])
            halves = _run(optimizer, [(ROWS * COLUMNS // 2,)] * 2)
            is_equal = torch.equal(whole, halves)
    except Exception as error:
        raise _refusal(kind, f"it cannot run on flat shards ({type(error).__name__}: {error})") from error
    if not is_equal:
        raise _refusal(kind, "its update of one element depends on the others")


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that evaluates the loss itself would run passes whose gradients nobody sums over ranks.

    Raises: ConfigError where its step cannot do without a closure.
    """
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind.__name__}.step needs a closure",
            allowed="optimizers that work with the gradients of booster.backward",
            remedy=f"AdamW in place of {kind.__name__}",
        )


def _refusal(kind: type, why: str) -> ConfigError:
    return ConfigError(
        f"{kind.__name__} cannot be sharded: {why}",
        allowed="optimizers that treat every element by itself (SGD, Adam, AdamW, RMSprop, Adagrad, Lion, ...), or zero0",
        remedy=f"plan zero0 with {kind.__name__}, or AdamW",
    )


def _run(optimizer: torch.optim.Optimizer, shapes: list[tuple[int, ...]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(ROWS * COLUMNS, generator=generator, dtype=torch.float64) for _ in range(STEPS + 1)]
    cut = [draw.split([torch.Size(shape).numel() for shape in shapes]) for draw in draws]
    parameters = [nn.Parameter(part.clone().view(shape)) for part, shape in zip(cut[0], shapes)]
    twin = _twin(optimizer, parameters)
    with torch.random.fork_rng(devices=[]):
        for step in range(STEPS):
            for parameter, part, shape in zip(parameters, cut[step + 1], shapes):
                parameter.grad = part.clone().view(shape)
            twin.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _twin(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A fresh optimizer of the same kind, with those settings that its constructor takes."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    settings = {name: value for name, value in optimizer.defaults.items() if takes_any or name in accepted}
    settings = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in settings.items()}
    settings.pop("capturable", None)
    settings.pop("params", None)
    return type(optimizer)(parameters, **settings)
