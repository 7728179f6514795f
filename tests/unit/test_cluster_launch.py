"""Where a process finds its place: environments of torchrun, Slurm and Open MPI, and what is refused."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from phalanx.cluster import launch, spawn
from phalanx.cluster.mesh import Mesh
from phalanx.errors import ConfigError, ShapeError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29501",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4,3",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "4071817217",
}  # fmt: skip


def _numbers(place: launch.Place) -> tuple[int, ...]:
    return place.rank, place.size, place.local_rank, place.local_size, place.num_nodes


def test_torchrun():
    place = launch.read_place(TORCHRUN)
    assert _numbers(place) == (5, 8, 1, 4, 2)
    assert (place.host, place.port, place.store_is_served) == ("node1", 29501, True)
    assert place.prefix != launch.read_place({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}).prefix


def test_slurm():
    place = launch.read_place(SLURM)
    assert _numbers(place) == (5, 7, 1, 3, 2)
    assert place.host == "gpu07"
    assert place.port == launch.read_place({**SLURM, "SLURM_PROCID": "0"}).port
    assert place.port != launch.read_place({**SLURM, "SLURM_JOB_ID": "813"}).port
    assert launch.read_place({**SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "1234"}).port == 1234


def test_a_slurm_batch_script_without_srun_is_one_process():
    assert launch.read_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "812"}).size == 1


def test_open_mpi():
    place = launch.read_place(OPEN_MPI)
    assert _numbers(place) == (3, 4, 3, 4, 1)
    assert place.host == "127.0.0.1"
    assert launch.read_place({**OPEN_MPI, "PMIX_NAMESPACE": "1"}).port != place.port
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR"):
        launch.read_place({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_nothing_set_is_a_single_process():
    assert _numbers(launch.read_place({"HOME": "/root"})) == (0, 1, 0, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "not WORLD_SIZE"),
        ({"MASTER_PORT": None, "MASTER_ADDR": None}, "not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"RANK": "two"}, 'RANK is "two"'),
    ],
)
def test_incomplete_environments_are_refused(change, message):
    environ = {**TORCHRUN, **change}
    with pytest.raises(ConfigError, match=message):
        launch.read_place({name: value for name, value in environ.items() if value is not None})


def test_slurm_lists():
    assert launch.expand_hosts("a[01-03,7],b,c[1-2]x") == ["a01", "a02", "a03", "a7", "b", "c1x", "c2x"]
    assert launch.expand_counts("4(x2),3") == [4, 4, 3]
    with pytest.raises(ConfigError, match="tasks per node"):
        launch.expand_counts("many")


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            launch.open_store("127.0.0.1", port, serves=True)


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "Connection refused"), ("no.such.host", "")])
def test_nobody_at_the_address_is_named_in_one_line(host, why, capfd):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=f"nobody answers at {host}:{port} after 1 s: {why}"):
            launch.open_store(host, port, serves=False, join_s=1)
    assert time.monotonic() - begun < 10
    assert capfd.readouterr() == ("", "")  # no stack of the store's own


def test_the_store_is_found_where_it_is_served_only_later():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = []
    later = threading.Timer(0.5, lambda: served.append(launch.open_store("127.0.0.1", port, serves=True)))
    later.start()
    launch.open_store("127.0.0.1", port, serves=False, join_s=20).set("key", "value")
    later.join()
    assert served[0].get("key") == b"value"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc": 0}, "0 processes"),
        ({"nproc": 1, "num_nodes": 2}, "cannot find each other"),
        ({"nproc": 1, "num_nodes": 2, "node_rank": 2, "master": "a:1"}, "machine 2 of 2"),
        ({"nproc": 1, "master": "node1"}, 'cannot read the address "node1"'),
        ({"nproc": 1, "command": ["no-such-program"]}, "no such program"),
        ({"nproc": 1, "command": []}, "no command"),
    ],
)
def test_launcher_refuses_what_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        spawn.run_processes(**{"command": [sys.executable, "-c", ""], **arguments})


def test_host_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode1 slots=4\n\nnode2   # one\n")
    assert spawn.read_hostfile(str(path)) == [spawn.Host("node1", 4), spawn.Host("node2", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=4\nnode2 gpus=4\n", 'line 2: cannot read "node2 gpus=4"'),
        ("node1 slots=0\n", "line 1"),
        ("node1\nnode1\n", "line 2: host node1 is named twice"),
        ("# nothing\n", "names no host"),
    ],
)
def test_bad_lines_of_a_host_file_are_named(tmp_path, text, message):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        spawn.read_hostfile(str(path))


def test_a_single_process_makes_no_group():
    launch.shutdown()
    assert launch.world() is launch.launch()
    assert launch.world().size == 1
    mesh = Mesh({"dp": 1, "tp": 1})
    assert mesh.world.group is None
    assert mesh.describe() == "1 rank: dp 1; rank 0 at dp 0"
    with pytest.raises(ConfigError, match="does not have 1 ranks"):
        Mesh({"dp": 2, "tp": 1})
    with pytest.raises(ShapeError, match="groups of 2"):
        mesh.split(mesh.world, 2)
    with pytest.raises(ConfigError, match="no axis"):
        mesh.axis("pp")
