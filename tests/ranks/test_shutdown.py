"""Leaving the world ends every thread that could come back to Python while it ends."""

from __future__ import annotations

import gc
import pathlib
import sys
import threading

import pytest
import torch

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.testing import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for threads in /proc")


def _threads() -> list[str]:
    """Names of the threads that work for groups, and of Python's own."""
    tasks = pathlib.Path("/proc/self/task").iterdir()
    workers = [name for task in tasks if (name := (task / "comm").read_text().strip()) == "pt_gloo_runloop"]
    return workers + [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


def _leave() -> tuple[list[str], list[str]]:
    mesh = Mesh({"dp": 2})
    axes = [mesh.axis("dp"), mesh.channel(mesh.axis("dp"), "second")]
    circle: list = [mesh, axes]
    circle.append(circle)
    for axis in axes:
        comm.reduce_scatter(torch.empty(5000), torch.ones(10000), axis)
        circle.append(comm.all_reduce(torch.ones(1000), axis, wait=False))
    for pending in circle[3:]:
        pending.wait()
    del pending
    gc.disable()
    before = _threads()
    launch.shutdown()
    assert axes[0].group is None
    return before, _threads()


def test_threads_of_groups_and_watch_end_with_the_world():
    for before, after in run_ranks(_leave, 2):
        assert before.count("pt_gloo_runloop") == 4
        assert "phalanx-watch" in before
        assert after == []
