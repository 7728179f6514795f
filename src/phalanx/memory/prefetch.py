"""When each fetch begins: as late as its link allows and as early as it must, where there is room; and what is waited for then."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fetch:
    """Bytes that are wanted before position `deadline`, and may begin to move from position `earliest` on."""

    deadline: int
    num_bytes: int
    seconds: float
    earliest: int = 0


def choose_starts(fetches: Sequence[Fetch], room: Sequence[int], durations: Sequence[float]) -> list[int]:
    """The position before which each fetch begins; its deadline, where there is no room to begin earlier.

    Fetches share one link and run in the order of their deadlines: from the last to the first, each must end where the next one
    begins. `room` is what is free at each position, `durations` how long each lasts.
    Shapes: one position for each fetch, in the order given.
    """
    left = list(room)
    begins = list(itertools.accumulate(durations, initial=0.0))
    starts = [fetch.deadline for fetch in fetches]
    link_until, no_later = begins[-1], len(durations)
    for number in sorted(range(len(fetches)), key=lambda number: -fetches[number].deadline):
        fetch = fetches[number]
        latest = min(begins[min(fetch.deadline, len(durations))], link_until) - fetch.seconds
        at = fetch.deadline
        while at > fetch.earliest and left[at - 1] >= fetch.num_bytes and (begins[at] > latest or at > no_later):
            at -= 1
        for position in range(at, fetch.deadline):
            left[position] -= fetch.num_bytes
        starts[number] = no_later = at
        link_until = min(latest, begins[min(at, len(durations))])
    return starts


def predict_seconds(fetches: Sequence[Fetch], starts: Sequence[int], durations: Sequence[float]) -> tuple[float, float]:
    """(the time of all positions with their waits, the waits alone), for one link that takes fetches as they begin."""
    now = link_free = waited = 0.0
    ends: dict[int, float] = {}
    by_start: dict[int, list[int]] = {}
    for number in sorted(range(len(fetches)), key=lambda number: (starts[number], fetches[number].deadline)):
        by_start.setdefault(starts[number], []).append(number)
    due: dict[int, list[int]] = {}
    for number, fetch in enumerate(fetches):
        due.setdefault(fetch.deadline, []).append(number)
    for position in range(len(durations) + 1):
        for number in by_start.get(position, ()):
            link_free = max(link_free, now) + fetches[number].seconds
            ends[number] = link_free
        wait = max((ends[number] - now for number in due.get(position, ())), default=0.0)
        waited += max(wait, 0.0)
        now += max(wait, 0.0) + (durations[position] if position < len(durations) else 0.0)
    return now, waited
