"""Agreement of ranks about what comes next, where a collective that not all of them join would wait for ever."""

from __future__ import annotations

from phalanx.cluster import deadlock, failure, launch
from phalanx.cluster.collectives import raise_and_publish
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError

SHORT_S = 0.5
MODULES = "take the same branches on all ranks, or a plan that keeps whole parameters (zero2)"


def agree(question: str, answer: str, axis: Axis, remedy: str = MODULES) -> None:
    """Returns if all ranks of the axis ask this question and give one answer; waits for ranks that are only slow.

    Cost: two small messages per rank through the store, about a millisecond; meant for what is new, not for every step.
    Raises: CommError on every rank where answers differ, or where ranks wait for each other in different places.
    """
    current = launch.world()
    if axis.size == 1 or current.store is None:
        return
    key = f"agree/{axis.name}/{axis.ranks[0]}/{question}"
    current.store.set(f"{key}/{axis.index}", answer)
    if axis.index == 0:
        verdict = _collect(key, question, answer, axis)
    else:
        verdict = _come_together([f"{key}/verdict"], [axis.ranks[0]], question, answer)
        verdict = verdict or current.store.get(f"{key}/verdict").decode().removeprefix("agreed")
    if verdict:
        raise_and_publish(CommError(verdict, allowed="the same on every rank", remedy=remedy))


def _collect(key: str, question: str, answer: str, axis: Axis) -> str:
    """On the first rank: reads all answers, and leaves the verdict for the others; empty where all agree."""
    store = launch.world().store
    assert store is not None
    keys = [f"{key}/{index}" for index in range(axis.size)]
    verdict = _come_together(keys, list(axis.ranks), question, answer)
    if not verdict:
        answers = [store.get(name).decode() for name in keys]
        other = next((index for index in range(axis.size) if answers[index] != answers[0]), None)
        if other is not None:
            verdict = f"{question}: rank {axis.ranks[0]} has {answers[0]}, rank {axis.ranks[other]} has {answers[other]}"
    store.set(f"{key}/verdict", verdict or "agreed")
    for name in keys:
        store.delete_key(name)
    return verdict


def _come_together(keys: list[str], ranks: list[int], question: str, answer: str) -> str:
    """Waits for the key of each rank; returns what is wrong where one of them does not come in time."""
    current = launch.world()
    store, doing = current.store, f"agreeing on {question}"
    assert store is not None
    missing = failure.wait_for_keys(store, keys, SHORT_S, doing)
    if not missing:
        return ""
    late = tuple(rank for name, rank in zip(keys, ranks, strict=True) if name in missing)
    with deadlock.waiting(store, current.rank, f"{doing}, which is {answer} here", late) as search:
        for _ in range(max(1, round(current.timeout_s / SHORT_S))):
            if not failure.wait_for_keys(store, keys, SHORT_S, doing):
                return ""
            search.look()
    return f"{question}: rank {current.rank} has {answer}, and the time-out passed before the other ranks came"
