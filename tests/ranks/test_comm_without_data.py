"""A rank may try a pass out by itself: tensors without data are neither sent nor counted."""

import torch
from torch._subclasses import FakeTensorMode

import phalanx as px
from phalanx.cluster import comm
from phalanx.cluster.mesh import make_axis
from phalanx.testing import run_ranks


def every_collective_on_one_rank():
    world = px.launch()
    axis = make_axis("tp", [0, 1], world.rank)
    before = comm.ledger.total_wire_bytes()
    if world.rank == 0:  # the other rank joins none of these
        with FakeTensorMode():
            one, two = torch.ones(3), torch.ones(6)
            comm.all_reduce(one, axis)
            comm.reduce_scatter(one, two, axis)
            comm.all_gather(two, one, axis)
            comm.all_to_all(two, two.clone(), axis)
            comm.broadcast(one, axis)
            comm.send(one, axis, 1)
            comm.recv(one, axis, 1)
    assert comm.ledger.total_wire_bytes() == before
    total = torch.ones(3)
    comm.all_reduce(total, axis)
    return total.tolist()


def test_tensors_without_data_stay_here():
    assert run_ranks(every_collective_on_one_rank, 2, timeout_s=20) == [[2.0, 2.0, 2.0]] * 2
