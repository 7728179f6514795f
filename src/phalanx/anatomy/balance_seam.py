"""The seam through which the balance loss of a mixture of `transformers` is exchanged: the function that its forward calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.loss_source import is_pretrained

# (router logits of all layers, number of experts, choices of a token, attention mask) -> loss
BalanceLoss = Callable[..., torch.Tensor]

_FUNCTION = "load_balancing_loss_func"


def balance_speakers(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward calls the balance loss that most mixtures of `transformers` share."""
    return [module for module in model.modules() if is_pretrained(module) and _FUNCTION in _own_forward(module).__code__.co_names]


def balance_loss_of(speaker: nn.Module) -> BalanceLoss:
    """The function that a speaker's forward calls."""
    return _own_forward(speaker).__globals__[_FUNCTION]


def replace_balance_loss(speaker: nn.Module, function: BalanceLoss) -> None:
    """Makes `function` what this speaker's forward calls; other models of its class keep their own.

    The name is exchanged while the forward runs, and put back when it ends.
    """
    scope = _own_forward(speaker).__globals__
    kept: list[BalanceLoss] = []

    @torch._dynamo.disable
    def before(module: nn.Module, args: Any) -> None:
        kept.append(scope[_FUNCTION])
        scope[_FUNCTION] = function

    @torch._dynamo.disable
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if kept:
            scope[_FUNCTION] = kept.pop()

    speaker.register_forward_pre_hook(before)
    speaker.register_forward_hook(after, always_call=True)


def _own_forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)
