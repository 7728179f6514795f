"""Results that a recomputed block keeps all the same: what cost communication or much time for its size.

The block's first forward notes them in order; its second forward, in the backward, gets them back in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Results = tuple[torch.Tensor, ...]


class _Running(threading.local):
    """What is under way on this thread: a backward may run on another one than its forward."""

    notes: Notes | None = None
    is_inside = False


_running = _Running()


class Notes:
    """The kept results of one call of a block."""

    def __init__(self) -> None:
        self.results: list[Results] = []
        self.place: int | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The first forward."""
        with self._running(None):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A second forward, which may come again."""
        with self._running(0):
            yield

    @contextmanager
    def _running(self, place: int | None) -> Iterator[None]:
        before, _running.notes, self.place = _running.notes, self, place
        try:
            yield
        finally:
            _running.notes = before


def kept(compute: Callable[[], Results]) -> Results:
    """What `compute()` gives, detached; inside a block that recomputes it runs once, and its results stay in memory."""
    notes = _running.notes
    if notes is not None and notes.place is not None:
        results, notes.place = notes.results[notes.place], notes.place + 1
        return results
    before, _running.is_inside = _running.is_inside, True
    try:
        results = compute()
    finally:
        _running.is_inside = before
    if notes is not None:
        notes.results.append(results)
    return results


def is_inside_kept() -> bool:
    """Whether what runs now is part of a kept result, so that nothing inside needs to be kept besides."""
    return _running.is_inside
