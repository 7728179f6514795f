"""Steps that all ranks take together: what one rank meets, every rank raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import CheckpointError

Own = TypeVar("Own")
Shared = TypeVar("Shared")


def together(axis: Axis, work: Callable[[], Own]) -> Own:
    """Does `work` on every rank and returns this rank's result, or raises on every rank if it failed on one."""
    return gathered(axis, lambda: (work(), None))[0]


def gathered(axis: Axis, work: Callable[[], tuple[Own, Shared]]) -> tuple[Own, list[Shared]]:
    """Does `work` on every rank; returns the first of this rank's two results and the second of all ranks, by index.

    Raises: CheckpointError of the first rank that failed, naming it where others did not.
    """
    own, shared, error = None, None, None
    try:
        own, shared = work()
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        error = caught
    reports = comm.gather_objects((shared, _readable(error)), axis)
    failed = [index for index, (_, found) in enumerate(reports) if found is not None]
    if not failed:
        return own, [found for found, _ in reports]  # type: ignore[return-value]
    first: CheckpointError = reports[failed[0]][1]
    if len({str(reports[index][1]) for index in failed}) > 1 or len(failed) < axis.size:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        first = CheckpointError(f"rank {axis.ranks[failed[0]]}{others}: {first.found}", allowed=first.allowed, remedy=first.remedy)
    raise first from error


def _readable(error: Exception | None) -> CheckpointError | None:
    """The error as one that can travel between ranks."""
    if error is None or isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")
