"""Hooks that a person has set on parameters see the sums of parts of a batch: only linear ones give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from phalanx.errors import PlanError
from phalanx.materialize import is_lazy
from phalanx.memory.partition import find_slots

if TYPE_CHECKING:
    from phalanx.booster.passes import Context

# Decades of the gradients that a hook is tried with, so that a threshold lies among them.
SMALLEST, LARGEST = -8, 4
REMEDY = "clip_norm, or a change of gradients in an optimizer of your own"


def refuse_gradient_hooks(model: nn.Module, context: Context) -> nn.Module:
    """Refuses hooks on parameters that would not do what they do in one process.

    Cost: five calls of each hook, on made-up gradients.
    Raises: PlanError for one that is not linear, for any where parameters are cut, moved or not yet made, and for any that runs
    after the gradient is there.
    """
    plan = context.plan
    changes = [f"{name}{size}" for name in ("tp", "pp", "ep") if (size := getattr(plan, name)) > 1]
    changes += ["px.lazy"] if is_lazy(model) else []
    for slot in find_slots(model):
        hooks = slot.parameter._backward_hooks or {}
        if getattr(slot.parameter, "_post_accumulate_grad_hooks", None):
            raise PlanError(f"{slot.name} has a hook for when its gradient is there, which is a part of a sum then", remedy=REMEDY)
        if hooks and changes:
            found = f"{slot.name} has a hook on its gradient, which it would lose or see in parts under {changes[0]}"
            raise PlanError(found, allowed="hooks on parameters that stay what they are: data ranks and cp", remedy=REMEDY)
        for hook in hooks.values():
            if not _is_linear(hook, slot.parameter):
                found = f"the hook on the gradient of {slot.name} is not linear, and gradients come as sums over parts of a batch"
                raise PlanError(found, allowed="hooks that scale or mask", remedy=REMEDY)
    return model


def _is_linear(hook: Callable[[torch.Tensor], torch.Tensor | None], parameter: nn.Parameter) -> bool:
    """Whether sums and multiples go through a hook, on gradients of all sizes."""
    generator = torch.Generator().manual_seed(0)

    def gradient() -> torch.Tensor:
        decades = torch.rand(parameter.shape, generator=generator) * (LARGEST - SMALLEST) + SMALLEST
        return (torch.randn(parameter.shape, generator=generator) * 10**decades).to(parameter)

    def hooked(value: torch.Tensor) -> torch.Tensor:
        found = hook(value.clone())
        return value if found is None else found

    with torch.no_grad():
        first, second = gradient(), gradient()
        one, other, both, twice = hooked(first), hooked(second), hooked(first + second), hooked(2 * first)
        room = 1e-2 if parameter.dtype.itemsize < 4 else 1e-4
        bound = room * (one.abs() + other.abs()) + torch.finfo(parameter.dtype).tiny
        return bool(((both - one - other).abs() <= bound).all() and ((twice - 2 * one).abs() <= bound).all())
