"""Waits in slices: work that ends just as a slice runs out is done, and work that broke is told with its own error."""

from datetime import timedelta

import pytest

from phalanx.cluster import failure
from phalanx.cluster.collectives import _ends_within
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError


class EndsLate:
    """Its first wait runs out; it is completed right after, well or broken."""

    def __init__(self, broken):
        self.broken, self.waits = broken, 0

    def wait(self, timeout=None):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.broken:
            raise RuntimeError("Connection closed by peer")

    def is_completed(self):
        return True


def test_work_that_ends_as_its_slice_runs_out_is_done(monkeypatch):
    monkeypatch.setattr(failure, "awaited", lambda seconds: None)
    axis = Axis("world", (0,), 0)
    assert _ends_within(EndsLate(broken=False), timedelta(seconds=1), "all_gather", axis)
    with pytest.raises(CommError, match="Connection closed by peer"):
        _ends_within(EndsLate(broken=True), timedelta(seconds=1), "all_gather", axis)
