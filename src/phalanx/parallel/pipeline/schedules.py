"""The schedules: each a pure function that says in which order a rank computes. Adding one is one function and one line of the table.

All are given as for a filled pipe. Fewer micro-batches, or a number that does not divide, leave out the actions of those that are not
there: without a micro-batch the order of the others is as it was, and cannot dead-lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.errors import PlanError
from phalanx.layout import round_up
from phalanx.parallel.pipeline.messages import add_messages
from phalanx.parallel.pipeline.table import Action, Kind, Table

Order = Iterator[Action]


def gpipe(rank: int, num_ranks: int, num_micro: int, num_chunks: int) -> Order:
    """All forwards, then all backwards.

    Source: Huang et al. 2019, GPipe, section 2.3.
    """
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        yield from (Action(kind, micro) for micro in range(num_micro))


def one_f_one_b(rank: int, num_ranks: int, num_micro: int, num_chunks: int) -> Order:
    """One forward, one backward in turn, after as many forwards as there are ranks behind this one.

    Source: Narayanan et al. 2019, PipeDream, section 3.2 (with a flush at the end of the step).
    """
    ahead = min(num_ranks - 1 - rank, num_micro)
    yield from (Action(Kind.FORWARD, micro) for micro in range(ahead))
    for micro in range(num_micro):
        if micro + ahead < num_micro:
            yield Action(Kind.FORWARD, micro + ahead)
        yield Action(Kind.BACKWARD, micro)


def interleaved(rank: int, num_ranks: int, num_micro: int, num_chunks: int) -> Order:
    """1F1B over several chunks on each rank: groups of p micro-batches go through all chunks one after another.

    Source: Narayanan et al. 2021, Megatron-LM, section 2.2.
    """
    units = [
        (group + micro, chunk) for group in range(0, num_micro, num_ranks) for chunk in range(num_chunks) for micro in range(num_ranks)
    ]
    ahead = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, len(units))
    yield from (Action(Kind.FORWARD, micro, chunk) for micro, chunk in units[:ahead])
    for place, (micro, chunk) in enumerate(units):
        if place + ahead < len(units):
            yield Action(Kind.FORWARD, *units[place + ahead])
        yield Action(Kind.BACKWARD, micro, num_chunks - 1 - chunk)


def zb_h1(rank: int, num_ranks: int, num_micro: int, num_chunks: int) -> Order:
    """1F1B whose backwards are halved: rank i puts off its first i weight halves, so that input halves come out earlier.

    It holds as many activations as the first rank of 1F1B does.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.2 (ZB-H1).
    """
    ahead = min(num_ranks - 1 - rank, num_micro)
    yield from (Action(Kind.FORWARD, micro) for micro in range(ahead))
    for micro in range(num_micro):
        if micro + ahead < num_micro:
            yield Action(Kind.FORWARD, micro + ahead)
        yield Action(Kind.INPUT, micro)
        if micro >= rank:
            yield Action(Kind.WEIGHT, micro - rank)
    yield from (Action(Kind.WEIGHT, micro) for micro in range(max(num_micro - rank, 0), num_micro))


def zbv(rank: int, num_ranks: int, num_micro: int, num_chunks: int) -> Order:
    """Two chunks to and fro, halved backwards: no bubble where F, B and W take equal time, and the memory of 1F1B's first rank.

    Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory, section 3.2 (V-ZB); phases as in PyTorch's ScheduleZBVZeroBubble.
    """
    steps = _Counted()
    for _ in range(2 * (num_ranks - rank) - 1):
        yield steps.next(Kind.FORWARD, 0)
    for _ in range(rank):
        yield steps.next(Kind.FORWARD, 1)
        yield steps.next(Kind.FORWARD, 0)
    for _ in range(num_ranks - rank):
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            yield steps.next(kind, 1)
    while steps.count(Kind.FORWARD, 1) < num_micro:
        if steps.count(Kind.FORWARD, 0) < num_micro:
            yield steps.next(Kind.FORWARD, 0)
        for kind in (Kind.INPUT, Kind.WEIGHT):
            yield steps.next(kind, 0)
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            yield steps.next(kind, 1)
    for _ in range(rank):
        yield steps.next(Kind.INPUT, 0)
        yield steps.next(Kind.INPUT, 1)
    for _ in range(num_ranks - rank):
        yield steps.next(Kind.INPUT, 0)
        yield steps.next(Kind.WEIGHT, 0)
    for chunk in (1, 0):
        while steps.count(Kind.WEIGHT, chunk) < num_micro:
            yield steps.next(Kind.WEIGHT, chunk)


def dualpipev(rank: int, num_ranks: int, num_micro: int, num_chunks: int) -> Order:
    """Two chunks to and fro: forwards of one go beside backwards of the other, and the last backwards are halved.

    Source: DeepSeek-AI 2025, DualPipe, `dualpipev.py` (steps 1 to 8).
    """
    behind, steps = num_ranks - 1 - rank, _Counted()
    for _ in range(2 * behind):
        yield steps.next(Kind.FORWARD, 0)
    for _ in range(rank + 1):
        yield steps.next(Kind.FORWARD, 0)
        yield steps.next(Kind.FORWARD, 1)
    for _ in range(behind):
        yield steps.next(Kind.INPUT, 1)
        yield steps.next(Kind.WEIGHT, 1)
        yield steps.next(Kind.FORWARD, 1)
    for _ in range(num_micro - 2 * num_ranks + rank + 1):
        for forward, backward in ((0, 1), (1, 0)):
            yield steps.next(Kind.FORWARD, forward)
            yield steps.next(Kind.BACKWARD, backward)
    for _ in range(behind):
        yield steps.next(Kind.BACKWARD, 1)
        yield steps.next(Kind.FORWARD, 1)
        yield steps.next(Kind.BACKWARD, 0)
    waiting: list[Action] = []
    for turn in range(rank + 1):  # the second half of these is halved
        for chunk in (1, 0):
            halved = 2 * turn + (1 - chunk) >= rank + 1
            yield (action := steps.next(Kind.INPUT if halved else Kind.BACKWARD, chunk))
            waiting += [Action(Kind.WEIGHT, action.micro, chunk)] if halved else []
    for _ in range(behind):
        if waiting:
            yield waiting.pop(0)
        yield (action := steps.next(Kind.INPUT, 0))
        waiting.append(Action(Kind.WEIGHT, action.micro, 0))
    yield from waiting


class _Counted:
    """Hands out micro-batches 0, 1, 2 ... of each kind and chunk; both halves of a backward follow one count each."""

    def __init__(self) -> None:
        self._next: dict[tuple[Kind, int], int] = {}

    def count(self, kind: Kind, chunk: int) -> int:
        return self._next.get((kind, chunk), 0)

    def next(self, kind: Kind, chunk: int) -> Action:
        micro = self.count(kind, chunk)
        self._next[kind, chunk] = micro + 1
        if kind is Kind.BACKWARD:  # it stands for both halves
            self._next[Kind.INPUT, chunk] = self._next[Kind.WEIGHT, chunk] = micro + 1
        elif kind is Kind.INPUT:
            self._next[Kind.BACKWARD, chunk] = micro + 1
        return Action(kind, micro, chunk)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How one schedule is made: `order` of a rank, chunks to and fro where it `turns`, and the micro-batches that fill its pipe."""

    order: Callable[[int, int, int, int], Order]
    num_chunks: int | None = 1  # None: as the plan says
    turns: bool = False
    fills: Callable[[int, int], int] = lambda num_ranks, num_micro: num_micro


