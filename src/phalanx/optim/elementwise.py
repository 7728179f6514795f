"""Whether an optimizer may work on shards: only if it treats every element by itself. It is tried out, not looked up."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.errors import ConfigError

STEPS = 3
NUMEL, HALF = 12, 6
# One form per number of dimensions that a parameter may have; the 0-D one is tried beside them.
SHAPES = ((12,), (4, 3), (2, 3, 2), (2, 3, 2, 1), (1, 2, 3, 2, 1))


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Runs an optimizer of the same kind, for each set of its groups' settings, on small whole parameters and on flat halves.

    Each half has an optimizer to itself, as it has on its rank. All must come to the same bits.
    Raises: ConfigError where they differ, or where the optimizer needs a closure or whole matrices.
    """
    kind = type(optimizer)
    try:
        with _disable_current_modes():  # in a rehearsal tensors hold no numbers, and these must
            is_elementwise = _is_elementwise(optimizer)
    except Exception as error:
        raise _refusal(kind, f"it cannot run on flat shards ({type(error).__name__}: {error})") from error
    if not is_elementwise:
        raise _refusal(kind, "its update of one element depends on the others, or on the shape of their tensor")


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    draws = torch.randn(STEPS + 1, NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # The flat ones come first: an optimizer for matrices says best itself why it cannot run on them.
    first = _run(optimizer, [draws[:, :HALF], draws[:, :1]])
    second = _run(optimizer, [draws[:, HALF:]])
    whole = _run(optimizer, [draws[:, 0], *(draws.view(-1, *shape) for shape in SHAPES)])
    for (half, single), (other_half,), (scalar, *forms) in zip(first, second, whole, strict=True):
        flat = torch.cat([half, other_half])
        if not torch.equal(scalar, single) or not all(torch.equal(form, flat) for form in forms):
            return False
    return True


def require_separable(optimizer: torch.optim.Optimizer) -> None:
    """Runs an optimizer of the same kind on all of its parameters at once, and on one after another, as tiers of memory need it.

    Raises: ConfigError where the results differ: it keeps something that all parameters share, such as a count of its own steps.
    """
    with _disable_current_modes():
        draws = torch.randn(STEPS + 1, NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        parts = [draws[:, :HALF], draws[:, HALF:]]
        together, apart = _run(optimizer, parts), _run(optimizer, parts, one_by_one=True)
    if not all(torch.equal(a, b) for pair in zip(together, apart, strict=True) for a, b in zip(*pair, strict=True)):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot update some parameters before others: its step changes something that all share",
            allowed="optimizers whose state belongs to each parameter (SGD, Adam, AdamW, RMSprop, Adagrad, Lion, ...)",
            remedy="AdamW, or zero3",
        )


def elementwise_state(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.dtype | None]]:
    """What the optimizer keeps for each element of a parameter: keys with their dtype, None where it is that of the parameter."""
    found: dict[str, torch.dtype | None] = {}
    with _disable_current_modes():
        for settings in _distinct_settings(optimizer):
            parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
            twin = _twin(optimizer, [{**settings, "params": [parameter]}])
            parameter.grad = torch.ones_like(parameter)
            twin.step()
            for key, value in twin.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    found[key] = None if value.dtype == parameter.dtype else value.dtype
    return sorted(found.items())


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


def _run(optimizer: torch.optim.Optimizer, draws: list[torch.Tensor], one_by_one: bool = False) -> list[list[torch.Tensor]]:
    """For each set of settings, what becomes of parameters that begin as draw[0] and get the gradients draw[1:], flat."""
    settings = _distinct_settings(optimizer)
    groups = [{**each, "params": [nn.Parameter(draw[0].clone()) for draw in draws]} for each in settings]
    twin = _twin(optimizer, groups)
    with torch.random.fork_rng(devices=[]):
        for step in range(1, STEPS + 1):
            for group in groups:
                for parameter, draw in zip(group["params"], draws, strict=True):
                    parameter.grad = draw[step].clone()
            for number in range(len(draws)) if one_by_one else [slice(None)]:
                _step_some(twin, number)
    return [[parameter.detach().reshape(-1) for parameter in group["params"]] for group in groups]


def _step_some(twin: torch.optim.Optimizer, chosen: int | slice) -> None:
    """A step with some of each group's parameters, those at the same places."""
    all_ = [group["params"] for group in twin.param_groups]
    for group, parameters in zip(twin.param_groups, all_, strict=True):
        group["params"] = parameters[chosen] if isinstance(chosen, slice) else [parameters[chosen]]
    twin.step()
    for group, parameters in zip(twin.param_groups, all_, strict=True):
        group["params"] = parameters


def _distinct_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups' settings, once where only their rates differ: those scale an update, and often each layer has its own."""
    distinct = {}
    for group in optimizer.param_groups:
        settings = _settings(group)
        others = {name: value for name, value in settings.items() if name not in ("lr", "initial_lr")}
        if "lr" in settings:  # a warm-up begins at 0, where no update differs from another
            settings["lr"] = settings.get("initial_lr") or settings["lr"] or 0.1
        distinct[repr(others)] = settings
    return list(distinct.values())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    left_out = ("params", "param_names", "capturable")
    settings = {name: value for name, value in group.items() if name not in left_out}
    if settings.get("fused"):  # the same formula, rounded differently at the end of a tensor than in its middle
        settings["fused"] = False
    return {name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value for name, value in settings.items()}


def _twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A fresh optimizer of the same kind over `groups`, with those defaults that its constructor takes."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    defaults = {name: value for name, value in _settings(optimizer.defaults).items() if takes_any or name in accepted}
    if len(groups) > 1:
        twin = type(optimizer)([dict(group) for group in groups], **defaults)
    else:  # a constructor may know nothing of groups
        twin = type(optimizer)(groups[0]["params"], **defaults)
        twin.param_groups[0].update(groups[0])
    for name, value in vars(optimizer).items():  # settings that it keeps outside of its groups
        if name in vars(twin) and isinstance(value, bool | int | float | str | None):
            setattr(twin, name, value)
    return twin
