"""Which parts of the state stay between two uses, and which leave: the fewest bytes moved for the room there is.

The order of uses is known, so each time between two uses of an item is a *gap* in which it stays or leaves. Staying takes room over
the whole gap and saves a fetch. For equal, clean items the best choice is to send away what is used last (Belady); for unequal
ones, and for changed ones that must be written back as they leave, that can be a third worse, so the choice is searched for.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer"; Carlisle and Lloyd, "On the k-coloring of intervals".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SEARCHED = 22  # gaps in conflict up to which every choice is considered; beyond, choices are improved by exchange
SEARCH_STEPS = 50_000
EXCHANGES = 5_000  # gaps times exchanges that are tried


@dataclass(frozen=True)
class Gap:
    """A time between two uses of an item: the positions from `start` to before `stop`, around the end where stop < start.

    `num_bytes` is the room that staying takes, `fetch_bytes` what a return costs. An item that was changed and leaves is written
    back, `write_bytes`, once for all gaps of the same `change`.
    """

    start: int
    stop: int
    num_bytes: int
    fetch_bytes: int
    write_bytes: int = 0
    change: int | None = None

    def positions(self, length: int) -> list[int]:
        if self.stop >= self.start:
            return list(range(self.start, self.stop))
        return [*range(self.start, length), *range(self.stop)]


def moved_bytes(gaps: Sequence[Gap], kept: frozenset[int] | set[int]) -> int:
    """What is fetched and written back where only the gaps in `kept` are stayed through."""
    left = [gap for number, gap in enumerate(gaps) if number not in kept]
    written = {gap.change: gap.write_bytes for gap in left if gap.change is not None}
    return sum(gap.fetch_bytes for gap in left) + sum(written.values())


def choose_kept(gaps: Sequence[Gap], room: Sequence[int]) -> frozenset[int]:
    """The gaps to stay through, as their numbers; `room` is what may stay at each position.

    Cost: for equal clean gaps without a wrap n·log n, and the optimum; up to `SEARCHED` gaps in conflict the optimum; else within a
    few per cent of it.
    """
    packing = _Packing(gaps, room)
    if packing.is_plain:
        return packing.free | _furthest_leaves(packing)
    best = min((_improved(packing, _inserted(packing, key)) for key in _ORDERS), key=packing.cost)
    if not any(gap.stop < gap.start for gap in gaps):
        best = min(best, _improved(packing, _furthest_leaves(packing)), key=packing.cost)
    if len(packing.open) <= SEARCHED:
        best = _searched(packing, best)
    return packing.free | best


class _Packing:
    """The gaps that cannot all stay, and the room at the positions that they share."""

    def __init__(self, gaps: Sequence[Gap], room: Sequence[int]):
        self.gaps, self.room = gaps, list(room)
        self.positions = [gap.positions(len(room)) for gap in gaps]
        fitting = {n for n, gap in enumerate(gaps) if all(room[at] >= gap.num_bytes for at in self.positions[n])}
        demand = [0] * len(room)
        for number in fitting:
            for at in self.positions[number]:
                demand[at] += gaps[number].num_bytes
        tight = {at for at, wanted in enumerate(demand) if wanted > room[at]}
        # What never meets a full position stays at no cost; the others only matter at such positions.
        self.free = frozenset(number for number in fitting if tight.isdisjoint(self.positions[number]))
        self.open = sorted(fitting - self.free)
        for number in self.free:
            for at in self.positions[number]:
                self.room[at] -= gaps[number].num_bytes
        self.positions = [[at for at in positions if at in tight] for positions in self.positions]

    @property
    def is_plain(self) -> bool:
        gaps = [self.gaps[number] for number in self.open]
        kinds = {(gap.num_bytes, gap.fetch_bytes) for gap in gaps}
        return len(kinds) <= 1 and not any(gap.write_bytes or gap.stop < gap.start for gap in gaps)

    def cost(self, kept: frozenset[int]) -> int:
        return moved_bytes(self.gaps, self.free | kept)

    def left(self, kept: frozenset[int] | set[int]) -> list[int]:
        """The room that is left at each position beside `kept`."""
        left = list(self.room)
        for number in kept:
            for at in self.positions[number]:
                left[at] -= self.gaps[number].num_bytes
        return left

    def fits(self, number: int, left: Sequence[int]) -> bool:
        size = self.gaps[number].num_bytes
        return all(left[at] >= size for at in self.positions[number])

    def fill(self, kept: set[int], left: list[int], order: Sequence[int]) -> None:
        """Adds whatever of `order` still fits."""
        for number in order:
            if number not in kept and self.fits(number, left):
                kept.add(number)
                for at in self.positions[number]:
                    left[at] -= self.gaps[number].num_bytes


def _furthest_leaves(packing: _Packing) -> frozenset[int]:
    """Goes through the positions in order; where they overflow, what is used last leaves."""
    gaps, staying, gone = packing.gaps, set(), set()
    starts: dict[int, list[int]] = {}
    for number in packing.open:
        starts.setdefault(gaps[number].start, []).append(number)
    for at, room in enumerate(packing.room):
        staying |= set(starts.get(at, ()))
        staying = {number for number in staying if gaps[number].stop > at}
        while staying and sum(gaps[number].num_bytes for number in staying) > room:
            last = max(staying, key=lambda number: (gaps[number].stop, number))
            staying.remove(last)
            gone.add(last)
    return frozenset(packing.open) - gone


def _worth(gap: Gap) -> float:
    return gap.fetch_bytes + gap.write_bytes


_Order = Callable[[_Packing, int], float]
_ORDERS: tuple[_Order, ...] = (
    lambda packing, n: len(packing.positions[n]),
    lambda packing, n: -_worth(packing.gaps[n]),
    lambda packing, n: -_worth(packing.gaps[n]) / max(packing.gaps[n].num_bytes, 1),
    lambda packing, n: -_worth(packing.gaps[n]) / (max(packing.gaps[n].num_bytes, 1) * max(len(packing.positions[n]), 1)),
    lambda packing, n: packing.gaps[n].stop,
)


def _inserted(packing: _Packing, key: _Order) -> frozenset[int]:
    kept: set[int] = set()
    packing.fill(kept, packing.left(kept), sorted(packing.open, key=lambda number: key(packing, number)))
    return frozenset(kept)


def _improved(packing: _Packing, kept: frozenset[int]) -> frozenset[int]:
    """Takes in one gap at a time at the expense of those that cost least, while that saves bytes."""
    by_worth = sorted(packing.open, key=lambda number: -_worth(packing.gaps[number]))
    cost, found, tries = packing.cost(kept), True, max(10, EXCHANGES // max(len(by_worth), 1))
    while found:
        found = False
        for wanted in by_worth:
            if wanted in kept or tries == 0:
                continue
            tries -= 1
            trial = _make_way(packing, set(kept), wanted)
            packing.fill(trial, packing.left(trial), by_worth)
            if (better := packing.cost(frozenset(trial))) < cost:
                kept, cost, found = frozenset(trial), better, True
    return kept


def _make_way(packing: _Packing, kept: set[int], wanted: int) -> set[int]:
    left = packing.left(kept)
    size = packing.gaps[wanted].num_bytes
    for at in packing.positions[wanted]:
        while left[at] < size:
            there = [number for number in kept if at in packing.positions[number]]
            leaves = min(there, key=lambda number: _worth(packing.gaps[number]) / packing.gaps[number].num_bytes)
            kept.remove(leaves)
            for position in packing.positions[leaves]:
                left[position] += packing.gaps[leaves].num_bytes
    return kept | {wanted}


def _searched(packing: _Packing, best: frozenset[int]) -> frozenset[int]:
    """Depth first over all choices, those that cannot beat the best so far left out."""
    order = sorted(packing.open, key=lambda number: -_worth(packing.gaps[number]))
    best_cost, steps = packing.cost(best), 0
    fixed = moved_bytes(packing.gaps, packing.free | set(packing.open))

    def descend(depth: int, kept: set[int], left: list[int], written: set[int], cost: int) -> None:
        nonlocal best, best_cost, steps
        steps += 1
        if cost >= best_cost or steps > SEARCH_STEPS:
            return
        if depth == len(order):
            best, best_cost = frozenset(kept), cost
            return
        number = order[depth]
        gap = packing.gaps[number]
        if packing.fits(number, left):
            less = list(left)
            for at in packing.positions[number]:
                less[at] -= gap.num_bytes
            descend(depth + 1, kept | {number}, less, written, cost)
        writes = gap.write_bytes if gap.change is not None and gap.change not in written else 0
        also = written | {gap.change} if gap.change is not None else written
        descend(depth + 1, kept, left, also, cost + gap.fetch_bytes + writes)

    # A change that some gap without any choice writes back already is paid for.
    chosen = packing.free | set(packing.open)
    paid = {gap.change for n, gap in enumerate(packing.gaps) if n not in chosen and gap.change is not None}
    descend(0, set(), list(packing.room), paid, fixed)
    return best
