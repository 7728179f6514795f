"""What a recording consists of: values, windows on them, operations, and points of the random generator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch.utils._pytree import tree_leaves


class Value:
    """One storage of the recorded program; found again through the storage of any tensor that looks at it."""

    def __init__(self, recording: Recording, num_bytes: int, device: torch.device):
        self.recording, self.num_bytes, self.device = recording, num_bytes, device


@dataclass(frozen=True)
class Window:
    """A tensor of the recorded program: a value, and how it is looked at."""

    value: Value
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)

    def covers_value(self) -> bool:
        contiguous = torch.empty_strided(self.size, self.stride, device="meta").is_contiguous()
        return contiguous and self.offset == 0 and self.value.num_bytes == torch.Size(self.size).numel() * self.dtype.itemsize


class Point:
    """A state of the random generator between two draws; its number is known only once the draws before it were made."""

    def __init__(self, recording: Recording):
        self.recording, self.is_resumed = recording, False
        self.state: torch.Tensor | None = None


@dataclass(eq=False)
class Operation:
    """One call that makes or changes values. `starts_at` is set where the generator was set before a draw."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    default_dtype: torch.dtype
    creates: list[Value] = field(default_factory=list)
    writes: list[Window] = field(default_factory=list)
    overwrites: bool = False
    starts_at: torch.Tensor | Point | None = None
    ends_at: Point | None = None

    @property
    def is_random(self) -> bool:
        return self.ends_at is not None

    @property
    def written(self) -> set[Value]:
        return {window.value for window in self.writes}

    @property
    def read(self) -> set[Value]:
        """The values whose former content matters to this call."""
        windows = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Window)]
        if self.overwrites:
            windows.remove(self.writes[0])
        return {window.value for window in windows}


def _bytes_of(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


class Recording:
    """The operations recorded in one `lazy()` context, in order."""

    # While recording, nothing is drawn: after each draw the generator stands at a made-up state instead, by which a later
    # draw, perhaps in another recording, tells whether the program went on, went back, or seeded anew.
    _points: ClassVar[WeakValueDictionary[bytes, Point]] = WeakValueDictionary()
    _latest: ClassVar[Point | None] = None

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.last_point: Point | None = None

    def record(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], *, is_random: bool = False, **facts: Any) -> None:
        operation = Operation(function, args, kwargs, torch.get_default_dtype(), **facts)
        if is_random:
            self._draw(operation)
        self.operations.append(operation)

    def _draw(self, operation: Operation) -> None:
        state = torch.get_rng_state()
        point = self._points.get(_bytes_of(state))
        if point is None or point is not self.last_point:
            operation.starts_at = state if point is None else point
            if point is not None:
                point.is_resumed = True
        self.last_point = operation.ends_at = Recording._latest = Point(self)
        digest = hashlib.blake2b(_bytes_of(state), digest_size=7, salt=len(self.operations).to_bytes(8)).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest))
        self._points[_bytes_of(torch.get_rng_state())] = self.last_point


def value_of(tensor: torch.Tensor) -> Value | None:
    """The value that a tensor of the recorded program looks at; None for every other tensor."""
    return getattr(tensor.untyped_storage(), "phalanx_value", None) if tensor.layout == torch.strided else None


def window_on(tensor: torch.Tensor, value: Value) -> Window:
    return Window(value, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))


def name_of(function: Callable[..., Any]) -> str:
    schema = getattr(function, "_schema", None)
    return schema.name if schema is not None else getattr(function, "__name__", str(function))
