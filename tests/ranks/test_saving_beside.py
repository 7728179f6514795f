"""Checkpoints that are written while the run goes on: they hold that moment, meet no collective, and are not lost in silence."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from booster_programs import batch, boost, decoder, local

from phalanx.checkpoint import beside, disk, inspect
from phalanx.cluster import deadlock
from phalanx.cluster.meeting import Meeting
from phalanx.errors import CheckpointError, ConfigError
from phalanx.testing import run_ranks


def adam(plan, seed=0):
    model = decoder(seed, dtype=torch.float32, layers=3)
    return boost(plan, model, torch.optim.AdamW(model.parameters(), lr=1e-2), clip_norm=1.0)


@contextlib.contextmanager
def held_back():
    """Saves beside the steps begin to write when the event is set."""
    gate, write = threading.Event(), beside.write

    def held(*args, **kwargs):
        assert gate.wait(60)
        write(*args, **kwargs)

    beside.write = held
    try:
        yield gate
    finally:
        beside.write = write


def saved_in_the_middle(plan, folder):
    """Whether a run taken up from a save that was written two steps later goes on as the run itself did."""
    booster, _, _ = adam(plan)
    for step in range(2):
        booster.step(local(batch(step)))
    with held_back() as gate:
        saving = booster.save(folder, wait=False)
        for step in (2, 3):
            booster.step(local(batch(step)))
        straight = booster.full_state_dict()
        assert not saving.done()
        gate.set()
        saving.wait()
    booster, _, _ = adam(plan, seed=5)
    booster.load(folder)
    for step in (2, 3):
        booster.step(local(batch(step)))
    resumed = booster.full_state_dict()
    return all(torch.equal(resumed[name], value) for name, value in straight.items())


def saved_under_each(plans, folder):
    """The plans whose saves do not hold the state of their moment, and whether one without a copy would."""
    wrong = [plan for plan in plans if not saved_in_the_middle(plan, folder / plan)]
    beside.Share.staged = lambda share: share
    return wrong, saved_in_the_middle(plans[0], folder / "shared")


@pytest.mark.parametrize("plans", [("zero0", "zero3", "tp2"), pytest.param(("zero1", "zero2+bf16", "pp2", "fsdp"), marks=pytest.mark.slow)])
def test_it_holds_the_state_of_its_moment(tmp_path, plans):
    assert run_ranks(saved_under_each, 2, plans, tmp_path) == [([], False)] * 2
    assert [inspect.check(tmp_path / plan) for plan in plans] == [[]] * len(plans)


def late_ranks(folder):
    """Ranks that are late in the step and with their files, each for the other, are no circle of waits."""
    deadlock.PATIENCE_S, deadlock.BETWEEN_LOOKS_S = 0.2, 0.1
    booster, _, _ = adam("zero1")
    booster.step(local(batch(0)))
    write_part = beside.write.__globals__["_write_part"]

    def slow(*args):
        time.sleep(1.5 * (booster.world.rank == 1))
        return write_part(*args)

    beside.write.__globals__["_write_part"] = slow
    order = []
    first = booster.save(folder / "first", wait=False, then=lambda: order.append("first"))
    time.sleep(1.2 * (booster.world.rank == 1))
    loss = booster.step(local(batch(1))).loss
    under_way = not first.done()
    booster.save(folder / "second", wait=False, then=lambda: order.append("second"))
    assert first.done()
    booster.finish_saving()
    return loss, under_way, order


def test_steps_go_on_beside_it_and_the_next_save_waits(tmp_path):
    outcomes = run_ranks(late_ranks, 2, tmp_path)
    assert len({loss for loss, _, _ in outcomes}) == 1
    assert [outcome[1:] for outcome in outcomes] == [(True, ["first", "second"])] * 2
    assert inspect.check(tmp_path / "second") == []


def full_disk(folder):
    """One rank's disk is full while the thread writes: the next call raises on all ranks, once, and the former checkpoint stays."""
    booster, _, _ = adam("zero1")
    booster.step(local(batch(0)))
    booster.save(folder)
    before = inspect.show(folder).saved_at_s
    write_all = disk.write_all
    if booster.world.rank == 1:

        def full(file, view):
            raise OSError(28, "No space left on device")

        disk.write_all = full
    called = []
    booster.save(folder, wait=False, then=lambda: called.append(1))
    booster.step(local(batch(1)))
    with pytest.raises(CheckpointError) as caught:
        booster.save(folder)
    disk.write_all = write_all
    assert inspect.show(folder).saved_at_s == before
    booster.save(folder, wait=False)
    booster.finish_saving()
    assert inspect.show(folder).saved_at_s > before
    return str(caught.value), called


