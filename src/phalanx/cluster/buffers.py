"""Memory that collectives receive into, kept from one call to the next."""

from __future__ import annotations

import torch


class Buffers:
    """Receive buffers kept for the next call of the same size: fresh pages cost more than the copy into them.

    At most `limit_bytes` wait here; what exceeds it goes, the longest unused first.
    """

    def __init__(self, limit_bytes: int = 64 * 2**20):
        self._free: list[torch.Tensor] = []
        self._limit_bytes = limit_bytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        for position in range(len(self._free) - 1, -1, -1):
            buffer = self._free[position]
            if buffer.numel() == numel and buffer.dtype == dtype:
                return self._free.pop(position)
        # Selective recompute watches which operations run in a forward and again in its backward; whether a buffer is at hand differs.
        with torch._C._DisableTorchDispatch():
            return torch.empty(numel, dtype=dtype)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)
        while sum(kept.nbytes for kept in self._free) > self._limit_bytes:
            self._free.pop(0)

    def clear(self) -> None:
        self._free.clear()


buffers = Buffers()


def release_buffers() -> None:
    """Drops the receive buffers that wait for the next collective of their size: between steps they are only in the way."""
    buffers.clear()
