"""A rank that learns of another's failure stops before its next collective: on a device no wait would tell it."""

import pytest
import torch

from phalanx.cluster import comm, failure
from phalanx.cluster.mesh import Mesh
from phalanx.testing import run_ranks


def _told(operation: str) -> str:
    axis = Mesh({"dp": 2}).axis("dp")
    comm.all_reduce(torch.ones(3), axis)
    told, failure.noticed = failure.noticed, lambda: failure.Failure(1, "ValueError: seven", "the traceback")
    try:
        with pytest.raises(failure.PeerError) as caught:
            getattr(comm, operation)(*[torch.ones(4)] if operation == "all_reduce" else [torch.ones(4), torch.ones(2)], axis, wait=False)
    finally:
        failure.noticed = told
    return str(caught.value)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_no_collective_begins_after_a_failure(operation):
    for text in run_ranks(_told, 2, operation):
        assert all(part in text for part in ("rank 1", "seven", f"about to {operation} on axis dp"))