def test_its_error_is_everyones_at_the_next_save(tmp_path):
    outcomes = run_ranks(full_disk, 2, tmp_path / "at")
    assert len({error for error, _ in outcomes}) == 1
    assert "rank 1: OSError: [Errno 28] No space left on device" in outcomes[0][0]
    assert all(called == [] for _, called in outcomes)


def left_by_an_error(folder):
    """A block that raises leaves a whole checkpoint, and its own error. Budgets refuse."""
    booster, _, _ = adam("zero1")
    booster.step(local(batch(0)))
    with held_back() as gate:
        try:
            with booster.saves_finished():
                saving = booster.save(folder, wait=False)
                threading.Timer(0.3, gate.set).start()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    done = saving.done()
    with pytest.raises(ConfigError, match=r"budget.*wait=True"):
        adam("gemini")[0].save(folder, wait=False)
    return done


def test_a_loop_that_fails_ends_its_save_first(tmp_path):
    assert run_ranks(left_by_an_error, 2, tmp_path / "at") == [True, True]
    assert inspect.check(tmp_path / "at") == []


def reports_of(name, rounds):
    meeting, axis = Meeting(name), adam("zero0")[0].mesh.world
    return [meeting.gather((number, axis.index), axis) for number in range(rounds)]


def asked_to_stop():
    """What each step tells where SIGTERM comes to one rank alone, and that it is over afterwards."""
    booster, _, _ = adam("zero1")
    told = []
    with booster.noticing_sigterm():
        for step in range(3):
            if (step, booster.world.rank) == (1, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            told.append(booster.step(local(batch(step))).stop_asked)
    return told, booster.step(local(batch(3))).stop_asked


def test_every_rank_learns_in_the_same_step_that_one_is_asked_to_stop():
    assert run_ranks(asked_to_stop, 2) == [([False, True, True], False)] * 2


@pytest.mark.slow
def test_a_meeting_gathers_what_each_rank_reports():
    assert run_ranks(reports_of, 3, "here", 3) == [[[(number, rank) for rank in range(3)] for number in range(3)]] * 3


PROGRAM = """
import sys, time, torch
from phalanx.checkpoint import Share, save_beside, disk
from phalanx.cluster.mesh import Axis
from phalanx.layout import Layout, Piece
write_all = disk.write_all
def slow(file, view):
    time.sleep(0.05)
    if sys.argv[2] == "full":
        raise OSError(28, "No space left on device")
    write_all(file, view)
disk.write_all = slow
save_beside(sys.argv[1], Share([Piece("a", torch.ones(5), Layout.whole((5,)))], {}, {}), Axis("world", (0,), 0))
if sys.argv[2] == "raise":
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("way", ["full", *(pytest.param(way, marks=pytest.mark.slow) for way in ("raise", "end"))])
def test_a_program_that_ends_waits_for_it_and_says_what_became_of_it(tmp_path, way):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "at"), way], capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if way == "end" else 1), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (way == "raise")
    if way == "full":
        assert "No space left" in done.stderr
        assert "was not saved" in done.stderr
        assert list(Path(tmp_path).iterdir()) == []
    else:
        assert inspect.check(tmp_path / "at") == []
