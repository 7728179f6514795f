"""Waits that cannot be left: gloo drops a connection when a wait for a message runs out, so such a wait is one call into the backend.

The waiting thread notes where it waits, which costs nothing else. The thread that watches the store finds the note of a long wait,
tells the others of it, and follows their waits, as `deadlock` does in all other operations.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from phalanx.cluster import deadlock
from phalanx.cluster.deadlock import Message, Search, Wait, caller, tell
from phalanx.errors import CommError


@dataclass(frozen=True, eq=False)
class Blocked:
    """A thread inside the backend, waiting for a message to come or to be taken."""

    message: Message
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)

    def wait(self) -> Wait:
        frame = sys._current_frames().get(self.thread)
        where = "" if frame is None else caller(frame)
        return Wait(self.message.name, (self.message.peer,), where, place=self.message.number)


_blocked: Blocked | None = None


@contextmanager
def blocked(message: Message) -> Iterator[None]:
    """Notes that this thread waits for a message while inside."""
    global _blocked
    _blocked = Blocked(message)
    try:
        yield
    finally:
        _blocked = None


class Sentry:
    """Looks now and then, from another thread and with a store of its own, whether this rank is blocked for long.

    Where ranks wait for each other and this one is to tell, it publishes the error and ends the process: the broken connections
    then lead the others out of their waits.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._told: Blocked | None = None

    def look(self, store: dist.Store) -> None:
        here = _blocked
        if self._told is not None and self._told is not here:
            tell(store, self._rank, None)
            self._told = None
        if here is None or time.monotonic() - here.since < deadlock.PATIENCE_S:
            return
        if self._told is None:
            self._told, self._search = here, Search(store, self._rank, 1, patience_s=0.0)
            tell(store, self._rank, here.wait())
        try:
            self._search.look()
        except CommError as error:
            print(f"rank {self._rank}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
