"""Finds parameters that are read outside of the module they belong to, while a model runs for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from phalanx.memory.chunk import Chunk, Slot


class ForeignReads(TorchFunctionMode):
    """Calls `found(chunk, slot)` before an operation reads a parameter whose chunk is not gathered.

    A head that multiplies with an embedding's weight is the usual case. Questions about shape, dtype and the like read nothing.
    """

    def __init__(self, chunks: Iterable[Chunk], found: Callable[[Chunk, Slot], None]):
        super().__init__()
        self.home = {id(slot.parameter): (chunk, slot) for chunk in chunks for slot in chunk.slots}
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") not in _QUESTIONS:
            for value in (*args, *kwargs.values()):
                self._look_at(value)
        return function(*args, **kwargs)

    def _look_at(self, value: Any) -> None:
        if isinstance(value, torch.nn.Parameter):
            chunk, slot = self.home.get(id(value), (None, None))
            if chunk is not None and not chunk.is_gathered:
                self.found(chunk, slot)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._look_at(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                self._look_at(item)


_QUESTIONS = frozenset(
    {"__get__", "__set__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "requires_grad_", "__hash__"}
)
