"""Debug mode: ranks that are about to do different things are named, with both call sites, before anything runs."""

from __future__ import annotations

import re
import time

import pytest
import torch

from phalanx.cluster import comm, debug, launch
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.errors import CommError
from phalanx.testing import RankError, run_ranks


def _axis() -> Axis:
    return Mesh({"dp": launch.world().size}).axis("dp")


def _all_kinds() -> float:
    axis = _axis()
    n, total = axis.size, torch.ones(4)
    for _ in range(3):
        comm.all_reduce(total, axis, wait=False).wait()
        comm.reduce_scatter(torch.zeros(2), torch.zeros(2 * n), axis)
        comm.all_gather(torch.zeros(2 * n), torch.zeros(2), axis)
        comm.all_to_all(torch.zeros(n * (axis.index + 1)), torch.zeros(n * (n + 1) // 2), axis, [axis.index + 1] * n, list(range(1, n + 1)))
        comm.broadcast(total, axis)
        comm.barrier(axis)
        comm.gather_objects("x" * axis.index, axis)
        pending = comm.send(total, axis, (axis.index + 1) % n, wait=False)
        comm.recv(torch.zeros(4), axis, (axis.index - 1) % n)
        pending.wait()
    return total[0].item()


def test_agreeing_ranks_get_the_same_numbers():
    assert run_ranks(_all_kinds, 3, debug=True) == [27.0] * 3


def _differ(how: str) -> str:
    axis = _axis()
    odd = axis.index == 1
    one, other = torch.ones(4), torch.ones(4)
    try:
        if how == "order" and odd:
            comm.all_reduce(other, axis)
            comm.all_reduce(one, axis)
        elif how == "operation" and odd:
            comm.broadcast(one, axis)
        elif how == "splits":
            rows = 3 if odd else 2
            comm.all_to_all(torch.zeros(4), torch.zeros(rows * 2), axis, [2, 2], [rows, rows])
        elif how == "message":
            (comm.send if odd else comm.recv)(torch.zeros(4 + odd), axis, 1 - axis.index)
        else:
            shape = 5 if how == "shape" and odd else 4
            dtype = torch.float64 if how == "dtype" and odd else torch.float32
            comm.all_reduce(torch.ones(shape, dtype=dtype), axis, op="max" if how == "op" and odd else "sum")
            comm.all_reduce(other, axis)
    except CommError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("order", "call_site differ: rank 0 all_reduce of .* at SITE; rank 1 all_reduce of .* at SITE"),
        ("operation", "operation and .*differ: rank 0 all_reduce .* at SITE; rank 1 broadcast .* at SITE"),
        (
            "shape",
            r"shape differ: rank 0 all_reduce of torch.float32\[4\] sum at SITE; rank 1 all_reduce of torch.float32\[5\] sum at SITE",
        ),
        ("dtype", "dtype differ: .*torch.float32.* at SITE; .*torch.float64"),
        ("op", r"detail differ: .*sum at SITE; .*max at SITE"),
        ("splits", "rank 1 sends 3 elements to rank 0, which expects 2; call sites SITE and SITE"),
        ("message", r"shape differ: rank 1 send of torch.float32\[5\] at SITE; rank 0 recv of torch.float32\[4\] at SITE"),
    ],
)
def test_what_differs_is_named_on_every_rank(how, message):
    pattern = re.compile(message.replace("SITE", r"\S*test_comm_debug.py:\d+"))
    for seen in run_ranks(_differ, 2, how, debug=True):  # a rank that follows quotes the one that found out
        assert pattern.search(seen), seen


def test_without_debug_swapped_collectives_go_unseen():
    assert run_ranks(_differ, 2, "order") == ["nothing"] * 2


def _stay_away() -> str:
    debug.ARRIVE_S = 1.0
    axis = _axis()
    if axis.index == 1:
        time.sleep(3)
        return "away"
    try:
        comm.all_reduce(torch.ones(1), axis)
    except CommError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(RankError) as caught:
        run_ranks(_leave_waiting, 3, debug=True)
    assert re.search(r"rank 1 did not come to all_reduce at \S*test_comm_debug.py:\d+", caught.value.trace)


def _leave_waiting() -> None:
    seen = _stay_away()
    if seen != "away":
        raise CommError(seen)
