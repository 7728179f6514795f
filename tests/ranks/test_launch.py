"""Whole jobs through the launcher: one failing rank ends all, machines join, several jobs at once, nothing stays behind."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from patience import patience

LONGEST_S = 300  # what is waited for comes much sooner, or not at all

SCRIPT = """
    import os, pathlib, sys, threading, time
    import torch
    from phalanx.cluster import comm, launch
    from phalanx.cluster.mesh import Mesh

    how, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    world = launch.launch()
    (directory / f"pid{world.rank}").write_text(str(os.getpid()))
    axis = Mesh({"dp": world.size}).axis("dp")
    total = torch.ones(1)
    comm.all_reduce(total, axis)
    if how == "wait":
        time.sleep(600)

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x
        @staticmethod
        def backward(ctx, grad):
            raise ValueError("rank two has had enough")

    def fail():
        threading.Thread(target=time.sleep, args=(600,)).start()  # keeps the process alive after its main thread
        if how == "backward":
            Step.apply(torch.ones(1, requires_grad=True)).backward()
        if how == "loader":
            class Rows(torch.utils.data.Dataset):
                def __len__(self): return 4
                def __getitem__(self, index): raise ValueError("rank two has had enough")
            list(torch.utils.data.DataLoader(Rows(), num_workers=1))
        if how == "message":
            comm.recv(torch.ones(1), axis, 0, wait=False)
        raise ValueError("rank two has had enough")

    if world.rank == 2 and how == "exit":
        os._exit(9)
    if world.rank == 2 and how != "well":
        fail()
    if how == "message":
        comm.recv(total, axis, (world.rank + 1) % world.size)
    if how == "save" and world.rank == 0:
        time.sleep(3)  # busy on its own, then comes too
    comm.all_reduce(total, axis)
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(f"rank {world.rank} of {world.size} on {world.num_nodes} has {total.item():g}\\n")
"""
LAUNCHER = """
    import sys
    from phalanx.cluster import spawn
    from phalanx.errors import PhalanxError

    options = dict(word.split("=") for word in sys.argv[2:] if "=" in word)
    words = [word for word in sys.argv[2:] if "=" not in word]
    number = {key: int(value) if value.isdigit() else value for key, value in options.items()}
    try:
        sys.exit(spawn.run_processes([sys.executable, *words], int(sys.argv[1]), **number))
    except PhalanxError as error:
        sys.exit(f"error: {error}")
