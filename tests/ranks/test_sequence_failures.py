"""A rank that dies inside an exchange of cut sequences ends the job: soon, named, and with nothing left behind."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest
from patience import patience

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
    import os, pathlib, signal, sys, time
    import torch
    import phalanx as px
    from phalanx.cluster import comm, launch
    from tests.numerics import sequence_programs as programs

    plan, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    rank = launch.launch().rank
    booster, model = px.Booster(plan), programs.Transformer().double()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), programs.sum_and_count)
    booster.step(programs.own_batch(0))
    (directory / f"pid{rank}").write_text(str(os.getpid()))
    exchange, calls = comm.all_to_all, []

    def exchange_or_die(*args, **options):
        calls.append(None)
        if rank == 1 and len(calls) == 3:
            (directory / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **options)

    comm.all_to_all = exchange_or_die
    while True:
        booster.step(programs.own_batch(1))
"""
LAUNCHER = "import sys; from phalanx.cluster import spawn; sys.exit(spawn.run_processes([sys.executable, *sys.argv[2:]], int(sys.argv[1])))"


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ring3", "ulysses3"])
def test_a_rank_killed_in_an_exchange_ends_all(tmp_path, plan):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, "3", str(script), plan, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert time.time() - float((tmp_path / "died").read_text()) < patience(20)
    assert done.returncode != 0
    assert done.stderr.rstrip().splitlines()[-1] == "rank 1 failed: was killed by SIGKILL"
    assert done.stderr.count("Traceback") == 0, done.stderr  # the dead rank has none, and the others only wait for it
    for rank in (0, 2):
        assert f"rank {rank}: stopped: rank 1 failed (was killed by SIGKILL); this rank was waiting in all_to_all" in done.stderr
        assert not pathlib.Path(f"/proc/{(tmp_path / f'pid{rank}').read_text()}").exists()
