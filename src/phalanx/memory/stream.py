"""Brings sharded parameters to the device just before a unit runs, and lets them go after it (ZeRO-3).

Units run in the same order step after step. That order is recorded once, agreed on by all ranks, and followed: while one unit
computes, the next one is gathered. A rank that leaves the order alone is found before it can wait for a collective that nobody joins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ConfigError
from phalanx.layout import STANDS_FOR
from phalanx.memory.chunk import Chunk, Slot
from phalanx.memory.foreign import ForeignReads
from phalanx.memory.partition import Unit

_numbers = itertools.count(1)


class Trace:
    """The order in which units run in one direction, the same on all ranks."""

    def __init__(self, name: str, axis: Axis, units: Sequence[Unit]):
        self.name, self.axis, self.units = name, axis, units
        self.order: list[int] = []
        self.position = 0
        self.number = 0

    def begin(self) -> None:
        self.position = 0
        self.number += 1

    def visit(self, unit: int) -> int | None:
        """Notes that a unit runs now; returns the one that runs next, as far as it is known.

        Raises: CommError on every rank where ranks disagree about what runs now.
        """
        if self.position >= len(self.order) or self.order[self.position] != unit:
            self._agree(unit)
            self.order = [*self.order[: self.position], unit]
        self.position += 1
        return self.order[self.position] if self.position < len(self.order) else None

    def end(self) -> None:
        """Notes that nothing more runs in this direction."""
        if self.position < len(self.order):
            self._agree(-1)
            self.order = self.order[: self.position]

    def _agree(self, unit: int) -> None:
        what = "the end of the pass" if unit < 0 else f"module '{self.units[unit].name}'"
        comm.agree(f"{self.name} pass {self.number}, place {self.position}", what, self.axis)


class ParameterStream:
    """Hooks on the units of one model that gather and release their chunks.

    Cost: two gathers of each unit's parameters per pass (forward, backward); at most two units are gathered at a time.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], axis: Axis, name: str = ""):
        self.units = [unit for unit in units if not unit.stays]
        self.axis = axis
        self.model = model
        self.depth = 0
        self.held = 0
        self.name = name or f"model {next(_numbers)}"  # ranks boost models in the same order, so they agree about each number
        self.part = ""  # which part of the model runs; each has an order of its own
        self.traces: dict[str, Trace] = {}
        self.in_backward = False
        self.pinned: list[Chunk] = []
        self.kept: dict[Hashable, list[Chunk]] = {}  # by the part of the model that keeps them
        self.watch: ForeignReads | None = None
        self.unwatched = {True, False}  # with and without gradients: the next pass is watched
        self.streamed = {id(chunk) for unit in self.units for chunk in unit.chunks}
        self.handles: list[Any] = [model.register_forward_pre_hook(self._begin_forward, prepend=True)]
        self.handles.append(model.register_forward_hook(self._end_forward, always_call=True))
        for index, unit in enumerate(self.units):
            for module in unit.modules:
                self.handles.append(module.register_forward_pre_hook(self._before(index), prepend=True, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._after(index), with_kwargs=True))

    def _trace(self, direction: str) -> Trace:
        name = f"{self.name} {direction}{self.part}"
        if name not in self.traces:
            self.traces[name] = Trace(name, self.axis, self.units)
        return self.traces[name]

    @property
    def forward(self) -> Trace:
        return self._trace("forward" if torch.is_grad_enabled() else "evaluation")

    @property
    def backward(self) -> Trace:
        return self._trace("backward")

    def follow(self, forward: Sequence[int], backward: Sequence[int], read_outside: Sequence[Chunk]) -> None:
        """Takes orders that all ranks know already, as after a first pass."""
        for direction, order in (("forward", forward), ("backward", backward)):
            trace = self._trace(direction)
            trace.order, trace.number = list(order), 1
        self.pinned = list(read_outside)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Takes no part in what the model does inside."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    # -- forward -------------------------------------------------------------------------------------------------------

    @torch._dynamo.disable
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self.depth += 1
        if self.depth > 1 or self.held:
            return
        trace = self.forward
        trace.begin()
        if not self.in_backward:  # another model's loss may go through this one, and then nobody announces its backward
            self.backward.begin()
        for chunk in self.pinned:
            chunk.gather()
        if torch.is_grad_enabled() in self.unwatched and not _is_compiled(module):
            self.unwatched.discard(torch.is_grad_enabled())
            self.watch = self._new_watch()
            self.watch.__enter__()

    @torch._dynamo.disable
    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0 and self.watch is not None:
            self.watch.__exit__(None, None, None)
            self.watch = None
        if self.depth == 0 and output is not None and not self.held:
            self.forward.end()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks for foreign reads in all that runs inside, a criterion included, where the next pass is to be watched."""
        grad = torch.is_grad_enabled()
        if self.held or grad not in self.unwatched or _is_compiled(self.model):
            yield
            return
        self.unwatched.discard(grad)
        with self._new_watch():
            yield

    def _new_watch(self) -> ForeignReads:
        return ForeignReads([chunk for unit in self.units for chunk in unit.chunks], self._pin)

    def look_again(self) -> None:
        """Watches the next passes too: a loss was not a number, as one is that was computed from a parameter while it was away."""
        self.unwatched = {True, False}

    def _pin(self, chunk: Chunk, slot: Slot) -> None:
        """A parameter is read outside of its module: its chunk is gathered now, and before every pass from now on."""
        trace = self.forward
        comm.agree(f"{trace.name} pass {trace.number}, read {len(self.pinned)} outside of a module", f"parameter '{slot.name}'", self.axis)
        chunk.gather()
        self.pinned.append(chunk)

    def _before(self, index: int) -> Callable:
        @torch._dynamo.disable
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.held:
                self._fetch(index, None if self._keeps(index) else self.forward.visit(index))

        return before

    def _after(self, index: int) -> Callable:
        @torch._dynamo.disable
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.held or self._keeps(index):
                return
            trace, unit = self.forward, self.units[index]
            found = list(tensors_in(output))
            if not found and output is not None:
                raise _no_tensors(unit, output)
            outputs = [tensor for tensor in found if tensor.requires_grad] if torch.is_grad_enabled() else []
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self._before_backward(index), mode="any")
                self._release_frozen_after_backward(unit, [*tensors_in(args), *tensors_in(kwargs)])
            ends = trace.position == len(trace.order) and trace.number > 1
            if not (outputs and ends):  # what runs last in the forward runs first in the backward
                self._release(unit)

        return after

    def _fetch(self, index: int, following: int | None) -> None:
        unit = self.units[index]
        for chunk in unit.chunks:
            chunk.gather()
        if following is not None:
            for chunk in self.units[following].chunks:
                chunk.start_gather()

    def _release(self, unit: Unit) -> None:
        for chunk in unit.chunks:
            self._let_go(chunk)

    def _let_go(self, chunk: Chunk) -> None:
        if chunk not in self.pinned and not self._is_kept(chunk):
            chunk.release()

    # -- parts that stay for a while -----------------------------------------------------------------------------------

    def keep(self, part: Hashable, chunks: Sequence[Chunk]) -> None:
        """Begins to gather the chunks, and takes no part in what becomes of them until `give_up`."""
        self.kept[part] = [chunk for chunk in chunks if id(chunk) in self.streamed]
        for chunk in self.kept[part]:
            chunk.start_gather()

    def give_up(self, part: Hashable) -> None:
        for chunk in self.kept.pop(part, []):
            if not self._is_kept(chunk):
                chunk.release()

    def _is_kept(self, chunk: Chunk) -> bool:
        return any(chunk in chunks for chunks in self.kept.values())

    def _keeps(self, index: int) -> bool:
        return bool(self.kept) and all(self._is_kept(chunk) for chunk in self.units[index].chunks)

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.in_backward = True
        self.backward.begin()

    def _before_backward(self, index: int) -> None:
        self._fetch(index, self.backward.visit(index))

    def _release_frozen_after_backward(self, unit: Unit, inputs: Sequence[torch.Tensor]) -> None:
        """Frozen chunks get no gradient that would tell that they are no longer read; the gradients of their inputs tell."""
        frozen = [chunk for chunk in unit.chunks if not chunk.is_trainable]
        needing = [tensor for tensor in inputs if tensor.requires_grad]
        if frozen and needing:
            register_multi_grad_hook(needing, lambda _: [self._let_go(chunk) for chunk in frozen], mode="all")

    def chunk_complete(self, chunk: Chunk) -> None:
        """All gradients of a chunk are there, so nothing reads its parameters any more in this backward."""
        if id(chunk) in self.streamed and not self.held:
            self._let_go(chunk)

    def end_backward(self) -> None:
        self.in_backward = False
        self.backward.end()
        self.release_all()

    def release_all(self) -> None:
        """Releases whatever is gathered, also what was fetched ahead in vain."""
        for unit in self.units:
            for chunk in unit.chunks:
                if (chunk.is_gathered or chunk.pending_gather is not None) and not self._is_kept(chunk):
                    chunk.release()

    # -- whole model ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Gathers everything and keeps it until `let_go`: for generation, where ranks may run different numbers of passes."""
        self.held += 1
        for unit in self.units:
            for chunk in unit.chunks:
                chunk.gather()

    def let_go(self) -> None:
        self.held -= 1
        if not self.held:
            self.release_all()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _no_tensors(unit: Unit, output: Any) -> ConfigError:
    """The refusal of a module whose output does not show when its backward begins."""
    return ConfigError(
        f"module '{unit.name}' returns a {type(output).__name__}, in which no tensor is found, so its backward cannot be foreseen",
        allowed="tensors, or tuples, lists, mappings and dataclasses of them, from modules that zero3 gathers",
        remedy="a dataclass in its place, or zero2",
    )


def _is_compiled(model: nn.Module) -> bool:
    """Whether some module runs as compiled code, which would be compiled once more under a watch."""
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses; of a stand-in the one that it stands for."""
    if isinstance(value, torch.Tensor):
        yield getattr(value, STANDS_FOR, value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name))
