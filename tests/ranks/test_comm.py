"""Collectives on gloo ranks against what one process computes."""

import os

import torch

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.testing import run_ranks


def _sum(n):
    world = launch.world()
    mesh = Mesh({"dp": world.size})
    t = torch.arange(n, dtype=torch.float64) * (world.rank + 1)
    comm.all_reduce(t, mesh.axis("dp"))
    full = torch.arange(n * world.size, dtype=torch.float32) * (world.rank + 1)
    out = torch.empty(n)
    comm.reduce_scatter(out, full, mesh.axis("dp"))
    g = torch.empty(n * world.size)
    comm.all_gather(g, out, mesh.axis("dp"))
    return world.rank, t, g, comm.gather_objects({"r": world.rank}, mesh.axis("dp"))


def test_all_reduce():
    for rank, (r, t, g, o) in enumerate(run_ranks(_sum, 4, 5)):
        assert r == rank
        assert torch.equal(t, torch.arange(5, dtype=torch.float64) * 10)
        assert torch.equal(g, torch.arange(20.0) * 10)
        assert o == [{"r": i} for i in range(4)]
