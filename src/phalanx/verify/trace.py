"""The numbers of a run that are compared: losses, gradients, norms and weights, and digests of what ranks must hold alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.verify.choices import Choices

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Share:
    """The parts of a model's parameters that one rank computes with (ZeRO-3 gathers them) and that its optimizer updates, of 1."""

    computes: float = 1.0
    updates: float = 1.0


@dataclass
class Trace:
    """One run of some steps. `weights` holds parameters and buffers afterwards, `order` parameter names in execution order.

    `start` and `digests` are fingerprints: of the weights before the first step, and of everything else. A rank that only
    confirms what another one reports has those alone, and its `share`.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    start: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    share: Share = Share()
    choices: Choices = field(default_factory=Choices)

    def seal(self) -> Trace:
        """Fills `digests` from the numbers."""
        self.digests = {f"loss (step {step})": repr(value) for step, value in enumerate(self.losses, 1)}
        self.digests |= {f"norm (step {step})": repr(value) for step, value in enumerate(self.norms, 1)}
        for step, gradients in enumerate(self.gradients, 1):
            self.digests |= {f"gradient of {name} (step {step})": digest(tensor) for name, tensor in gradients.items()}
        self.digests |= {f"weight {name}": digest(tensor) for name, tensor in self.weights.items()}
        return self

    def only_digests(self) -> Trace:
        """What a confirming rank sends."""
        return Trace(start=self.start, digests=self.digests, share=self.share)


def digest(tensor: torch.Tensor) -> str:
    """A fingerprint of dtype, shape and every bit."""
    tensor = tensor.detach().cpu().contiguous()
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).hexdigest()[:16]


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def copy_of(tensors: Mapping[str, Any]) -> Tensors:
    """Copies on the processor of all tensors of a mapping."""
    return {name: value.detach().cpu().clone() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


class ExecutionOrder:
    """Records the order in which a model's parameters are first met in a forward."""

    def __init__(self, model: nn.Module):
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._met: dict[str, None] = {}
        self._hooks = [module.register_forward_pre_hook(self._meet) for module in model.modules()]

    def _meet(self, module: nn.Module, _inputs: Any) -> None:
        self._met.update((self._names[id(p)], None) for p in module.parameters(recurse=False) if id(p) in self._names)

    def finish(self) -> list[str]:
        """Stops recording; parameters of modules that were not called come last, in the model's order."""
        for hook in self._hooks:
            hook.remove()
        return list(self._met | dict.fromkeys(self._names.values()))
