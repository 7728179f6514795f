"""`phalanx run`: ranks, arguments, exit codes, and several machines played on one."""

import json
import socket
import subprocess
import sys

SCRIPT = """
import json, sys
from pathlib import Path
import phalanx as px
world = px.launch()
Path(sys.argv[1], f"rank-{world.rank}").write_text(json.dumps([world.size, world.local_rank, world.num_nodes, sys.argv[2:]]))
if "--fail" in sys.argv and world.rank == world.size - 1:
    raise ValueError("on purpose")
"""


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx.cli.main", "run", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_script_becomes_ranks_and_gets_its_own_arguments(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start("--json", "-n", "2", str(tmp_path / "script.py"), str(tmp_path), "--steps", "-n", "7")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["ok"] is True
    told = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert told == [[2, rank, 1, ["--steps", "-n", "7"]] for rank in range(2)]


def test_a_failing_rank_ends_the_command_and_its_traceback_comes_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start("-n", "2", str(tmp_path / "script.py"), str(tmp_path), "--fail")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.count("Traceback") == 1
    assert "rank 1 failed: ValueError: on purpose" in err


def test_a_host_file_plays_two_machines(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("# two machines that are one\nfirst slots=1\nsecond slots=2\n")
    options = ["--hostfile", str(tmp_path / "hosts"), "--master", f"127.0.0.1:{free_port()}"]
    processes = [start(*options, "--node-rank", str(node), str(tmp_path / "script.py"), str(tmp_path)) for node in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    told = [json.loads((tmp_path / f"rank-{rank}").read_text())[:3] for rank in range(3)]
    assert told == [[3, 0, 2], [3, 0, 2], [3, 1, 2]]
