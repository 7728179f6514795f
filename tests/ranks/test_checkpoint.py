"""Checkpoints written and read by several processes."""

import os
import random
import signal
import time

import pytest
import torch
from patience import patience

from phalanx.checkpoint import agree, disk, inspect, load, save
from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.errors import CheckpointError, CommError
from phalanx.layout import Layout, Piece, split_range
from phalanx.testing import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHAPES = ((), (0,), (1,), (3,), (7,), (7, 3), (5, 7), (3, 4, 5))


def world_axis() -> Axis:
    return Mesh({"dp": launch.world().size, "pp": 1, "cp": 1, "tp": 1}).world


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{dtype}/{shape}": torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }


def pieces_of(fulls: dict[str, torch.Tensor], seed: int, rank: int, size: int) -> list[Piece]:
    """This rank's pieces under a random plan: a dim cut into boxes over some ranks, runs over the others, or replicas."""
    choose = random.Random(seed)
    pieces = []
    for name, full in fulls.items():
        runs = choose.choice([count for count in range(1, size + 1) if size % count == 0])
        parts = size // runs if full.dim() else 1
        dim, replicated = (choose.randrange(full.dim()) if full.dim() else 0), choose.random() < 0.3
        box = [(0, extent) for extent in full.shape]
        if full.dim():
            box[dim] = split_range(full.shape[dim], parts, rank // runs)
        index, count = (rank % runs, runs) if full.dim() else (rank, size)
        flat = full[tuple(slice(*edge) for edge in box)].reshape(-1)
        run = (0, len(flat)) if replicated else split_range(len(flat), count, index)
        pieces.append(Piece(name, flat[run[0] : run[1]].clone(), Layout(tuple(full.shape), tuple(box), run), not replicated or index == 0))
    return pieces


def save_under(path: str, seed: int) -> None:
    axis = world_axis()
    pieces = pieces_of(full_tensors(seed), seed, axis.index, axis.size)
    save(path, pieces, {"step": seed}, {"rank": axis.index}, axis, max_file_bytes=100)


def load_under(path: str, seed: int, plan_seed: int) -> tuple[dict, dict | None]:
    axis = world_axis()
    wanted = pieces_of(full_tensors(seed), plan_seed, axis.index, axis.size)
    blanks = [Piece(piece.name, torch.ones_like(piece.tensor), piece.layout) for piece in wanted]
    state = load(path, blanks, axis)
    for piece, filled in zip(wanted, blanks, strict=True):
        assert torch.equal(piece.tensor, filled.tensor), piece.name
    return state


@pytest.mark.parametrize(("saving", "loading", "seed"), [(2, 3, 0), (3, 2, 1), (4, 1, 2), (1, 4, 3), (4, 4, 4)])
def test_any_number_of_ranks_loads_what_any_number_saved(tmp_path, saving, loading, seed):
    path = str(tmp_path / "at")
    run_ranks(save_under, saving, path, seed)
    assert inspect.check(path) == []
    states = run_ranks(load_under, loading, path, seed, seed + 100)
    for rank, (state, local_state) in enumerate(states):
        assert state == {"step": seed}
        assert local_state == ({"rank": rank} if saving == loading else None)


def fail_on_one_rank(path: str) -> str:
    """One rank's disk is full: every rank gets the same error and the old checkpoint is still there."""
    axis = world_axis()
    if axis.index == 2:

        def full(file, view):
            raise OSError(28, "No space left on device")

        disk.write_all = full
    with pytest.raises(CheckpointError) as caught:
        save_under(path, 1)
    assert load_under(path, 0, 7)[0] == {"step": 0}
    return str(caught.value)


def test_a_failed_write_on_one_rank_is_everyones_error_and_loses_nothing(tmp_path):
    path = str(tmp_path / "at")
    run_ranks(save_under, 3, path, 0)
    errors = run_ranks(fail_on_one_rank, 3, path)
    assert len(set(errors)) == 1
    assert "rank 2: OSError: [Errno 28] No space left on device" in errors[0]
    assert os.listdir(tmp_path) == ["at"]


def load_damaged(path: str) -> str:
    axis = world_axis()
    pieces = pieces_of(full_tensors(0), 5, axis.index, axis.size)
    before = [piece.tensor.clone() for piece in pieces]
    with pytest.raises(CheckpointError) as caught:
        load(path, pieces, axis)
    assert all(torch.equal(piece.tensor, tensor) for piece, tensor in zip(pieces, before))
    return str(caught.value)


def test_damage_is_everyones_error_before_anything_changes(tmp_path):
    path = tmp_path / "at"
    run_ranks(save_under, 3, str(path), 0)
    file = path / "rank-00001-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    errors = run_ranks(load_damaged, 3, str(path))
    assert len(set(errors)) == 1
    assert "rank-00001-00001.safetensors is damaged" in errors[0]


def missing_on_one_rank(path: str) -> str:
    axis = world_axis()
    pieces = pieces_of(full_tensors(0), 5, axis.index, axis.size)
    if axis.index == 1:
        pieces.append(Piece("new.weight", torch.zeros(2), Layout.whole((2,))))
    with pytest.raises(CheckpointError) as caught:
        load(path, pieces, axis)
    return str(caught.value)


def test_what_one_rank_misses_every_rank_names(tmp_path):
    path = str(tmp_path / "at")
    run_ranks(save_under, 2, path, 0)
    errors = run_ranks(missing_on_one_rank, 2, path)
    assert errors[0] == errors[1]
    assert "rank 1: " in errors[0]
    assert "does not hold new.weight" in errors[0]


def save_different_state(path: str) -> str:
    axis = world_axis()
    with pytest.raises(CheckpointError) as caught:
        save(path, [], {"step": 3, "seed": axis.index // 2}, {}, axis)
    return str(caught.value)


def test_a_state_that_differs_between_ranks_is_refused(tmp_path):
    errors = run_ranks(save_different_state, 3, str(tmp_path / "at"))
    assert len(set(errors)) == 1
    assert "state differs between rank 0 and rank 2 in seed" in errors[0]
    assert not os.listdir(tmp_path)


def save_on_first_rank_only(path: str) -> str:
    axis = world_axis()
    agree.ALONE_S = 1.0
    with pytest.raises(CommError) as caught:
        save(path, [], {}, {}, axis) if axis.index == 0 else comm.barrier(axis)
    return str(caught.value)


def test_saving_on_one_rank_only_is_told_on_all_ranks(tmp_path):
    assert agree.ALONE_S <= 10
    start = time.monotonic()
    errors = run_ranks(save_on_first_rank_only, 3, str(tmp_path / "at"))
    assert time.monotonic() - start < patience(15)
    for error in errors:
        assert "save must be called on all ranks" in error
        assert "test_checkpoint.py" in error


def save_late(path: str, late: int) -> None:
    axis = world_axis()
    agree.ALONE_S = 0.2
    if axis.index == late:
        time.sleep(1.0)
    save(path, [], {}, {}, axis)


@pytest.mark.parametrize("late", [0, 2])
def test_one_late_rank_is_waited_for(tmp_path, late):
    run_ranks(save_late, 3, str(tmp_path / "at"), late)
    assert inspect.show(tmp_path / "at").world == 3


def save_killed(path: str, victim: int, at: int) -> None:
    """Rank `victim` kills itself at its `at`-th write."""
    axis, count = world_axis(), 0
    write_all = disk.write_all

    def write(file, view):
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(file, view)

    if axis.index == victim:
        disk.write_all = write
    save_under(path, 1)


@pytest.mark.parametrize(("victim", "at"), [(0, 3), (1, 1), (1, 9)])
def test_a_killed_rank_ends_the_save_and_the_old_checkpoint_stays(tmp_path, victim, at):
    path = str(tmp_path / "at")
    run_ranks(save_under, 2, path, 0)
    start = time.monotonic()
    with pytest.raises(CommError, match=r"SIGKILL|killed"):
        run_ranks(save_killed, 2, path, victim, at)
    assert time.monotonic() - start < patience(20)
    assert run_ranks(load_under, 2, path, 0, 3)[0][0] == {"step": 0}
    run_ranks(save_under, 2, path, 2)
    assert os.listdir(tmp_path) == ["at"]
