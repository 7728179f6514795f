"""Ranks forked from a warm process, in a network namespace of their own, so that the loopback counter holds their bytes alone."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def enter_private_network() -> bool:
    """Leaves the machine's network for one that holds this process and its children only; False where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = struct.unpack("16sh", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh", b"lo", 0))[:18])[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_forked(function: Callable[[int], dict], world: int, timeout_s: float) -> dict:
    """Runs `function(rank)` in `world` forked processes; returns `{"private": bool, "ranks": [...]}` or `{"error": text}`."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        keeper = os.fork()
        if keeper == 0:
            _exit_after(lambda: _keep(function, world, timeout_s, Path(folder)))
        os.waitpid(keeper, 0)
        return _collect(Path(folder), world)


def _keep(function: Callable[[int], dict], world: int, timeout_s: float, folder: Path) -> None:
    """Forks the ranks, waits for them, and ends those left over after a failure or at the time limit."""
    private = enter_private_network()
    (folder / "private").write_text(json.dumps(private))
    port = free_port()
    running = set()
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _exit_after(lambda rank=rank: _work(function, rank, world, port, folder))
        running.add(child)
    deadline = time.monotonic() + timeout_s
    failed = False
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                running.discard(child)
                failed |= status != 0
        if running and (failed or time.monotonic() > deadline):
            time.sleep(1)  # lets the others write down what they saw
            for child in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            failed, deadline = False, float("inf")
        time.sleep(0.02)


def _work(function: Callable[[int], dict], rank: int, world: int, port: int, folder: Path) -> None:
    output = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    (folder / f"rank{rank}.json").write_text(json.dumps(function(rank)))


def _exit_after(function: Callable[[], None]) -> None:
    """Ends this forked process with the function, without the parent's own clean-up running twice."""
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _collect(folder: Path, world: int) -> dict:
    results = [folder / f"rank{rank}.json" for rank in range(world)]
    if all(path.exists() and path.stat().st_size for path in results):
        private = json.loads((folder / "private").read_text())
        return {"private": private, "ranks": [json.loads(path.read_text()) for path in results]}
    outputs = [path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("output*"))]
    return {"error": "\n".join(outputs).strip() or "the ranks left nothing"}
