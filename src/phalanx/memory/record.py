"""The order in which a pass uses its chunks, and what else it holds in each interval: found by a dry run, before any step.

The dry run is the pass itself on tensors without data, with the same hooks that move real chunks; only the chunks are shadows that
note what is asked of them. So the order is that of the real pass by construction.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ConfigError
from phalanx.memory.chunk import Chunk, Slot
from phalanx.memory.partition import Unit, order_of_completion
from phalanx.memory.reduction import GradientReducer
from phalanx.memory.stream import ParameterStream

SCALAR_BYTES = 64  # the loss, its count and their weighted forms, which a step makes beside the pass
GATHER, RELEASE, GRADIENT, REDUCED = "gather", "release", "gradient", "reduced"

Orders = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Event:
    """A chunk's parameters are wanted or done with; its gradient begins, or is summed."""

    kind: str
    chunk: int


@dataclass(frozen=True)
class Record:
    """One pass: its events, and for the interval before each and after the last the peak of all bytes that are not the chunks'.

    `orders` are the orders of units that the parameter stream follows, forward and backward, and the chunks that are read outside of
    their modules.
    """

    events: tuple[Event, ...]
    others: tuple[int, ...]
    orders: Orders = ((), (), ())


@dataclass(frozen=True)
class Pass:
    """A pass that may be run without data: its rows, its loss of what `placed` makes of them, inside of which the backward runs too."""

    rows: Any
    loss_of: Callable[[Any], torch.Tensor]
    placed: Callable[[Any], AbstractContextManager[Any]] = nullcontext


class OtherBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that still live; `ignored` are those of the chunks.

    Cost: a table look-up for every tensor that an operation returns.
    """

    def __init__(self, ignored: Sequence[torch.Tensor] = ()):
        super().__init__()
        self.current = self.peak = 0
        self._live: dict[int, Any] = {}
        self._ignored: set[int] = set()
        self.ignore(ignored)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leaves tensors out, and all that show the same memory."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for thing in tree_iter(result):
            if isinstance(thing, torch.Tensor):
                self._add(thing.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._ignored:
            return
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        self._live[key] = weakref.ref(storage, functools.partial(self._remove, key, storage.nbytes()))

    def _remove(self, key: int, num_bytes: int, _: Any) -> None:
        if self._live.pop(key, None) is not None:
            self.current -= num_bytes

    def restart(self) -> int:
        """The peak since the last call."""
        peak, self.peak = self.peak, self.current
        return peak


class NeedsNumbers(RuntimeError):
    """An operation of a pass cannot run without data: it reads values, its result's shape follows from them, or nobody described it."""