"""


@pytest.fixture
def job(tmp_path):
    """Starts the launcher; whatever is left at the end is ended here."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "launcher.py").write_text(textwrap.dedent(LAUNCHER))
    started = []

    def start(nproc: int, how: str, *options: str, directory: pathlib.Path = tmp_path) -> subprocess.Popen:
        command = [sys.executable, str(tmp_path / "launcher.py"), str(nproc), str(tmp_path / "script.py"), how, str(directory), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def _pids(directory: pathlib.Path) -> list[int]:
    return [int(path.read_text()) for path in directory.glob("pid*") if path.read_text()]


def _gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _wait_for(directory: pathlib.Path, num_ranks: int) -> None:
    deadline = time.monotonic() + LONGEST_S
    while len(_pids(directory)) < num_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_job_that_ends_well(job):
    process = job(2, "well")
    out, err = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 2 on 1 has 4", "rank 1 of 2 on 1 has 4"]


@pytest.mark.parametrize(
    "how", ["save", *(pytest.param(how, marks=pytest.mark.slow) for how in ("forward", "backward", "loader", "message"))]
)
def test_one_failing_rank_ends_the_job_with_its_own_traceback(job, tmp_path, how):
    process = job(4, how)
    _wait_for(tmp_path, 4)
    begun = time.monotonic()
    _, err = process.communicate(timeout=LONGEST_S)
    assert time.monotonic() - begun < patience(20)
    assert process.returncode == 1
    assert err.count("raise ValueError") == 1, err
    assert err.rstrip().splitlines()[-1].endswith("ValueError: rank two has had enough")
    assert "rank 2 failed: ValueError: " in err
    assert _gone_within(_pids(tmp_path), patience(1))


def test_a_rank_that_dies_without_a_word_is_named(job, tmp_path):
    process = job(4, "exit")
    _, err = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 9
    assert err.rstrip().splitlines()[-1] == "rank 2 failed: ended with exit code 9"
    assert _gone_within(_pids(tmp_path), patience(1))


@pytest.mark.slow
def test_a_script_that_cannot_start_says_why_once(job, tmp_path):
    (tmp_path / "script.py").write_text("import no_such_module\n")
    process = job(2, "well")
    _, err = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 1
    assert err.count("ModuleNotFoundError: No module named 'no_such_module'") == 1


@pytest.mark.parametrize("number", [9, pytest.param(15, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killing_the_launcher_leaves_nothing(job, tmp_path, number):
    process = job(2, "wait")
    _wait_for(tmp_path, 2)
    process.send_signal(number)
    assert _gone_within(_pids(tmp_path), patience(15))
    assert process.wait(timeout=LONGEST_S) != 0


def test_three_jobs_at_once_need_no_port(job, tmp_path):
    processes = []
    for index in range(3):
        (tmp_path / str(index)).mkdir()
        processes.append(job(2, "well", directory=tmp_path / str(index)))
    for process in processes:
        out, err = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0, err
        assert out.count("has 4") == 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_taken_port_is_refused_and_free_after_the_job(job, tmp_path):
    port = _free_port()
    first = job(1, "wait", f"master=127.0.0.1:{port}")
    _wait_for(tmp_path, 1)
    second = job(1, "well", f"master=127.0.0.1:{port}")
    _, err = second.communicate(timeout=LONGEST_S)
    assert second.returncode != 0
    assert f"error: port {port} on 127.0.0.1 is taken" in err
    first.kill()
    assert _gone_within(_pids(tmp_path), patience(15))
    third = job(1, "well", f"master=127.0.0.1:{port}")
    _, err = third.communicate(timeout=LONGEST_S)
    assert third.returncode == 0, err


@pytest.mark.slow
def test_two_machines_with_different_numbers_of_ranks(job):
    port = _free_port()
    processes = [job(nproc, "well", f"master=127.0.0.1:{port}", "num_nodes=2", f"node_rank={node}") for node, nproc in enumerate((1, 2))]
    lines = []
    for process in processes:
        out, err = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0, err
        lines += out.splitlines()
    assert sorted(lines) == [f"rank {rank} of 3 on 2 has 9" for rank in range(3)]


def test_a_failure_on_one_machine_ends_the_other(job, tmp_path):
    port = _free_port()
    processes = [job(nproc, "forward", f"master=127.0.0.1:{port}", "num_nodes=2", f"node_rank={node}") for node, nproc in enumerate((2, 1))]
    _wait_for(tmp_path, 3)
    begun = time.monotonic()
    for process in processes:
        _, err = process.communicate(timeout=LONGEST_S)
        assert process.returncode != 0
        assert err.rstrip().endswith("ValueError: rank two has had enough"), err
    assert time.monotonic() - begun < patience(25)
    assert _gone_within(_pids(tmp_path), patience(1))


@pytest.mark.slow
def test_machines_that_disagree_or_do_not_come_are_named(job):
    port = _free_port()
    different = [job(1, "well", f"master=127.0.0.1:{port}", f"num_nodes={2 + node}", f"node_rank={node}", "join_s=60") for node in range(2)]
    errors = [process.communicate(timeout=LONGEST_S)[1] for process in different]
    assert all(process.returncode != 0 for process in different)
    assert any(re.search("machine . was told of . machines, machine . of", error) for error in errors), errors
    alone = job(1, "well", f"master=127.0.0.1:{_free_port()}", "num_nodes=2", "node_rank=0", "join_s=2")
    assert "error: machine 1 of 2 did not come within 2 s" in alone.communicate(timeout=LONGEST_S)[1]
    lost = job(1, "well", f"master=127.0.0.1:{_free_port()}", "num_nodes=2", "node_rank=1", "join_s=2")
    assert "error: nobody answers at 127.0.0.1" in lost.communicate(timeout=LONGEST_S)[1]


def test_torchrun_starts_the_same_script(job, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "script.py"),
        "well",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2 on 1 has 4") == 2
