"""A recorded forward in which the output of every projection is cut loose, so that gradients tell which one feeds which directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from phalanx.anatomy.specimen import Specimen, Unrunnable, is_linear

Reached = dict[str, torch.Tensor]


@dataclass
class Call:
    """One call of a projection or an embedding: its input within the graph, the input's value, and its output cut loose."""

    name: str
    module: nn.Module
    input: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor

    @property
    def is_linear(self) -> bool:
        return is_linear(self.module)


class Dataflow:
    """The calls of one forward in order, and questions about what reaches the input of a call directly.

    Directly means: on a way that leads through no other projection or embedding. Exact zeros are what is not reached.
    """

    def __init__(self, specimen: Specimen):
        self.model = specimen.model
        self.calls: dict[str, Call] = {}
        self.parameters = dict(self.model.named_parameters())
        hooks = [
            module.register_forward_hook(self._cut(name), with_kwargs=True)
            for name, module in self.model.named_modules()
            if is_linear(module) or isinstance(module, nn.Embedding)
        ]
        try:
            with _Smooth():
                output = specimen.run()
        except Exception as error:  # whatever a model raises in a forward of its own
            raise Unrunnable(f"{type(error).__name__}: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        self.results = [leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]

    def _cut(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
            taken = args[0] if args else next(iter(kwargs.values()))
            loose = output.detach().requires_grad_()
            call = Call(name, module, taken.clone(), taken.detach().clone(), loose)
            self.calls.setdefault(name, call)
            return loose.clone()

        return hook

    def feeders(self, call: Call) -> list[str]:
        """The earlier calls whose output reaches this call's input directly."""
        if call.input.grad_fn is None:
            return []
        return [name for name, gradient in self._outputs(call.input, _random_like(call.input)).items() if bool((gradient != 0).any())]

    def reach_results(self) -> set[str]:
        """The calls whose output reaches what the model returns directly."""
        return {name for result in self.results for name in self.reaching(result)}

    def reaching(self, result: torch.Tensor) -> set[str]:
        """The calls whose output reaches one tensor of the model's result directly."""
        return {name for name, gradient in self._outputs(result, _random_like(result)).items() if bool((gradient != 0).any())}

    def read_elsewhere(self) -> set[str]:
        """Weights of projections and embeddings that something else than their own module reads, by their full names."""
        owned = {id(parameter) for call in self.calls.values() for parameter in call.module.parameters(recurse=False)}
        suspects = {name: parameter for name, parameter in self.parameters.items() if id(parameter) in owned}
        found: set[str] = set()
        for tensor in [*(call.input for call in self.calls.values()), *self.results]:
            if tensor.grad_fn is not None:
                found |= set(_gradients(tensor, torch.ones_like(tensor), suspects))
        return found

    def other_tokens(self, call: Call) -> str | None:
        """A feeder of which other tokens reach a call's input than those in the same place; None where each token is by itself.

        Shapes: looked at where input and feeder are (rows, tokens, features) with equal tokens.
        """
        if call.input.dim() != 3 or call.input.grad_fn is None:
            return None
        cotangent = torch.zeros_like(call.input)
        cotangent[:, :1] = _random_like(call.input)[:, :1]
        for name, gradient in self._outputs(call.input, cotangent).items():
            alike = gradient.dim() == 3 and gradient.shape[:2] == call.input.shape[:2]
            if alike and bool((gradient[:, 1:] != 0).any()):
                return name
        cotangent = cotangent.flip(1)
        for name, gradient in self._outputs(call.input, cotangent).items():
            alike = gradient.dim() == 3 and gradient.shape[:2] == call.input.shape[:2]
            if alike and bool((gradient[:, :-1] != 0).any()):
                return name
        return None

    def behind(self, call: Call, features: Sequence[int] | slice, weights: torch.Tensor | None = None) -> Reached:
        """For each feeder, the gradient that reaches its output from some features of this call's input.

        Shapes: each (tokens, features of the feeder).
        """
        cotangent = torch.zeros_like(call.input)
        cotangent[..., features] = _random_like(call.input)[..., features] if weights is None else weights.to(cotangent)
        found = self._outputs(call.input, cotangent)
        return {name: gradient.reshape(-1, gradient.shape[-1]) for name, gradient in found.items() if bool((gradient != 0).any())}

    def parameters_behind(self, call: Call, features: Sequence[int] | slice, weights: torch.Tensor | None = None) -> Reached:
        """The same for parameters that are read on the way, by their full names."""
        cotangent = torch.zeros_like(call.input)
        cotangent[..., features] = _random_like(call.input)[..., features] if weights is None else weights.to(cotangent)
        return _gradients(call.input, cotangent, self.parameters)

    def _outputs(self, of: torch.Tensor, cotangent: torch.Tensor) -> Reached:
        return _gradients(of, cotangent, {name: call.output for name, call in self.calls.items()})


class _Smooth(TorchFunctionMode):
    """Where a ReLU is flat a gradient tells nothing: its smooth likeness depends on the same inputs everywhere."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function in _FLAT:
            return F.softplus(args[0])
        return function(*args, **(kwargs or {}))


_FLAT = frozenset({F.relu, torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, F.relu_})


def places(plain: torch.Tensor, placed: torch.Tensor, atoms: int) -> list[tuple[int, int]] | None:
    """Each feature's one atom, from its gradients of sums weighted by 1 and by place; None where a feature has none or several.

    Shapes: both (tokens, features).
    """
    strongest = plain.abs().argmax(0, keepdim=True)
    plain, placed = plain.gather(0, strongest)[0], placed.gather(0, strongest)[0]
    if not bool((plain != 0).all()):
        return None
    quotient = placed / plain
    place = quotient.round()
    if not bool(((quotient - place).abs() < 1e-6).all()) or place.min() < 1 or place.max() > atoms:
        return None
    return [(int(value) - 1, int(value)) for value in place.tolist()]


def _gradients(of: torch.Tensor, cotangent: torch.Tensor, targets: dict[str, torch.Tensor]) -> Reached:
    if of.grad_fn is None:
        return {}
    found = torch.autograd.grad(of, list(targets.values()), cotangent, retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(targets, found, strict=True) if gradient is not None}


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator) + 0.5


def _plain(output: Any) -> Any:
    """A model's output as plain containers."""
    return dict(output) if hasattr(output, "keys") else output
