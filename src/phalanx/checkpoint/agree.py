"""Steps that all ranks take together: what one rank meets, every rank raises."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from phalanx.cluster import comm, failure, launch
from phalanx.cluster.mesh import Axis
from phalanx.errors import CheckpointError

Own = TypeVar("Own")
Shared = TypeVar("Shared")
Gather = Callable[[object, Axis], list[Any]]  # `comm.gather_objects`, or what does the same beside the steps

ALONE_S = 10.0
_PACKAGE = str(Path(__file__).resolve().parents[1])
_calls: Counter[str] = Counter()


def require_all_ranks(axis: Axis, call: str) -> None:
    """Finds `if rank == 0: save()` in seconds and not when collectives time out; `call` is what the person called.

    The first rank gives up if it is the only one that came within `ALONE_S`; that is long for ranks that left the same
    optimizer step. Where others have come too, the late ones are waited for as in any collective.
    Cost: one message to the store for each rank.
    Raises: CommError on every rank, with the place of the call.
    """
    store = launch.world().store
    if axis.size == 1 or store is None:
        return
    name = f"checkpoint/{axis.name}/{axis.ranks[0]}"
    _calls[name] += 1
    key = f"{name}/{_calls[name]}"
    arrived, deadline = store.add(key, 1), time.monotonic() + ALONE_S
    while axis.index == 0 and arrived < 2 and failure.noticed() is None:
        if time.monotonic() > deadline:
            missing = f"none of the other {axis.size - 1} has come {ALONE_S:g} s after rank {axis.ranks[0]} called it at {_caller()}"
            remedy = "Call it outside of `if rank == 0`; a barrier before it waits for ranks that are this late"
            comm.fail(f"{call} must be called on all ranks: {missing}. {remedy}")
        time.sleep(0.01)
        arrived = store.add(key, 0)


def _caller() -> str:
    """File and line of the innermost frame outside Phalanx, or of the outermost one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def together(axis: Axis, work: Callable[[], Own], gather: Gather = comm.gather_objects) -> Own:
    """Does `work` on every rank and returns this rank's result, or raises on every rank if it failed on one."""
    return gathered(axis, lambda: (work(), None), gather)[0]


def gathered(axis: Axis, work: Callable[[], tuple[Own, Shared]], gather: Gather = comm.gather_objects) -> tuple[Own, list[Shared]]:
    """Does `work` on every rank; returns the first of this rank's two results and the second of all ranks, by index.

    Raises: CheckpointError of the first rank that failed, naming it where others did not.
    """
    own, shared, error = None, None, None
    try:
        own, shared = work()
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        error = caught
    reports = gather((shared, _readable(error)), axis)
    failed = [index for index, (_, found) in enumerate(reports) if found is not None]
    if not failed:
        return own, [found for found, _ in reports]  # type: ignore[return-value]
    first: CheckpointError = reports[failed[0]][1]
    if len({str(reports[index][1]) for index in failed}) > 1 or len(failed) < axis.size:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        first = type(first)(f"rank {axis.ranks[failed[0]]}{others}: {first.found}", allowed=first.allowed, remedy=first.remedy)
    raise first from error


def _readable(error: Exception | None) -> CheckpointError | None:
    """The error as one that can travel between ranks."""
    if error is None or isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")
