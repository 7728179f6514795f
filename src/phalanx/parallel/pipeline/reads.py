"""Between which blocks of a model each parameter is read: what the stage of a parameter follows from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from phalanx.anatomy.parameter_reads import ParameterReads
from phalanx.errors import PlanError

Blocks = Sequence[tuple[str, nn.Module]]
BEFORE_ALL = -1

# Parameters by identity -> the numbers of the blocks in which or after which they are read; BEFORE_ALL before the first.
Places = dict[int, set[int]]


def places_by_registration(model: nn.Module, blocks: Blocks) -> Places:
    """Takes every module to run where it is registered: after the block that is registered before it."""
    number = {id(block): index for index, (_, block) in enumerate(blocks)}
    places: Places = {}
    here = BEFORE_ALL

    def visit(module: nn.Module) -> None:
        nonlocal here
        here = number.get(id(module), here)
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(id(parameter), set()).add(here)
        for child in module.children():
            visit(child)

    visit(model)
    return places


def places_by_running(model: nn.Module, blocks: Blocks, run: Callable[[], Any]) -> Places:
    """Watches one forward; parameters that it does not read stand where they are registered.

    It runs without numbers where it can; a forward that asks for numbers runs with them, and leaves buffers as they were.
    Raises: PlanError where the blocks do not run once each, in their order.
    """
    try:
        watch = _watched(model, blocks, run, FakeTensorMode(allow_non_fake_inputs=True))
    except (RuntimeError, NotImplementedError):
        if any(parameter.is_meta for parameter in model.parameters()):
            return places_by_registration(model, blocks)
        before = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.random.fork_rng():
            watch = _watched(model, blocks, run, nullcontext())
        for buffer, value in before:
            buffer.copy_(value)
    if watch.order != list(range(len(blocks))):
        names = ", ".join(blocks[index][0] for index in watch.order[:8])
        raise PlanError(
            f"the layers do not run once each in the order in which the model lists them, but {names} ...",
            allowed="a pipeline over layers that run one after another",
            remedy="zero3 in place of the pipeline",
        )
    for key, registered in places_by_registration(model, blocks).items():
        watch.places.setdefault(key, registered)
    return watch.places


def _watched(model: nn.Module, blocks: Blocks, run: Callable[[], Any], mode: AbstractContextManager) -> _Watch:
    watch = _Watch(model, blocks)
    try:
        with torch.no_grad(), mode, _keeping_buffers(model), _standing_in(model, watch.known), watch:
            run()
    finally:
        watch.remove()
    return watch


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Whatever a forward registers in their place, the model has its own buffers again afterwards."""
    before = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    try:
        yield
    finally:
        for table, own in before:
            table.clear()
            table.update(own)


@contextmanager
def _standing_in(model: nn.Module, known: dict[int, int]) -> Iterator[None]:
    """Stands tensors without numbers in for those of a model that was built without memory; `known` learns who they stand for."""
    held = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    before = [(table, name, tensor) for table in held for name, tensor in table.items() if tensor is not None and tensor.is_meta]
    made: dict[int, torch.Tensor] = {}
    for table, name, tensor in before:
        if id(tensor) not in made:
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
            made[id(tensor)] = nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
        table[name] = made[id(tensor)]
        known[id(table[name])] = id(tensor)
    try:
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


class _Watch(ParameterReads):
    """Notes the block that runs, or ran last, whenever an operation or a module without children reads a parameter."""

    def __init__(self, model: nn.Module, blocks: Blocks):
        super().__init__(self._note)
        self.known = {id(parameter): id(parameter) for parameter in model.parameters()}
        self.places: Places = {}
        self.order: list[int] = []
        self.here = BEFORE_ALL
        self.handles = [block.register_forward_pre_hook(self._enter(index), prepend=True) for index, (_, block) in enumerate(blocks)]
        leaves = [module for module in model.modules() if module._parameters and next(module.children(), None) is None]
        self.handles += [module.register_forward_pre_hook(self._called) for module in leaves]

    def _enter(self, index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self.here = index
            self.order.append(index)

        return enter

    def _called(self, module: nn.Module, args: Any) -> None:
        for parameter in module._parameters.values():
            self._note(parameter)

    def _note(self, parameter: nn.Parameter | None) -> None:
        if parameter is not None and id(parameter) in self.known:
            self.places.setdefault(self.known[id(parameter)], set()).add(self.here)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
