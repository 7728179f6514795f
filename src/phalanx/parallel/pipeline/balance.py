"""Cuts a row of layers into stages of equal cost, as nearly as whole layers allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.simulate import Costs


def balance(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """The number of layers of each stage such that the most expensive stage costs least; at least one layer each.

    `first` and `last` are the costs of what comes before the first layer (an embedding) and after the last (a head).
    Among equals, the cut whose costs differ least (by the sum of squares) is taken.
    Raises: PlanError where there are fewer layers than stages.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise PlanError(f"{num_stages} stages for {count} layers", allowed=f"1 to {count}", remedy=f"{max(count, 1)} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def of(stage: int, start: int, stop: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return sums[stop] - sums[start] + ends

    # best[stop]: the lexicographically least (largest cost, sum of squares) of the stages so far that hold the layers before `stop`
    best: list[tuple[float, float] | None] = [(0.0, 0.0)] + [None] * count
    origin: list[list[int]] = []
    for stage in range(num_stages):
        fresh: list[tuple[float, float] | None] = [None] * (count + 1)
        came = [0] * (count + 1)
        for stop in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for start in range(stage, stop):
                before = best[start]
                if before is None:
                    continue
                cost = of(stage, start, stop)
                value = (max(before[0], cost), before[1] + cost * cost)
                if fresh[stop] is None or value < fresh[stop]:  # type: ignore[operator]
                    fresh[stop], came[stop] = value, start
        best = fresh
        origin.append(came)
    sizes, stop = [], count
    for came in reversed(origin):
        sizes.append(stop - came[stop])
        stop = came[stop]
    return sizes[::-1]


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What one micro-batch costs in each layer; units as in `Costs`.

    `first` and `last` are (forward, input, weight) of what comes before the first layer and after the last one.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    transfer: float = 0.0
    first: tuple[float, float, float] = (0.0, 0.0, 0.0)
    last: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def sizes(self, num_stages: int) -> list[int]:
        """The layers of each stage of the balanced cut."""
        totals = [sum(parts) for parts in zip(self.forward, self.input, self.weight)]
        return balance(totals, num_stages, sum(self.first), sum(self.last))

    def cut(self, num_stages: int) -> Costs | None:
        """The costs of the balanced cut into so many stages; None where there are fewer layers."""
        if num_stages > len(self.forward):
            return None
        sizes = self.sizes(num_stages)
        parts = {name: tuple(sum(row[own]) for own in _with_ends(sizes)) for name, row in self._rows().items()}
        starts = itertools.accumulate(sizes, initial=0)
        activations = tuple(sum(self.activation_bytes[start : start + size]) for start, size in zip(starts, sizes))
        return Costs(**parts, transfer=self.transfer, activation_bytes=activations)

    def measured(self, sizes: Sequence[int], stages: Costs) -> LayerCosts:
        """The same layers with the times of stages of so many of them; each stage's time is divided as the costs here are."""
        rows = self._rows()
        for name, row in rows.items():
            for own, seconds in zip(_with_ends(sizes), getattr(stages, name), strict=True):
                total, parts = sum(row[own]), row[own]
                row[own] = [seconds * part / total if total else seconds / len(parts) for part in parts]
        first, last = (tuple(row[end] for row in rows.values()) for end in (0, -1))
        return replace(self, first=first, last=last, **{name: tuple(row[1:-1]) for name, row in rows.items()})

    def _rows(self) -> dict[str, list[float]]:
        """Each part of the work in the order of the forward: before the first layer, in each one, after the last."""
        names = ("forward", "input", "weight")
        return {name: [self.first[part], *getattr(self, name), self.last[part]] for part, name in enumerate(names)}


def _with_ends(sizes: Sequence[int]) -> Iterator[slice]:
    """Where in such a row each stage's own costs are."""
    start = 0
    for stage, size in enumerate(sizes):
        stop = start + size + (stage == 0) + (stage == len(sizes) - 1)
        yield slice(start, stop)
        start = stop
