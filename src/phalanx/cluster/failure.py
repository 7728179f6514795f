"""The first rank that fails ends the job: publishing a failure, noticing one, and leaving in time.

A failing rank writes its traceback into the store that all ranks share. A thread on every rank looks there; waits in `comm`
ask `noticed()` and raise PeerError. A rank that does not come out of what it is doing is ended by its own thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType

import torch.distributed as dist

from phalanx.errors import CommError

KEY = "phalanx/failure"
POLL_S = 0.4
# Time that a rank has from noticing a failure to being gone; with POLL_S and the launcher's own steps it stays below 20 s.
LEAVE_S = 10.0
# The longest that one call to the store may take; it answers in milliseconds, or breaks when its server has gone.
CALL_S = 30.0


@dataclass(frozen=True)
class Failure:
    """What the first failing rank left for the others."""

    rank: int
    summary: str
    traceback: str

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))


class PeerError(CommError):
    """This rank is well; it stops because another one has failed."""


class Watch:
    """One rank's view of the shared store: publishes this rank's failure, notices the first one of all.

    `beside` is called with that store at every look.

    Cost: one small message per `poll_s`, from a thread of its own with a connection of its own, so a blocked main thread does
    not hold it up.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, poll_s: float = POLL_S, beside: Callable[[dist.Store], None] = lambda store: None
    ):
        self.rank, self.store, self._beside = rank, store, beside
        self.failure: Failure | None = None
        self._poll_s = poll_s * max(1.0, size / 256)  # the store answers everyone: ask less often in large worlds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-watch", daemon=True)
        self._thread.start()

    def publish(self, summary: str, text: str) -> Failure | None:
        """Makes this rank's failure the job's unless another was first; returns the first, None where the store is gone."""
        mine = Failure(self.rank, summary, text)
        try:
            self.failure = Failure.loads(self.store.compare_set(KEY, "", mine.dumps()))
        except (RuntimeError, ValueError):
            self.failure = self.failure or mine
        return self.failure

    def await_failure(self, seconds: float) -> Failure | None:
        """The failure of the job if one gets known within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        return self.failure

    def close(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=CALL_S)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                if self.failure is None and self.store.check([KEY]):
                    self.failure = Failure.loads(self.store.get(KEY))
                if self.failure is None:
                    self._beside(self.store)
            except (RuntimeError, ValueError):
                return  # the store has gone with the rank or launcher that held it; broken connections tell the rest
            if self.failure is not None:
                self._leave_in_time()
                return

    def _leave_in_time(self) -> None:
        """Ends the process where the program does not: a rank that stays alive would hold up all that wait for it."""
        if self._stop.wait(LEAVE_S):
            return
        failure = self.failure
        if failure is not None and failure.rank != self.rank:
            print(f"rank {self.rank}: ended because rank {failure.rank} failed ({failure.summary})", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)


_watch: Watch | None = None
_previous_hook: Callable[..., object] = sys.__excepthook__


def start(
    store: dist.Store,
    rank: int,
    size: int,
    hook: Callable[..., object] = sys.__excepthook__,
    beside: Callable[[dist.Store], None] = lambda store: None,
) -> None:
    """Starts watching and takes over `sys.excepthook`, which goes on to `hook`; `stop` undoes both."""
    global _watch, _previous_hook
    _watch, _previous_hook = Watch(store, rank, size, beside=beside), hook
    sys.excepthook = _report_uncaught


def stop() -> None:
    """Stops watching; the process may then start anew."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None
    if sys.excepthook is _report_uncaught:
        sys.excepthook = _previous_hook


def forget() -> None:
    """After a fork: the parent's watch is not ours."""
    global _watch
    _watch = None


def noticed() -> Failure | None:
    """The job's failure where one is known on this rank. Cost: two attribute reads."""
    return None if _watch is None else _watch.failure


def awaited(seconds: float) -> Failure | None:
    """As `noticed`, but gives one that is on its way `seconds` to arrive."""
    return None if _watch is None else _watch.await_failure(seconds)


def publish(error: BaseException) -> None:
    """Makes an exception of this rank the job's failure, unless another was first or it only echoes another's.

    An error that is about to be raised here, and has no traceback yet, is published with the stack that leads here.
    """
    if _watch is None or isinstance(error, PeerError):
        return
    text = "".join(traceback.format_exception(error))
    if error.__traceback__ is None:
        text = "".join(["Traceback (most recent call last):\n", *traceback.format_stack()[:-1], text])
    _watch.publish(summary_of(error), text)


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float, doing: str) -> list[str]:
    """Waits until the store has all keys; returns those that did not come. Raises: PeerError where the job fails meanwhile."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        failed = noticed()
        if failed is not None:
            raise peer_error(failed, doing)
        if time.monotonic() > deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(0.001)
    return []


def summary_of(error: BaseException) -> str:
    """The exception in one line."""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0].rstrip(".")


def peer_error(failure: Failure, doing: str) -> PeerError:
    """The error of a well rank: who failed, with what, and what this rank was doing."""
    return PeerError(f"rank {failure.rank} failed ({failure.summary}); this rank was {doing}")


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The excepthook: the failing rank prints its traceback, a rank that only follows prints one line."""
    if isinstance(error, PeerError):
        rank = _watch.rank if _watch is not None else "?"
        print(f"rank {rank}: stopped: {error}", file=sys.stderr, flush=True)
        return
    if not isinstance(error, KeyboardInterrupt):
        publish(error)
    _previous_hook(kind, error, trace)
