"""Waits on an accelerator are queued on its stream and never hold up the process; on the processor they are sliced."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from phalanx.cluster import collectives, comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError

AXIS = Axis("dp", (0, 1), 0)


class Work:
    """Stands for the backend's handle of an operation, and remembers how it was waited for."""

    def __init__(self, error: Exception | None = None):
        self.waits: list[tuple] = []
        self.error = error

    def wait(self, *timeout: timedelta) -> None:
        self.waits.append(timeout)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


class Group:
    """Stands for a process group: every operation is the same work."""

    def __init__(self, work: Work):
        self.work = work

    def __getattr__(self, operation: str):
        return lambda *arguments: self.work


def everything(device: str, wait: bool) -> list[comm.Pending]:
    """One of each operation; a tensor of "meta" stands for one on an accelerator."""
    half, whole = torch.empty(2, device=device), torch.empty(4, device=device)
    return [
        comm.all_reduce(whole, AXIS, wait=wait),
        comm.reduce_scatter(half, whole, AXIS, wait=wait),
        comm.reduce_scatter(half, whole.bfloat16(), AXIS, wait=wait),
        comm.all_gather(whole, half, AXIS, wait=wait),
        comm.all_to_all(whole, whole.clone(), AXIS, wait=wait),
        comm.broadcast(whole, AXIS, wait=wait),
        comm.send(whole, AXIS, 1, wait=wait),
        comm.recv(whole, AXIS, 1, wait=wait),
    ]


@pytest.mark.parametrize("wait", [True, False])
def test_waits_on_an_accelerator_have_no_time_out(monkeypatch, wait):
    work = Work()
    monkeypatch.setattr(collectives, "group_of", lambda axis: Group(work))
    for pending in everything("meta", wait):
        pending.wait()
    assert work.waits == [()] * 8


def test_waits_on_the_processor_have_one(monkeypatch):
    work = Work()
    monkeypatch.setattr(collectives, "group_of", lambda axis: Group(work))
    everything("cpu", wait=True)
    assert len(work.waits) == 8
    assert all(isinstance(wait[0], timedelta) for wait in work.waits)


def test_a_broken_wait_is_told_with_its_operation(monkeypatch):
    monkeypatch.setattr(collectives, "group_of", lambda axis: Group(Work(RuntimeError("the link is down"))))
    with pytest.raises(CommError, match=r"all_reduce on axis dp at .*: the link is down"):
        comm.all_reduce(torch.empty(4, device="meta"), AXIS)
