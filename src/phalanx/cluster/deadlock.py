"""Ranks that wait for each other in different places: each tells where it waits, and follows what the others tell.

A rank that skips a step or leaves early waits in another operation than the rest, often on another axis, so no operation ever
fails. Here a wait that lasts becomes a record in the store. Nothing is told, and nothing costs, before a wait is long.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType

import torch
import torch.distributed as dist

from phalanx.cluster import failure
from phalanx.cluster.ledger import ledger
from phalanx.errors import CommError

# A wait is long for the finder after this time; ranks of one step are rarely further apart, and a slow one is only waited for.
PATIENCE_S = 6.0
# Two looks this far apart must show the same waits: one look may meet a rank between two of them.
BETWEEN_LOOKS_S = 2.0
# Time for the others to notice the error, before the store may go with the rank that raises it.
NOTICE_S = 1.0
PLACES = 4
REMEDY = "the same calls in the same order on every rank"
_KEY = "phalanx/waiting/{}"
_PHALANX, _TORCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.abspath(torch.__file__))
_INSIDE = (_PHALANX + os.sep, _TORCH + os.sep, contextlib.__file__)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Message:
    """The `number`th message that this rank has begun to send to, or to receive from, `peer` on one channel."""

    name: str
    peer: int
    number: int


_messages: dict[tuple[str, str, int, int], int] = {}


def begin_message(axis: str, channel: str, source: int, target: int, rank: int) -> Message:
    """Counts a message between two ranks, at the end that is this rank."""
    key = (axis, channel, source, target)
    _messages[key] = number = _messages.get(key, 0) + 1
    return Message(_name_of(*key), source if target == rank else target, number)


def _name_of(axis: str, channel: str, source: int, target: int) -> str:
    return f"a message from rank {source} to rank {target} on axis {axis}" + (f" ({channel})" if channel else "")


def calls_begun() -> dict[str, int]:
    """How often this rank has begun each operation on each axis, and each kind of message."""
    calls = {f"{operation} on axis {axis}": calls for operation, axis, calls, *_ in ledger.rows()}
    return calls | {_name_of(*key): number for key, number in list(_messages.items())}


@dataclass(frozen=True)
class Wait:
    """Where a rank waits: at an operation that some of `ranks` have not begun as often as it has, or for an answer of all `ranks`.

    `number` grows with every wait of a rank. A rank without `ranks` has left: it waits for nobody, and will not come. Of several
    messages that a rank has begun it waits for the one at `place`.
    """

    what: str
    ranks: tuple[int, ...] = ()
    caller: str = ""
    begun: dict[str, int] = field(default_factory=calls_begun)
    number: int = field(default_factory=lambda: next(_numbers))
    place: int | None = None

    @classmethod
    def loads(cls, text: str | bytes) -> Wait:
        fields = json.loads(text)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})

    def is_for(self, other: Wait) -> bool:
        """Whether the rank of `other` keeps this one waiting. Where it has begun the same operation, data are under way."""
        return other.begun.get(self.what, 0) < (self.place or self.begun.get(self.what, 1))

    def __str__(self) -> str:
        return f"{self.what} at {self.caller}" if self.caller else self.what


class Search:
    """One long wait of this rank, and what it has seen of the others."""

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float | None = None):
        self._store, self._rank = store, rank
        self._pause_s = BETWEEN_LOOKS_S * max(1.0, size / 64)  # a look reads up to `size` records: look less often in large worlds
        self._due = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        self._seen: dict[int, Wait] = {}

    def look(self) -> None:
        """Once in a while follows the waits from this rank on. Raises: CommError where they have closed, on the first of the ranks."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._pause_s
        try:
            before, self._seen = self._seen, stuck(self._store, self._rank)
        except RuntimeError:
            return  # a store that has gone is noticed elsewhere
        if not self._seen or self._seen != before or failure.noticed() is not None:
            return
        if self._rank == min(rank for rank, wait in self._seen.items() if wait.ranks):  # one tells; the others notice
            error = CommError(f"ranks wait for each other: {_places(self._seen)}", remedy=REMEDY)
            failure.publish(error)
            time.sleep(NOTICE_S)
            raise error


@contextlib.contextmanager
def waiting(store: dist.Store, rank: int, what: str, ranks: tuple[int, ...]) -> Iterator[Search]:
    """Tells all ranks where this one waits, and for whom, while inside."""
    tell(store, rank, Wait(what, ranks, caller(sys._getframe(1))))
    try:
        yield Search(store, rank, len(ranks))
    finally:
        tell(store, rank, None)


def tell(store: dist.Store, rank: int, wait: Wait | None) -> None:
    """Lets the others know what this rank waits for, or that it goes on."""
    with contextlib.suppress(RuntimeError):  # a store that has gone is noticed elsewhere
        store.set(_KEY.format(rank), json.dumps(asdict(wait)) if wait else "")


def stuck(store: dist.Store, rank: int) -> dict[int, Wait]:
    """The waits of all ranks that keep this one waiting, directly or through others; empty where one of them may still go on."""
    read = functools.cache(lambda other: _read(store, other))
    found: dict[int, Wait] = {}
    ahead = [rank]
    while ahead:
        here = ahead.pop()
        mine = read(here)
        if mine is None:
            return {}
        found[here] = mine
        awaited = []
        for other in mine.ranks:
            theirs = read(other)
            if theirs is None:
                return {}
            if other != here and mine.is_for(theirs):
                awaited.append(other)
        if mine.ranks and not awaited:
            return {}
        ahead += [other for other in awaited if other not in found]
    return found


def _read(store: dist.Store, rank: int) -> Wait | None:
    key = _KEY.format(rank)
    text = store.get(key) if store.check([key]) else b""
    return Wait.loads(text) if text else None


def _places(waits: dict[int, Wait]) -> str:
    """The ranks at each place, the first few places of all."""
    ranks_at: dict[str, list[int]] = {}
    for rank, wait in sorted(waits.items()):
        ranks_at.setdefault(str(wait), []).append(rank)
    shown = [f"{_ranks(ranks)}: {place}" for place, ranks in list(ranks_at.items())[:PLACES]]
    more = len(ranks_at) - len(shown)
    return "; ".join(shown) + (f"; and {more} more places" if more else "")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def caller(frame: FrameType) -> str:
    """File and line of the innermost frame outside Phalanx and torch, or of the outermost one: a line that a person knows."""
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
