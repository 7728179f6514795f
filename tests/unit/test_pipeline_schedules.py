"""Schedules as tables: valid for any number of micro-batches, with the bubbles and peaks that their papers state."""

from dataclasses import replace

import pytest

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.check import find_faults, most_held, require_valid
from phalanx.parallel.pipeline.messages import add_messages
from phalanx.parallel.pipeline.picture import print_table, print_timeline, save_picture, svg
from phalanx.parallel.pipeline.schedules import SCHEDULES, make_table
from phalanx.parallel.pipeline.simulate import Costs, simulate
from phalanx.parallel.pipeline.table import Action, Kind, Table

NAMES = [(name, 1) for name in SCHEDULES if name != "interleaved"] + [("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_every_size_gives_a_table_that_can_be_run(name, chunks):
    for num_ranks in range(1, 6):
        for num_micro in range(1, 12):
            require_valid(make_table(name, num_ranks, num_micro, chunks))


def step(name, num_ranks, num_micro, chunks, forward, input, weight):
    table = make_table(name, num_ranks, num_micro, chunks)
    parts = table.num_chunks
    return simulate(table, Costs.equal(table.num_stages, forward / parts, input / parts, weight / parts))


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 2, 1), (1.5, 2, 0.5), (3, 2, 2)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_bubbles_are_those_of_the_closed_forms(num_ranks, costs):
    forward, input, weight = costs
    for rounds in (2, 3):
        num_micro = rounds * num_ranks
        for name, chunks, expected in (
            ("gpipe", 1, forward + input + weight),
            ("1f1b", 1, forward + input + weight),
            ("interleaved", 2, (forward + input + weight) / 2),
            ("interleaved", 3, (forward + input + weight) / 3),
            ("zb-h1", 1, forward + input - weight),
        ):
            timeline = step(name, num_ranks, num_micro, chunks, *costs)
            assert timeline.bubble_s == pytest.approx((num_ranks - 1) * expected), name


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_equal_parts_leave_the_v_shaped_schedules_half_the_bubble_of_zb_h1(num_ranks):
    for name in ("zbv", "dualpipev"):
        assert step(name, num_ranks, 3 * num_ranks, 1, 2, 2, 2).bubble_s == pytest.approx(num_ranks - 1)


@pytest.mark.parametrize("num_micro", [1, 2, 5, 12])
def test_ranks_hold_what_their_papers_say(num_micro):
    num_ranks = 4
    assert most_held(make_table("gpipe", num_ranks, num_micro)) == [num_micro] * num_ranks
    assert most_held(make_table("1f1b", num_ranks, num_micro)) == [min(num_micro, num_ranks - rank) for rank in range(num_ranks)]
    assert max(most_held(make_table("zb-h1", num_ranks, num_micro))) == min(num_micro, num_ranks)
    assert max(most_held(make_table("zbv", num_ranks, num_micro))) <= 2 * num_ranks
    if num_micro == 12:
        ahead = [2 * (num_ranks - 1 - rank) + num_ranks + 1 for rank in range(num_ranks)]
        assert most_held(make_table("interleaved", num_ranks, num_micro, 2)) == ahead
        assert simulate(make_table("1f1b", 4, 12), Costs.equal(4)).peaks == (4, 3, 2, 1)


def changed(table, rank, edit):
    rows = [list(row) for row in table.rows]
    edit(rows[rank])
    return table.with_rows(rows)


def test_the_validator_finds_what_is_wrong():
    table = make_table("1f1b", 3, 4)
    forward, message = Action(Kind.FORWARD, 1), Action(Kind.RECV_FORWARD, 1)
    assert "rank 1 does F1 0 times" in " ".join(find_faults(changed(table, 1, lambda row: row.remove(forward))))
    assert "does F1 2 times" in " ".join(find_faults(changed(table, 1, lambda row: row.append(forward))))
    assert "which receives" in " ".join(find_faults(changed(table, 1, lambda row: row.remove(message))))

    def swap_receives(row):
        first, second = row.index(Action(Kind.RECV_FORWARD, 0)), row.index(message)
        row[first], row[second] = row[second], row[first]

    assert "rank 0 sends SF to rank 1 as [RF0 RF1" in " ".join(find_faults(changed(table, 1, swap_receives)))

    def backward_too_early(row):
        row.remove(Action(Kind.FORWARD, 3))
        row.insert(row.index(Action(Kind.BACKWARD, 3)) + 1, Action(Kind.FORWARD, 3))

    assert "rank 2 waits for ever before BW3" in " ".join(find_faults(changed(table, 2, backward_too_early)))
    assert "rank 0 holds the activations of 3 micro-batches at once, and may hold 2" in find_faults(table, [2, 2, 2])
    with pytest.raises(PlanError, match="cannot be run"):
        require_valid(replace(table, num_micro=5))


def test_crossed_waits_are_a_dead_lock():
    """Rank 0 wants the first gradient back before it sends the second micro-batch, for which rank 1 waits first."""
    forward, backward = ([Action(kind, micro) for micro in range(2)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    rows = [[forward[0], backward[0], forward[1], backward[1]], [*forward, *backward]]
    stuck = add_messages(Table(name="crossed", num_ranks=2, num_micro=2).with_rows(rows))
    assert find_faults(stuck) == [
        "rank 0 waits for ever before BW0, for B0 of rank 1",
        "rank 1 waits for ever before F1, for F1 of rank 0",
    ]
    with pytest.raises(PlanError, match="waits for itself"):
        simulate(stuck, Costs.equal(2))


def test_state_actions_are_checked():
    table = make_table("1f1b", 2, 2)
    unshard, reduce = Action(Kind.UNSHARD), Action(Kind.REDUCE)
    whole = table.with_rows([[unshard, *row, reduce, Action(Kind.RESHARD)] for row in table.rows])
    assert find_faults(whole) == []
    assert "never reduces" in " ".join(find_faults(changed(whole, 0, lambda row: row.remove(reduce))))
    assert "not gathered" in " ".join(find_faults(changed(whole, 1, lambda row: row.remove(unshard))))


def test_unknown_schedules_and_chunks_are_refused():
    with pytest.raises(PlanError, match="no schedule"):
        make_table("2f2b", 2, 4)
    with pytest.raises(PlanError, match="gpipe with 3 chunks"):
        make_table("gpipe", 2, 4, 3)


def test_pictures(tmp_path):
    table = make_table("zbv", 2, 4)
    timeline = simulate(table, Costs.equal(4))
    assert print_table(table).splitlines()[0].startswith("rank 0: F0 F1 F2 F0.1 B0.1 W0.1")
    assert "RF1" in print_table(table, messages=True)
    assert print_timeline(timeline).count("|") == 4
    picture = svg([("planned", timeline), ("again", timeline)])
    assert picture.count("<title>") == 2 * len(timeline.spans) == 2 * 2 * 24
    for ending in ("svg", "png"):
        save_picture(tmp_path / f"step.{ending}", [("planned", timeline)])
        assert (tmp_path / f"step.{ending}").stat().st_size > 1000
