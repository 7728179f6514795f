"""The automatic schedule is never slower than the best known one that fits the same memory; stages are cut by cost."""

import itertools
import random

import pytest

from phalanx.errors import ConfigError, PlanError
from phalanx.log import Events
from phalanx.parallel.pipeline.balance import LayerCosts, balance
from phalanx.parallel.pipeline.check import require_valid
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.search import auto_schedule, fits, known_tables
from phalanx.parallel.pipeline.simulate import Costs, peaks, simulate
from phalanx.parallel.pipeline.trace import layer_costs_of, to_record


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
        first=(draw.uniform(0, 0.7),) * 3,
        last=(draw.uniform(0, 1.3),) * 3,
    )
    held = [max(peaks(table, cut)) for table, cut in known_tables(layers.cut, num_ranks, num_micro)]
    limits = None if draw.random() < 0.3 else [draw.uniform(0.7 * min(held), max(held))] * num_ranks
    return layers, num_ranks, num_micro, limits


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_auto_is_never_worse_than_the_best_in_random_settings(count):
    draw, shorter = random.Random(0), 0
    for _ in range(count):
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
    assert shorter > 0.3 * count  # in most settings there is something to win


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


def counted_costs(*costs, first=0.0, last=0.0):
    return LayerCosts(forward=costs, input=costs, weight=costs, activation_bytes=(1.0,) * len(costs), first=(first,) * 3, last=(last,) * 3)


def test_measured_times_of_stages_are_those_of_their_layers():
    layers = counted_costs(1.0, 3.0, 2.0, 2.0, first=1.0, last=4.0)
    stages = Costs(forward=(10.0, 8.0), input=(5.0, 16.0), weight=(0.0, 4.0))
    found = layers.measured([2, 2], stages)
    assert found.forward == (2.0, 6.0, 2.0, 2.0)
    assert found.input == (1.0, 3.0, 4.0, 4.0)
    assert (found.first, found.last) == ((2.0, 1.0, 0.0), (4.0, 8.0, 2.0))
    assert found.cut(2) == Costs(
        forward=(12.0, 6.0), input=(9.0, 12.0), weight=(1.0, 3.0), activation_bytes=(3.0, 1.0)
    )  # of three layers and one
    # Weight halves that took no time divide evenly what they take another time.
    assert found.measured([2, 2], Costs(forward=(1, 1), input=(1, 1), weight=(3.0, 1.0))).weight[:2] == (1.0, 1.0)


def test_measured_costs_move_the_cut_and_the_order():
    layers = counted_costs(1.0, 1.0, 1.0, 1.0)
    assert layers.sizes(2) == [2, 2]
    measured = layers.measured([2, 2], Costs(forward=(8.0, 2.0), input=(8.0, 2.0), weight=(1.0, 1.0)))
    assert measured.sizes(2) == [1, 3]
    measured = layers.measured([2, 2], Costs(forward=(4.0, 1.0), input=(6.0, 1.0), weight=(0.5, 3.0)))
    by_count, by_time = (auto_schedule(costs.cut, 2, 5, [4.0, 4.0], tries=10) for costs in (layers, measured))
    assert simulate(by_time, measured.cut(by_time.num_stages)).step_s < simulate(by_count, measured.cut(by_count.num_stages)).step_s


def test_a_run_says_what_its_layers_cost(tmp_path):
    """From the record of a step, from the folder of a run, and from neither."""

    class Halved:
        costs, sizes = counted_costs(1.0, 1.0, 1.0, 1.0), [2, 2]

    table = make_table("zb-h1", 2, 3)
    stages = Costs(forward=(4.0, 2.0), input=(4.0, 2.0), weight=(2.0, 2.0))
    record = to_record(table, simulate(table, stages).spans, Halved)
    assert layer_costs_of(record) == Halved.costs.measured([2, 2], stages)
    sink = Events()
    sink.open(tmp_path / "events.jsonl", "run", 0)
    sink.emit("pipeline", "trace", **record)
    sink.close()
    assert layer_costs_of(tmp_path) == layer_costs_of(str(tmp_path)) == layer_costs_of(record)
    with pytest.raises(ConfigError, match=r"holds no events\.jsonl"):
        layer_costs_of(tmp_path / "none")
    with pytest.raises(ConfigError, match="without the times of layers"):
        layer_costs_of({"spans": []})