class WithoutData(OtherBytes):
    """The same for operations on tensors without data, of which some cannot run."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        except RuntimeError as error:
            raise NeedsNumbers(f"{function}: {(str(error).splitlines() or [''])[0]}") from error


class Recorder:
    """Collects events and the peaks between them."""

    def __init__(self, meter: OtherBytes):
        self.meter = meter
        self.restart()

    def restart(self) -> None:
        self.events: list[Event] = []
        self.others: list[int] = []
        self.meter.restart()

    def note(self, kind: str, chunk: int) -> None:
        self.events.append(Event(kind, chunk))
        self.others.append(self.meter.restart())


class ShadowChunk:
    """Stands in for a chunk during the dry run, and notes what is asked of it."""

    is_natural = False

    def __init__(self, chunk: Chunk, number: int, recorder: Recorder, slots: list[Slot]):
        self.name, self.policy, self.number, self.recorder, self.slots = chunk.name, chunk.policy, number, recorder, slots
        self.is_trainable, self.is_occasional = chunk.is_trainable, chunk.is_occasional
        self.is_gathered = not chunk.policy.parameter
        self.is_reduced = self.has_gradient = False
        self.pending_gather = None

    def gather(self) -> None:
        if not self.is_gathered:
            self.is_gathered = True
            self.recorder.note(GATHER, self.number)

    def start_gather(self) -> None:
        return None

    def release(self) -> None:
        if self.is_gathered:
            self.is_gathered = False
            self.recorder.note(RELEASE, self.number)

    def add_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        if not self.has_gradient:
            self.has_gradient = True
            self.recorder.note(GRADIENT, self.number)

    def start_reduce(self) -> None:
        self.add_gradient(self.slots[0], torch.empty(0))

    def finish_reduce(self, pending: None) -> None:
        self.has_gradient = False
        self.is_reduced = True
        self.recorder.note(REDUCED, self.number)

    def reopen_gradient(self) -> None:
        self.is_reduced = False


@dataclass
class _Shadow:
    """One parameter of the dry run in the place of a slot."""

    name: str
    parameter: nn.Parameter
    can_learn: bool
    is_occasional: bool

    @property
    def num_elements(self) -> int:
        return self.parameter.numel()


class DryRun:
    """A model of tensors without data, whose units and gradients are watched as the real ones are."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], chunks: Sequence[Chunk], device: torch.device, in_flight: int):
        self.model, self.chunks, self.device = model, chunks, device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes: dict[int, nn.Parameter] = {}
        for slot in (slot for chunk in chunks for slot in chunk.slots):
            with self.mode:
                value = torch.empty(slot.shape, dtype=slot.parameter.dtype, device=device)
                self.fakes[id(slot)] = nn.Parameter(value, requires_grad=slot.parameter.requires_grad)
        self.meter = WithoutData(list(self.fakes.values()))
        self.recorder = Recorder(self.meter)
        self.shadows = [ShadowChunk(chunk, number, self.recorder, self._slots(chunk)) for number, chunk in enumerate(chunks)]
        shadow_of = {id(chunk): shadow for chunk, shadow in zip(chunks, self.shadows, strict=True)}
        self.units: Any = [
            Unit(unit.name, unit.modules, [], [shadow_of[id(chunk)] for chunk in unit.chunks])  # type: ignore[misc]
            for unit in units
        ]
        self.in_flight = in_flight

    def _slots(self, chunk: Chunk) -> list[Any]:
        return [_Shadow(slot.name, self.fakes[id(slot)], slot.can_learn, slot.is_occasional) for slot in chunk.slots]

    def record(self, found: Pass) -> Record:
        """Runs the pass twice, since the first teaches the order that the second follows, and returns the second's record."""
        rng = torch.get_rng_state()
        stream: ParameterStream | None = None
        try:
            with self._in_place():
                stream = ParameterStream(self.model, self.units, Axis("alone", (0,), 0), name="dry run")
                reducer = GradientReducer(order_of_completion(self.units), in_flight=self.in_flight)
                reducer.on_complete = stream.chunk_complete  # type: ignore[assignment]
                rows = tree_map(self._fake, found.rows)
                fake_buffers = [self.mode.from_tensor(buffer) for buffer in self.model.buffers()]
                self.meter.ignore([*fake_buffers, *(leaf for leaf in tree_iter(rows) if isinstance(leaf, torch.Tensor))])
                with self.mode, self.meter:
                    for _ in range(2):
                        self.recorder.restart()
                        self._run(replace(found, rows=rows), stream, reducer)
                stream.remove()
        finally:
            torch.set_rng_state(rng)
            if stream is not None:
                stream.remove()
        beside = sum(leaf.nbytes for leaf in tree_iter(found.rows) if isinstance(leaf, torch.Tensor))
        beside += sum(buffer.nbytes for buffer in self.model.buffers()) + SCALAR_BYTES
        others = tuple(peak + beside for peak in [*self.recorder.others, self.meter.restart()])
        read_outside = tuple(shadow.number for shadow in stream.pinned)  # type: ignore[attr-defined]
        return Record(tuple(self.recorder.events), others, (tuple(stream.forward.order), tuple(stream.backward.order), read_outside))

    def _fake(self, leaf: Any) -> Any:
        return self.mode.from_tensor(leaf.to(self.device)) if isinstance(leaf, torch.Tensor) else leaf

    def _run(self, found: Pass, stream: ParameterStream, reducer: GradientReducer) -> None:
        with found.placed(found.rows) as rows:
            with stream.watched():
                loss = found.loss_of(rows)
            reducer.begin(True)
            stream.begin_backward()
            loss.backward()
            stream.end_backward()
            reducer.end()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Puts the parameters without data into the model; whatever modules keep comes back as it was."""
        kept = [(module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in self.model.modules()]
        for slot in (slot for chunk in self.chunks for slot in chunk.slots):
            for module, attribute in slot.owners:
                module._parameters[attribute] = self.fakes[id(slot)]
        try:
            yield
        finally:
            for module, attributes, parameters, buffers in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)


def reads_numbers(error: RuntimeError) -> bool:
    """Whether a pass failed because it needs the numbers that a dry run does not have."""
    return isinstance(error, NeedsNumbers) or ".numpy() is not supported for tensor subclasses" in str(error)


def require_data(loss: torch.Tensor) -> None:
    """Raises: ConfigError for a loss without data in a run with data: somebody kept what a dry run had computed."""
    if isinstance(loss, FakeTensor) and detect_fake_mode() is None:
        raise ConfigError(
            "the loss was computed from a tensor without data, which the model has kept from the run that found the order of a step",
            allowed="caches in attributes of the model's modules",
            remedy="zero3 in place of gemini",
        )


def agreed_orders(record: Record | None, axis: Axis) -> Orders | None:
    """The orders of all ranks where they are the same; None where they differ, or where one has none. Collective."""
    found = comm.gather_objects(record.orders if record else None, axis)
    return found[0] if all(orders == found[0] for orders in found) else None
