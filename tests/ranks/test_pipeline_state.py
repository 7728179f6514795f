"""When a stage's state moves: once per micro-batch layer by layer, or once per step on the word of the table; counted on the wire."""

from dataclasses import replace

import pytest
from booster_programs import TOLERANCE, batch, boost, decoder, plain_step, sgd, worst
from test_pipeline import rows_of

from phalanx.cluster import comm
from phalanx.memory.stream import ParameterStream
from phalanx.parallel.pipeline.check import find_faults
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.state import add_state
from phalanx.plan import Plan
from phalanx.testing import RankError, run_ranks

MICRO, PASSES = 3, 2


def plan_of(text, keeps):
    return replace(Plan.parse(text), pp_keep=keeps)


def step_counted(text, keeps):
    """The gradients of a second step, and what moved over the data axis in it before the ranks agreed on its numbers."""
    model = decoder(tied=True)
    booster, model, _ = boost(plan_of(text, keeps), model, sgd(model))
    axis = booster.mesh.axis("dp")
    booster.step(rows_of(batch(1), axis))
    with comm.ledger.record() as rows:
        booster.forward_backward(rows_of(batch(2), axis))
        gradients = booster.gradients()
    moved = {operation: (calls, size) for operation, name, calls, size, _ in rows if name == booster.mesh.axis("dp", "cp").name}
    engine = booster.trainings[0].engine
    streamed = [chunk for unit in engine.units for chunk in unit.chunks if not unit.stays]
    held = [chunk.name for chunk in streamed if chunk.is_gathered]
    sizes = {"shards": sum(chunk.shard_elements * 8 for chunk in streamed), "gradients": sum(c.num_elements * 8 for c in engine.chunks)}
    return gradients, moved, len(streamed), len(engine.chunks), sizes, held


@pytest.fixture(scope="module")
def expected():
    model = decoder(tied=True)
    optimizer = sgd(model)
    plain_step(model, optimizer, [batch(1)])
    return plain_step(model, optimizer, [batch(2)])[1]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=SLOW), "zb-h1", pytest.param("zbv", marks=SLOW)])
def test_a_stage_that_keeps_its_state_gathers_and_reduces_once_per_step(schedule, expected):
    text = f"zero3+pp2+{schedule}+micro{MICRO}+acc{PASSES}"
    for gradients, moved, num_streamed, num_chunks, sizes, held in run_ranks(step_counted, 4, text, True):
        assert worst({name: gradients[name] for name in expected}, expected) < TOLERANCE
        assert moved["all_gather"] == (num_streamed, sizes["shards"])
        assert moved["reduce_scatter"] == (num_chunks, sizes["gradients"])
        assert held == []


def test_a_stage_that_does_not_gathers_twice_and_reduces_once_in_every_micro_batch(expected):
    text = f"zero3+pp2+micro{MICRO}+acc{PASSES}"
    for gradients, moved, num_streamed, num_chunks, sizes, _ in run_ranks(step_counted, 4, text, False):
        assert worst({name: gradients[name] for name in expected}, expected) < TOLERANCE
        rounds = MICRO * PASSES
        assert (2 * num_streamed - 1) * rounds <= moved["all_gather"][0] <= 2 * num_streamed * rounds
        assert moved["reduce_scatter"] == (num_chunks * rounds, sizes["gradients"] * rounds)


def test_gradients_alone_are_kept_where_parameters_are_whole(expected):
    for gradients, moved, _, num_chunks, sizes, _ in run_ranks(step_counted, 4, f"zero2+pp2+micro{MICRO}+acc{PASSES}", True):
        assert worst({name: gradients[name] for name in expected}, expected) < TOLERANCE
        assert "all_gather" not in moved
        assert moved["reduce_scatter"] == (num_chunks, sizes["gradients"])


@pytest.mark.parametrize("zero", ["zero0", pytest.param("zero1", marks=SLOW)])
def test_whole_gradients_are_reduced_once_on_the_word_of_the_table(zero, expected):
    operation = "all_reduce" if zero == "zero0" else "reduce_scatter"
    for gradients, moved, _, num_chunks, sizes, _ in run_ranks(step_counted, 4, f"{zero}+pp2+micro{MICRO}+acc{PASSES}", False):
        assert worst({name: gradients[name] for name in expected}, expected) < TOLERANCE
        assert moved[operation] == (num_chunks, sizes["gradients"])


def without_gathering(rows):
    """A fault on purpose: the table's word to gather is not heard."""
    ParameterStream.keep = lambda self, part, chunks: self.kept.update({part: list(chunks)})
    ParameterStream._fetch = lambda self, index, following: None
    model = decoder(tied=True)
    booster, model, _ = boost(plan_of("zero3+pp2", True), model, sgd(model))
    booster.trainings[0].engine.stream.unwatched = set()  # a watch over the first pass would find the reads, and gather
    return booster.forward_backward(rows_of(rows, booster.mesh.axis("dp"))).loss


def test_parameters_that_were_not_gathered_spoil_the_loss():
    with pytest.raises(RankError):  # the next stage finds NaN in what it receives
        run_ranks(without_gathering, 4, batch(1))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"])
def test_every_table_with_state_can_be_run(name):
    table = make_table(name, 3, 4, 2 if name == "interleaved" else 1)
    for gathers, reduces in ((True, True), (False, True), (False, False)):
        found = add_state(table, gathers=gathers, reduces=reduces)
        assert find_faults(found) == []
        for row in found.rows:
            kinds = [str(action.kind) for action in row]
            assert [kinds.count(kind) for kind in "URG"] == [gathers * table.num_chunks] * 2 + [reduces * table.num_chunks]


def test_plans_in_which_nothing_could_be_kept_are_refused():
    assert "pp_keep with zero1" in str(plan_of("zero1+pp2", True).check()[0])
    assert "pp_keep without pp" in str(plan_of("zero3", True).check()[0])
    assert plan_of("zero2+pp2", True).check() == []
    assert Plan.from_table({"zero": 3, "pp": 2, "pp_keep": True}) == plan_of("zero3+pp2", True)
