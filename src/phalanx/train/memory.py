"""What a rank keeps and how high a step rises above it, counted tensor by tensor, beside what the plan predicted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from phalanx.anatomy import layer_stacks
from phalanx.anatomy.experts_seam import StackedExperts, replace_forward
from phalanx.parallel import recompute
from phalanx.parallel.expert.homes import Homes
from phalanx.parallel.expert.layers import find_layers
from phalanx.parallel.expert.share import PassShare
from phalanx.parallel.expert.stacked import StackedForward
from phalanx.plan import Plan
from phalanx.planner.memory import predict, scale_activations
from phalanx.train.recipe import BatchSettings


@dataclass(frozen=True)
class StepMemory:
    """Units: bytes of tensors. `kept` is what lives between steps, `peak` the most that lives within one."""

    kept: int
    peak: int


class TensorCount(TorchDispatchMode):
    """Counts the bytes of all tensors of this process while it is entered, those that autograd keeps included.

    A storage counts once, however many tensors look at it, with the size it has at the time. `ignored` tensors do not count.
    Cost: every operation walks over all live storages; meant for a step or two.
    """

    def __init__(self, ignored: Iterable[torch.Tensor] = ()):
        super().__init__()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self._live: dict[int, weakref.ref] = {}
        self.kept = self.peak = 0

    def __enter__(self) -> TensorCount:
        gc.collect()
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # isinstance would wake objects that only look like something else
                self._add(thing)
        self.kept = self.peak = self.now
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for thing in tree_iter(result):
            if isinstance(thing, torch.Tensor):
                self._add(thing)
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
            return
        try:
            storage = tensor.untyped_storage()
            is_ignored = storage.data_ptr() in self._ignored
        except (NotImplementedError, RuntimeError):  # has no storage of its own, as what wraps other tensors
            return
        if not is_ignored:
            key = storage._cdata
            self._live.setdefault(key, weakref.ref(storage, lambda _: self._live.pop(key, None)))

    @property
    def now(self) -> int:
        """The bytes that live now."""
        return sum(storage.nbytes() for reference in list(self._live.values()) if (storage := reference()) is not None)

    def measured(self) -> StepMemory:
        return StepMemory(self.kept, self.peak)


def activation_bytes_of_a_row(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """What each further row of a batch adds to the peak of a forward and backward; weights and gradients do not grow with rows."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in model.parameters() if parameter.requires_grad]
    peaks = []
    for rows in (1, 2):
        with TensorCount() as count:
            model(**{name: tensor[:rows] for name, tensor in batch.items()}).loss.backward()
        peaks.append(count.peak - count.kept)
    for hook in hooks:
        hook.remove()
    return peaks[1] - peaks[0]


def predicted_memory(model: torch.nn.Module, batch: BatchSettings, plan: Plan, world: int) -> StepMemory:
    """What the plan says that each rank will keep and reach, before the run."""
    data_size = plan.sizes(world)["dp"]
    experts = _compute_hollow_experts(model)
    if plan.recompute is not None:
        recompute.apply([block for _, block in layer_stacks(model)], plan.recompute)
    tokens = torch.zeros(2, batch.tokens, dtype=torch.int64)
    row_bytes = activation_bytes_of_a_row(model, {"input_ids": tokens, "labels": tokens})
    activations = scale_activations(row_bytes, 1, batch.rows, plan, data_size)
    shared = chunk_sizes(model, lambda parameter: id(parameter) not in experts)
    found = predict(sum(shared), shared, plan, data_size, activation_bytes=activations)
    if experts:  # a rank holds a part of them, which fewer ranks shard
        own = [-(-size // plan.ep) for size in chunk_sizes(model, lambda parameter: id(parameter) in experts)]
        beside = predict(sum(own), own, plan, data_size // plan.ep)
        found = {name: value + beside[name] for name, value in found.items()}
    # Gradients, and what was gathered of parameters, go after each step.
    return StepMemory(found["parameter"] + found["optimizer"], found["total"])


def chunk_sizes(model: torch.nn.Module, counts: Callable[[torch.nn.Parameter], bool] = lambda _: True) -> list[int]:
    """The parameters outside of all layers, then those of each layer; of those that count."""
    sizes = [sum(p.numel() for p in block.parameters() if counts(p)) for _, block in layer_stacks(model)]
    return [sum(p.numel() for p in model.parameters() if counts(p)) - sum(sizes), *sizes]


def _compute_hollow_experts(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters that belong to one expert each; products that take hollow weights replace those that do not."""
    layers = find_layers(model, PassShare())
    for layer in layers:
        if isinstance(layer.found, StackedExperts):
            replace_forward(layer.experts, StackedForward(Homes.even(layer.num_experts, 1), (), layer.load))
    return {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
