"""Cuts a row of layers into stages of equal cost, as nearly as whole layers allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What one micro-batch costs in each layer, and before the first and after the last one; units as in `Costs`."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    transfer: float = 0.0
    ends: tuple[float, float] = (0.0, 0.0)  # seconds of forward, input and weight together, a third each

    def cut(self, num_stages: int) -> Costs | None:
        """The costs of the balanced cut into so many stages; None where there are fewer layers."""
        if num_stages > len(self.forward):
            return None
        totals = [sum(parts) for parts in zip(self.forward, self.input, self.weight)]
        sizes = balance(totals, num_stages, *self.ends)
        parts = {name: self._sums(name, sizes) for name in ("forward", "input", "weight")}
        activations = self._sums("activation_bytes", sizes, ends=False)
        return Costs(**parts, transfer=self.transfer, activation_bytes=activations)

    def _sums(self, name: str, sizes: Sequence[int], ends: bool = True) -> tuple[float, ...]:
        values, found, start = getattr(self, name), [], 0
        for size in sizes:
            found.append(sum(values[start : start + size]))
            start += size
        if ends:
            found[0] += self.ends[0] / 3
            found[-1] += self.ends[1] / 3
        return tuple(found)
