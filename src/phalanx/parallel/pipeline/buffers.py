"""Finds buffers that count or average forwards: in stages a step has one for each micro-batch, and in one process it has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._guards import detect_fake_mode

from phalanx.errors import PlanError

FORWARDS = 2  # of each stage that are looked at


class BufferWatch:
    """Looks at the first forwards of a step. A buffer may change in them if each leaves it the same, as what follows from weights does.

    Buffers that are not saved are caches, and may hold what they like.
    Cost: two comparisons on the host for a buffer that changes, in the first step; else none.
    """

    def __init__(self, model: nn.Module):
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module, name)
            for prefix, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._left: dict[str, torch.Tensor] = {}
        self._seen: dict[int, int] = {}

    @contextmanager
    def around(self, stage: int) -> Iterator[None]:
        """Surrounds one forward of a stage. Raises: PlanError for a buffer that it leaves otherwise than one before."""
        self._seen[stage] = self._seen.get(stage, 0) + 1
        if self._seen[stage] > FORWARDS or not self._buffers or detect_fake_mode() is not None:
            yield
            return
        before = {full: _state_of(module._buffers.get(name)) for full, module, name in self._buffers}
        try:
            yield
        finally:  # a forward that is handed on ends with an exception
            for full, module, name in self._buffers:
                buffer = module._buffers.get(name)
                if buffer is not None and _state_of(buffer) != before[full]:
                    self._compare(full, buffer.detach())

    def _compare(self, name: str, value: torch.Tensor) -> None:
        left = self._left.setdefault(name, value.clone())
        if not torch.equal(left, value):
            raise PlanError(
                f"the buffer '{name}' is changed by every forward, and in stages a step has one for each micro-batch",
                allowed="buffers that do not depend on how often or on which rows a model runs",
                remedy="micro1 without acc, or keeping it outside of the model",
            )


def _state_of(buffer: torch.Tensor | None) -> tuple[int, int] | None:
    """Which tensor it is, and how often it was changed in place."""
    return None if buffer is None else (id(buffer), buffer._version)
