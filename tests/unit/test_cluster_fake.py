"""A thousand ranks on one process: meshes and collectives on tensors without data."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.cluster.random import Streams


@pytest.fixture
def rehearsal():
    launch.shutdown()
    yield launch.rehearse(1024, rank=777)
    launch.shutdown()


def test_mesh_of_a_thousand_ranks(rehearsal):
    mesh = Mesh({"dp": 16, "pp": 4, "cp": 2, "tp": 8})
    assert mesh.coordinates == {"dp": 12, "pp": 0, "cp": 1, "tp": 1}
    assert mesh.rank_at() == 777
    assert mesh.axis("tp").ranks == tuple(range(776, 784))
    assert mesh.axis("dp").ranks[mesh.axis("dp").index] == 777
    outer, inner = mesh.split(mesh.axis("dp", "cp"), 4)
    assert (outer.size, inner.size) == (8, 4)


def test_collectives_count_without_data(rehearsal):
    axis = Mesh({"dp": 128, "tp": 8}).axis("tp")
    with FakeTensorMode(), comm.ledger.record() as rows:
        x = torch.empty(16, 8, 64, requires_grad=True)
        y = comm.exchange(comm.copy_to(x, axis), axis, 1, 2)
        z = comm.gather_from(comm.scatter_to(y, axis, 0), axis, 0)
        comm.reduce_from(z, axis).sum().backward()
        full = torch.empty(80, dtype=torch.float8_e4m3fn)
        comm.all_gather(full, torch.empty(10, dtype=torch.float8_e4m3fn), axis, wait=False).wait()
        comm.reduce_scatter(torch.empty(10), torch.empty(80, dtype=torch.bfloat16), axis)
        comm.send(full, axis, 2)
        comm.recv(full, axis, 3)
        comm.broadcast(full, axis, 1)
        comm.barrier(axis)
        assert tuple(y.shape) == (16, 1, 512)
        assert tuple(x.grad.shape) == tuple(x.shape)
    wire = {operation: (calls, wire) for operation, _, calls, _, wire in rows}
    nbytes = 16 * 8 * 64 * 4
    assert wire["all_reduce"] == (2, 2 * 2 * nbytes * 7 // 8)
    assert wire["all_to_all"] == (2, 2 * nbytes * 7 // 8)
    assert wire["reduce_scatter"] == (1, 80 * 2 * 7 // 8)


def test_random_streams_are_left_alone(rehearsal):
    with FakeTensorMode(), Streams(0).fork("dropout", 1):
        assert torch.rand(3).shape == (3,)
