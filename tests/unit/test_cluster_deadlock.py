"""Following the waits of ranks: which records mean that nobody goes on."""

import pytest
import torch.distributed as dist

from phalanx.cluster import deadlock
from phalanx.cluster.deadlock import Wait, stuck, tell

GATHER, REDUCE = "all_gather on axis dp", "all_reduce on axis world"


def store_with(**waits):
    store = dist.HashStore()
    for name, wait in waits.items():
        tell(store, int(name.removeprefix("rank")), wait)
    return store


def wait(what, ranks, gathers=0, reduces=0):
    return Wait(what, ranks, "train.py:1", {GATHER: gathers, REDUCE: reduces})


def test_two_ranks_in_operations_that_the_other_has_not_begun():
    first, second = wait(GATHER, (0, 1), gathers=5, reduces=2), wait(REDUCE, (0, 1), gathers=4, reduces=3)
    store = store_with(rank0=first, rank1=second)
    assert stuck(store, 0) == stuck(store, 1) == {0: first, 1: second}


def test_ranks_in_the_same_place_are_not_stuck():
    store = store_with(rank0=wait(GATHER, (0, 1), gathers=5), rank1=wait(GATHER, (0, 1), gathers=5))
    assert stuck(store, 0) == {}


def test_a_rank_whose_data_are_under_way_is_not_stuck():
    """Rank 0 is through with its part of the gather and reduces; rank 1 still receives."""
    ahead, behind = wait(REDUCE, (0, 1), gathers=5, reduces=3), wait(GATHER, (0, 1), gathers=5, reduces=2)
    store = store_with(rank0=ahead, rank1=behind)
    assert stuck(store, 0) == stuck(store, 1) == {}


def test_a_rank_that_does_not_wait_may_come():
    waits = {"rank0": wait(GATHER, (0, 1), gathers=5), "rank1": wait(REDUCE, (0, 1, 2), reduces=3)}
    store = store_with(**waits)
    assert stuck(store, 0) == {}
    tell(store, 2, wait("agreeing on a module", (0,)))
    assert set(stuck(store, 0)) == {0, 1, 2}
    tell(store, 2, None)
    assert stuck(store, 0) == {}


def test_a_message_that_is_under_way_keeps_nobody():
    """Rank 0 has begun to receive three messages and waits for the second, of which rank 1 has sent two."""
    sent = "a message from rank 1 to rank 0 on axis pp"
    second = Wait(sent, (1,), begun={sent: 3}, place=2)
    reduce = Wait(REDUCE, (0, 1), begun={sent: 2, REDUCE: 1})
    assert stuck(store_with(rank0=second, rank1=reduce), 0) == {}
    third = Wait(sent, (1,), begun={sent: 3}, place=3)
    assert set(stuck(store_with(rank0=third, rank1=reduce), 0)) == {0, 1}


@pytest.mark.parametrize("gathers", [4, 5])
def test_a_rank_that_has_left_comes_no_more(gathers):
    """Unless it left after the operation, whose data may still be under way."""
    store = store_with(rank0=wait(GATHER, (0, 1), gathers=5), rank1=wait("the end of its program", (), gathers=gathers))
    assert set(stuck(store, 0)) == ({0, 1} if gathers == 4 else set())


def test_places_are_told_with_their_ranks_and_not_all_of_them():
    waits = {rank: wait(f"all_gather on axis a{min(rank, 11) // 2}", (0, 1)) for rank in range(24)}
    text = deadlock._places(waits)
    assert text.startswith("rank 0, 1: all_gather on axis a0 at train.py:1; rank 2, 3: ")
    assert text.endswith("; and 2 more places")
    assert deadlock._ranks(list(range(10))) == "rank 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