SCHEDULES = {
    "gpipe": Schedule(order=gpipe),
    "1f1b": Schedule(order=one_f_one_b),
    "interleaved": Schedule(order=interleaved, num_chunks=None, fills=lambda num_ranks, num_micro: round_up(num_micro, num_ranks)),
    "zb-h1": Schedule(order=zb_h1),
    "zbv": Schedule(order=zbv, num_chunks=2, turns=True, fills=lambda num_ranks, num_micro: max(num_micro, 2 * num_ranks)),
    "dualpipev": Schedule(order=dualpipev, num_chunks=2, turns=True, fills=lambda num_ranks, num_micro: max(num_micro, 2 * num_ranks)),
}


def make_table(name: str, num_ranks: int, num_micro: int, num_chunks: int = 1) -> Table:
    """The table of a schedule, with its sends and receives.

    Raises: PlanError for an unknown name or a number of chunks that the schedule does not have.
    """
    if name not in SCHEDULES:
        raise PlanError(f"there is no schedule {name!r}", allowed=", ".join(SCHEDULES), remedy="1f1b")
    schedule = SCHEDULES[name]
    chunks = num_chunks if schedule.num_chunks is None else schedule.num_chunks
    if num_chunks not in (1, chunks):
        raise PlanError(f"{name} with {num_chunks} chunks a rank", allowed=f"{chunks}", remedy=f"interleaved{num_chunks}")
    rows = []
    for rank in range(num_ranks):
        order = schedule.order(rank, num_ranks, schedule.fills(num_ranks, num_micro), chunks)
        rows.append([action for action in order if action.micro < num_micro])
    table = Table(name=name, num_ranks=num_ranks, num_micro=num_micro, num_chunks=chunks, turns=schedule.turns)
    return add_messages(table.with_rows(rows))
