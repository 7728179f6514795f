"""Tells which parameters operations read, whichever module they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

# Asking these of a parameter reads no value of it.
QUESTIONS = frozenset(
    {"__get__", "__set__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "requires_grad_", "__hash__"}
)


class ParameterReads(TorchFunctionMode):
    """Calls `found(parameter)` before an operation reads a parameter; questions about shape, dtype and the like read nothing."""

    def __init__(self, found: Callable[[nn.Parameter], None]):
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") not in QUESTIONS:
            for value in (*args, *kwargs.values()):
                self._look_at(value)
        return function(*args, **kwargs)

    def _look_at(self, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self._found(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._look_at(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                self._look_at(item)
