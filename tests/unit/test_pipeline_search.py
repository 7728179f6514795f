"""The automatic schedule is never slower than the best known one that fits the same memory; stages are cut by cost."""

import itertools
import random

import pytest

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.balance import LayerCosts, balance
from phalanx.parallel.pipeline.check import require_valid
from phalanx.parallel.pipeline.search import auto_schedule, fits, known_tables
from phalanx.parallel.pipeline.simulate import peaks, simulate


def random_setting(draw):
    num_ranks = draw.randint(2, 4)
    num_micro, num_layers = draw.randint(1, 2 * num_ranks), draw.randint(num_ranks, 4 * num_ranks)
    row = lambda least, most: tuple(draw.uniform(least, most) for _ in range(num_layers))  # noqa: E731
    layers = LayerCosts(
        forward=row(0.5, 2),
        input=row(0.5, 2.5),
        weight=row(0.2, 2),
        activation_bytes=row(0.5, 2),
        transfer=draw.choice([0, 0.1, 0.5]),
        ends=(draw.uniform(0, 2), draw.uniform(0, 4)),
    )
    held = [max(peaks(table, cut)) for table, cut in known_tables(layers.cut, num_ranks, num_micro)]
    limits = None if draw.random() < 0.3 else [draw.uniform(0.7 * min(held), max(held))] * num_ranks
    return layers, num_ranks, num_micro, limits


def test_auto_is_never_worse_than_the_best_in_200_random_settings():
    draw, shorter = random.Random(0), 0
    for _ in range(200):
        layers, num_ranks, num_micro, limits = random_setting(draw)
        known = [
            simulate(table, cut).step_s for table, cut in known_tables(layers.cut, num_ranks, num_micro) if fits(peaks(table, cut), limits)
        ]
        try:
            table = auto_schedule(layers.cut, num_ranks, num_micro, limits, tries=10)
        except PlanError:
            assert not known
            continue
        require_valid(table)
        timeline = simulate(table, layers.cut(table.num_stages))
        assert fits(timeline.peaks, limits)
        if known:
            assert timeline.step_s <= min(known) * (1 + 1e-12)
            shorter += timeline.step_s < 0.999 * min(known)
    assert shorter > 60  # in most settings there is something to win


def test_too_little_memory_is_refused_with_what_would_do():
    layers = LayerCosts(forward=(1.0,) * 4, input=(1.0,) * 4, weight=(1.0,) * 4, activation_bytes=(10.0,) * 4)
    with pytest.raises(PlanError, match="at most 15 bytes"):
        auto_schedule(layers.cut, 2, 4, [15.0, 15.0])


def test_balance_is_the_best_of_all_cuts():
    draw = random.Random(1)
    for _ in range(60):
        count, stages = draw.randint(2, 8), draw.randint(2, 4)
        if stages > count:
            continue
        costs, first, last = [draw.randint(1, 9) for _ in range(count)], draw.randint(0, 9), draw.randint(0, 9)

        def dearest(sizes, costs=costs, first=first, last=last):
            ends = list(itertools.accumulate(sizes))
            parts = [sum(costs[stop - size : stop]) for size, stop in zip(sizes, ends)]
            parts[0] += first
            parts[-1] += last
            return max(parts)

        every = [sizes for sizes in itertools.product(range(1, count + 1), repeat=stages) if sum(sizes) == count]
        assert dearest(balance(costs, stages, first, last)) == min(map(dearest, every))


def test_layers_that_do_not_divide():
    assert sorted(balance([1] * 7, 3)) == [2, 2, 3]
    assert balance([1] * 10, 4, first=0.5, last=2) == [3, 3, 3, 1]
    with pytest.raises(PlanError, match="3 stages for 2 layers"):
        balance([1, 1], 3)
