"""Agreement of ranks about what comes next, where a collective that not all of them join would wait for ever."""

from __future__ import annotations

from phalanx.cluster import failure, launch
from phalanx.cluster.collectives import raise_and_publish
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError

AGREE_S = 8.0


def agree(question: str, answer: str, axis: Axis) -> None:
    """Returns if all ranks of the axis ask this question and give one answer.

    Cost: two small messages per rank through the store, about a millisecond; meant for what is new, not for every step.
    Raises: CommError on every rank where answers differ, or where a rank does not ask within 8 s.
    """
    current = launch.world()
    if axis.size == 1 or current.store is None:
        return
    key = f"agree/{axis.name}/{axis.ranks[0]}/{question}"
    store, doing = current.store, f"agreeing on {question}"
    store.set(f"{key}/{axis.index}", answer)
    if axis.index == 0:
        answers = [f"{key}/{index}" for index in range(axis.size)]
        missing = failure.wait_for_keys(store, answers, AGREE_S, doing)
        verdict = "" if missing else _verdict(question, [store.get(name).decode() for name in answers], axis)
        store.set(f"{key}/verdict", verdict or "agreed")
        for name in answers:
            store.delete_key(name)
    else:
        missing = failure.wait_for_keys(store, [f"{key}/verdict"], 2 * AGREE_S, doing)
        verdict = "" if missing else store.get(f"{key}/verdict").decode().removeprefix("agreed")
    if missing:
        verdict = (
            f"{question}: this rank ({current.rank}) has {answer}, and within {AGREE_S:.0f} s not all other ranks came to the same place; "
            "ranks run modules in different orders or different numbers of times"
        )
    if verdict:
        raise_and_publish(CommError(verdict, allowed="the same modules in the same order on every rank", remedy=_REMEDY))


_REMEDY = "take the same branches on all ranks, or a plan that keeps whole parameters (zero2)"


def _verdict(question: str, answers: list[str], axis: Axis) -> str:
    different = [index for index, answer in enumerate(answers) if answer != answers[0]]
    if not different:
        return ""
    other = different[0]
    return f"{question}: rank {axis.ranks[0]} has {answers[0]}, rank {axis.ranks[other]} has {answers[other]}"
