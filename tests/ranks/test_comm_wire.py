"""The ledger's bytes against the counter of the loopback device, in a network namespace of its own."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.testing import run_ranks

COUNT = 3 * 2**18  # float32: 3 MiB, so that headers do not matter
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")


def _sent_bytes() -> int:
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise OSError("no loopback device")


def measure() -> dict[str, tuple[int, int]]:
    """For each operation: the ledger's bytes of this rank, and those that all ranks together put on the wire."""
    axis = Mesh({"dp": launch.world().size}).axis("dp")
    n, index = axis.size, axis.index
    full, part = torch.ones(COUNT), torch.ones(COUNT // n)
    calls = {
        "all_reduce": lambda: comm.all_reduce(full, axis),
        "reduce_scatter": lambda: comm.reduce_scatter(part, full, axis),
        "all_gather": lambda: comm.all_gather(full, part, axis),
        "all_to_all": lambda: comm.all_to_all(torch.empty_like(full), full, axis),
        "broadcast": lambda: comm.broadcast(full, axis),
        "send": lambda: comm.send(full, axis, 1) if index == 0 else comm.recv(full, axis, 0) if index == 1 else None,
    }
    seen = {}
    for name in OPERATIONS:
        calls[name]()
        sent = []
        for _ in range(3):
            comm.barrier(axis)
            before = _sent_bytes()
            comm.barrier(axis)
            with comm.ledger.record() as rows:
                calls[name]()
            comm.barrier(axis)
            comm.barrier(axis)
            sent.append(_sent_bytes() - before)
        seen[name] = (sum(row[4] for row in rows), min(sent))  # a loaded machine may send a packet again
    return seen


def main() -> None:
    print(json.dumps({n: run_ranks(measure, n) for n in (2, 3, 4)}))


@pytest.mark.skipif(shutil.which("unshare") is None or shutil.which("ip") is None, reason="needs the tools unshare and ip")
def test_ledger_equals_the_loopback_counter():
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("this system does not allow network namespaces")
    command = f"ip link set lo up && exec {sys.executable} {__file__}"
    done = subprocess.run(["unshare", "-n", "sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for n, ranks in json.loads(done.stdout).items():
        for name in OPERATIONS:
            counted = sum(rank[name][0] for rank in ranks)
            sent = ranks[0][name][1]
            assert counted == pytest.approx(sent, rel=0.01), f"{name} on {n} ranks: counted {counted}, sent {sent}"


if __name__ == "__main__":
    main()
