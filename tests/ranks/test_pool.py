"""The rank pool: results by rank, and one clear error for everything that can happen to a rank."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from patience import patience

from phalanx.cluster import comm, launch, pool
from phalanx.cluster.mesh import Mesh
from phalanx.errors import CommError, ConfigError, ShapeError
from phalanx.testing import RankError, run_ranks


def _rank(offset: int) -> int:
    return launch.world().rank + offset


def test_results_come_by_rank():
    assert run_ranks(_rank, 3, 10) == [10, 11, 12]


def test_four_ranks_cost_less_than_a_second():
    run_ranks(_rank, 4, 0)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        run_ranks(_rank, 4, 0)
        times.append(time.perf_counter() - begun)
    assert sorted(times)[2] < 1.0


def _environment() -> tuple[int, bool, str]:
    return torch.get_num_threads(), "TOKENIZERS_PARALLELISM" in os.environ, os.environ["HF_HUB_OFFLINE"]


def test_ranks_run_one_thread_and_no_network():
    assert run_ranks(_environment, 2) == [(1, False, "1")] * 2


def _raise(failing: int, how: str) -> None:
    axis = Mesh({"dp": launch.world().size}).axis("dp")
    if axis.index == failing:
        if how == "raise":
            raise ShapeError("seven rows of three", allowed="none")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            return
        comm.fail("the ranks have drifted apart")
    comm.all_reduce(torch.ones(1), axis)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 2 of 4 failed: phalanx.errors.ShapeError: seven rows of three"),
        ("exit", "rank 2 of 4 failed: ended with exit code 3 without a result"),
        ("kill", "rank 2 of 4 failed: was killed by SIGKILL without a result"),
        ("fail", "rank 2 of 4 failed: phalanx.errors.CommError: the ranks have drifted apart"),
        ("leave", r"rank \d of 4 failed: .* waiting in all_reduce on axis dp at .*test_pool.py"),
    ],
)
def test_the_first_failure_is_raised_here(how, message):
    begun = time.perf_counter()
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(_raise, 4, 2, how)
    assert time.perf_counter() - begun < 15
    if how in ("raise", "fail"):
        assert caught.value.rank == 2
        assert "test_pool.py" in caught.value.trace
        assert isinstance(caught.value.__cause__, ShapeError if how == "raise" else CommError)


def _caught(failing: int) -> str:
    """What a rank that waits sees when another has failed, and goes on living."""
    axis = Mesh({"dp": launch.world().size}).axis("dp")
    try:
        if axis.index == failing:
            comm.fail("lost count")
        comm.all_reduce(torch.ones(1), axis)
    except CommError as error:
        return str(error)
    return "nothing"


def test_every_waiting_rank_names_the_failing_one():
    seen = run_ranks(_caught, 3, 1)
    assert seen[1] == "lost count."
    for rank in (0, 2):
        assert seen[rank].startswith(
            "rank 1 failed (phalanx.errors.CommError: lost count); this rank was waiting in all_reduce on axis dp at "
        )
        assert "test_pool.py" in seen[rank]


def _hang(hanging: int, directory: str) -> None:
    pathlib.Path(directory, str(launch.world().rank)).write_text(str(os.getpid()))
    if launch.world().rank == hanging:
        child = subprocess.Popen(["sleep", "600"])
        pathlib.Path(directory, "child").write_text(str(child.pid))
        time.sleep(600)


def test_a_hung_rank_is_named_with_its_place_and_nothing_stays(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2 not through after") as caught:
        run_ranks(_hang, 2, 1, str(tmp_path), timeout_s=patience(1.5))
    assert "in _hang" in caught.value.trace
    for name in ("0", "1", "child"):
        assert _gone_within(int((tmp_path / name).read_text()), patience(3))


def _closure() -> object:
    return lambda: None


def test_what_does_not_pickle_is_named():
    with pytest.raises(RankError, match="the result of rank 0, a function, does not pickle"):
        run_ranks(_closure, 1)
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ConfigError, match="over 0 ranks"):
        run_ranks(_rank, 0, 1)


class _Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("both")


def _raise_odd() -> None:
    try:
        raise KeyError("inner")
    except KeyError:
        raise _Unpicklable(1, 2) from None


def test_an_error_that_does_not_pickle_still_comes_with_its_traceback():
    with pytest.raises(RankError, match=r"_Unpicklable: both") as caught:
        run_ranks(_raise_odd, 2)
    assert "_raise_odd" in caught.value.trace


def _nested() -> list[int]:
    pool._preload[:] = ["torch"]  # a server of its own, kept light
    return run_ranks(_rank, 2, 5)


def test_ranks_may_run_ranks():
    assert run_ranks(_nested, 1) == [[5, 6]]


def _loaded(module: str) -> bool:
    return module in sys.modules


def test_what_the_server_was_warmed_with_is_loaded_in_ranks():
    assert run_ranks(_loaded, 2, "mailcap_of_nobody") == [False] * 2
    pool.warm("imaplib", "mailcap_of_nobody")  # a module of Python that nothing else here imports, and one that is nowhere
    assert run_ranks(_loaded, 2, "imaplib") == [True] * 2


def _open_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 1


def test_a_thread_left_running_does_not_keep_a_rank():
    begun = time.perf_counter()
    assert run_ranks(_open_thread, 2) == [1, 1]
    assert time.perf_counter() - begun < 5


def test_a_program_of_its_own_may_use_the_pool(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            from phalanx.cluster.pool import run_ranks
            from phalanx.cluster import launch

            def square():
                return launch.world().rank ** 2

            if __name__ == "__main__":
                print(run_ranks(square, 3))
            """
        )
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[0, 1, 4]\n", done.stderr
    piped = subprocess.run([sys.executable, "-"], input=program.read_text(), capture_output=True, text=True, timeout=300)
    assert "program without a file" in piped.stderr


def test_ranks_die_with_their_caller(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, time
            from phalanx.cluster.pool import run_ranks
            from phalanx.cluster import launch

            def wait():
                pathlib.Path({str(tmp_path)!r}, str(launch.world().rank)).write_text(str(os.getpid()))
                time.sleep(600)

            if __name__ == "__main__":
                run_ranks(wait, 2)
            """
        )
    )
    caller = subprocess.Popen([sys.executable, str(program)])
    deadline = time.monotonic() + 300
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    caller.kill()
    caller.wait()
    for name in "01":
        assert _gone_within(int((tmp_path / name).read_text()), patience(15))


def _gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
