"""Ranks that wait for each other in different places end with an error that names the places; slow ranks do not."""

import time

import pytest
import torch
from booster_programs import batch, boost, criterion, decoder, local, sgd
from patience import patience

import phalanx as px
from phalanx.cluster import comm, deadlock, launch
from phalanx.cluster.mesh import Mesh
from phalanx.errors import CommError
from phalanx.testing import RankError, run_ranks


def timed(function):
    """What the function returns, or the text of its CommError; and the seconds it took."""
    start = time.monotonic()
    try:
        found = function()
    except CommError as error:
        found = str(error)
    return found, time.monotonic() - start


def hurry():
    """This rank looks at long waits a few times as early as it would."""
    deadlock.PATIENCE_S, deadlock.BETWEEN_LOOKS_S = deadlock.PATIENCE_S / 4, deadlock.BETWEEN_LOOKS_S / 4


def outcomes(function, world, *args):
    """What `timed` saw on every rank; where the first error came to the caller before the others' results, that alone."""
    try:
        return run_ranks(function, world, *args)
    except RankError as failure:
        return [(str(failure), 0.0)]


def skips_a_step(plan):
    model = decoder()
    booster = px.Booster(plan)
    model, _optimizer, _, stream, _ = booster.boost(model, sgd(model), criterion, (batch(step) for step in range(6)))

    def train():
        for number, rows in enumerate(stream):
            if number == 2 and booster.world.rank == 1:
                continue
            booster.step(rows)

    return timed(train)


@pytest.mark.parametrize("plan", ["zero3", pytest.param("zero0", marks=pytest.mark.slow)])
def test_a_rank_that_skips_a_step_of_a_stream_is_found(plan):
    for message, seconds in outcomes(skips_a_step, 2, plan):
        assert "ranks wait for each other" in message
        assert "rank 0: " in message
        assert "rank 1: all_reduce on axis world" in message
        assert "test_deadlock.py:" in message
        assert seconds < patience(20)


def test_a_rank_that_skips_a_step_of_a_pipeline_is_found():
    """One waits for a message, inside its backend, and the other in a collective."""
    for message, seconds in outcomes(skips_a_step, 2, "pp2"):
        assert "ranks wait for each other: rank 0: a message from rank 1 to rank 0 on axis pp (gradients" in message
        assert "rank 1: all_reduce on axis world" in message
        assert message.count("test_deadlock.py:") >= 2
        assert seconds < patience(20)


def leaves_early(plan):
    hurry()
    model = decoder()
    booster, model, _ = boost(plan, model, sgd(model))
    booster.step(local(batch()))
    if booster.world.rank == 1:
        launch.shutdown()
        time.sleep(6)  # the process stays: what ends the others is not its end
        return "left", 0.0
    return timed(lambda: booster.step(local(batch(1))))


@pytest.mark.parametrize("plan", ["zero3", "zero0"])
def test_a_rank_that_leaves_early_is_noticed(plan):
    message, seconds = outcomes(leaves_early, 2, plan)[0]
    assert "rank 0" in message
    assert seconds < patience(20)


def two_axes():
    """Four ranks: in each pair along tp one waits along dp for the rank that waits for the first along tp."""
    hurry()
    mesh = Mesh({"dp": 2, "tp": 2})
    rank = launch.world().rank
    return timed(lambda: comm.all_reduce(torch.ones(1), mesh.axis("dp" if rank in (0, 3) else "tp")))


def test_a_ring_of_waits_over_several_axes_is_found():
    for message, seconds in outcomes(two_axes, 4):
        assert "rank 0, 3: all_reduce on axis dp at" in message
        assert "rank 1, 2: all_reduce on axis tp at" in message
        assert seconds < patience(20)


def questions_in_another_order():
    hurry()
    axis = Mesh({"dp": 2}).axis("dp")
    if axis.index == 0:
        comm.agree("the color", "red", axis)  # the other one has answered nothing and reduces
    return timed(lambda: comm.all_reduce(torch.ones(1), axis))


def test_a_question_that_one_rank_never_hears_is_named():
    for message, seconds in outcomes(questions_in_another_order, 2):
        assert "agreeing on the color, which is red here" in message
        assert "all_reduce on axis dp" in message
        assert seconds < patience(20)


def straggles(plan):
    """One rank is late by more than the patience and two looks, before a new question and a plain step; the other one waits."""
    hurry()
    model = decoder()
    booster, model, _ = boost(plan, model, sgd(model))

    def train():
        for step in range(3):
            if (booster.world.rank, step) in ((1, 0), (0, 2)):
                time.sleep(deadlock.PATIENCE_S + 3 * deadlock.BETWEEN_LOOKS_S)
            booster.step(local(batch(step)))
        return "fine"

    return timed(train)[0]


@pytest.mark.parametrize("plan", ["zero3", "zero1"])
def test_a_straggler_is_waited_for(plan):
    assert run_ranks(straggles, 2, plan) == ["fine"] * 2
