"""Counts every collective: calls, bytes handed over, and the bytes this rank puts on the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

Row = tuple[str, str, int, int, int]


class Ledger:
    """Rows of (operation, axis name, calls, bytes in, bytes on the wire) since the last reset.

    Units: bytes of this rank. `bytes_in` is the size of the tensor handed over; `bytes_wire` what this rank sends under the
    algorithm of the backend.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def count(self, operation: str, axis: str, bytes_in: int, bytes_wire: int) -> None:
        counts = self._counts.get((operation, axis))
        if counts is None:
            counts = self._counts[operation, axis] = [0, 0, 0]
        counts[0] += 1
        counts[1] += bytes_in
        counts[2] += bytes_wire

    def rows(self) -> list[Row]:
        return [(operation, axis, *counts) for (operation, axis), counts in sorted(self._counts.items())]  # type: ignore[misc]

    def reset(self) -> None:
        self._counts.clear()

    def total_wire_bytes(self) -> int:
        return sum(counts[2] for counts in self._counts.values())

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Row]]:
        """Counts the block alone: the list is filled with its rows when the block ends; the running totals go on."""
        before = {key: list(counts) for key, counts in self._counts.items()}
        rows: list[Row] = []
        try:
            yield rows
        finally:
            for (operation, axis), counts in sorted(self._counts.items()):
                old = before.get((operation, axis), [0, 0, 0])
                calls, bytes_in, wire = (now - then for now, then in zip(counts, old, strict=True))
                if calls:
                    rows.append((operation, axis, calls, bytes_in, wire))


def ring_all_reduce_bytes(nbytes: int, size: int) -> int:
    """A reduce-scatter and an all-gather round the ring, each (n - 1)/n of the tensor."""
    return 2 * nbytes * (size - 1) // size


def tree_broadcast_bytes(nbytes: int, size: int, index: int, source: int) -> int:
    """A binomial tree: a rank sends the whole tensor to each of its children."""
    place = (index - source) % size
    lowest = (place & -place) if place else 1 << (size - 1).bit_length()
    children, step = 0, lowest >> 1
    while step:
        children += place + step < size
        step >>= 1
    return children * nbytes


ledger = Ledger()
