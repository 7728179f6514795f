"""The warm process behind the pool: it imports heavy modules once and forks a rank whenever asked.

Run as `python -m phalanx.cluster.server FD` with one end of a socket pair. Messages are a length and a pickle; a request
brings the descriptors its ranks use. The server forks before it ever runs a tensor operation, so no thread is lost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import spawn as python_spawn
from typing import Any, NoReturn

# How long a rank that is through keeps its connections open for others that still set theirs up.
LINGER_S = 2.0
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Request:
    """One call of `run_ranks`, or none yet, but what it will want to find loaded.

    `payload` pickles (function, args); `environments` has one mapping a rank.
    """

    payload: bytes
    environments: list[dict[str, str]]
    preload: tuple[str, ...]
    debug: bool
    timeout_s: float
    sys_path: list[str]
    directory: str
    preparation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Started:
    pids: list[int]


@dataclass(frozen=True)
class Ended:
    pid: int
    exit_code: int


@dataclass(frozen=True)
class Outcome:
    """What a rank reports: a pickled result, or an error with its traceback; `echo` where it only follows another's failure."""

    rank: int
    result: bytes | None = None
    error: bytes | None = None
    summary: str = ""
    trace: str = ""
    echo: bool = False


def send_message(connection: socket.socket, message: object, descriptors: list[int] | None = None) -> None:
    data = pickle.dumps(message)
    head = _LENGTH.pack(len(data))
    if descriptors:
        socket.send_fds(connection, [head], descriptors)
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive_message(connection: socket.socket, num_descriptors: int = 0) -> tuple[Any, list[int]]:
    """Raises: EOFError where the other end has gone."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, num_descriptors)
    head += _receive_exactly(connection, _LENGTH.size - len(head))
    return pickle.loads(_receive_exactly(connection, _LENGTH.unpack(head)[0])), list(descriptors)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def serve(connection: socket.socket) -> None:
    """Answers requests until the caller has gone; ranks still running then die with this process."""
    wake_read, wake_write = socket.socketpair()
    for end in (wake_read, wake_write):
        end.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    caller = os.getppid()
    while os.getppid() == caller:
        ready, _, _ = select.select([connection, wake_read], [], [], 2.0)
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                wake_read.recv(4096)
            for ended in _reap():
                send_message(connection, ended)
        if connection in ready:
            request, descriptors = receive_message(connection, 64)
            for name in request.preload:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            pids = [_fork_rank(request, rank, descriptors) for rank in range(len(request.environments))]
            for descriptor in descriptors:
                os.close(descriptor)
            if pids:
                send_message(connection, Started(pids))


def _reap() -> list[Ended]:
    ended: list[Ended] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(Ended(pid, os.waitstatus_to_exitcode(status)))


def _fork_rank(request: Request, rank: int, descriptors: list[int]) -> int:
    """Forks one rank. `descriptors` are stdout, stderr, the file for stacks, then one result pipe a rank."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _become(rank, descriptors)
        run_rank(request, rank, descriptors[3 + rank])
    except BaseException:
        traceback.print_exc()
    os._exit(70)


def _become(rank: int, descriptors: list[int]) -> None:
    """Turns the fresh fork into a process of its own: signals, session, output, the caller's death as its own."""
    from phalanx.cluster import launch

    os.setsid()  # a rank and all it starts can be ended together
    launch.die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    faulthandler.register(signal.SIGUSR1, file=descriptors[2], all_threads=False)
    for number, descriptor in enumerate(descriptors):
        if number != 2 and number != 3 + rank:
            os.close(descriptor)


def run_rank(request: Request, rank: int, pipe: int) -> NoReturn:
    """Runs the function in a world that is already launched, reports, and ends without waiting for anything."""
    import torch

    from phalanx.cluster import failure, launch

    code = 0
    try:
        sys.path[:] = request.sys_path
        os.chdir(request.directory)
        launch.become_rank(request.environments[rank])
        torch.set_num_threads(1)
        if request.preparation:
            python_spawn.prepare(request.preparation)
        launch.launch(backend="gloo", timeout_s=request.timeout_s, debug=request.debug)
        function, args = pickle.loads(request.payload)
        outcome = _outcome_of_result(rank, function(*args))
    except BaseException as error:
        code = 1
        failure.publish(error)
        outcome = Outcome(
            rank,
            error=_pickled_or_none(error),
            summary=failure.summary_of(error),
            trace="".join(traceback.format_exception(error)),
            echo=isinstance(error, failure.PeerError),
        )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with os.fdopen(pipe, "wb") as file, contextlib.suppress(BrokenPipeError):
        file.write(pickle.dumps(outcome))
    if code == 0:
        time.sleep(LINGER_S)  # the caller ends all ranks together; one that nobody ends has left the others waiting
    os._exit(code)


def _outcome_of_result(rank: int, result: Any) -> Outcome:
    try:
        return Outcome(rank, result=pickle.dumps(result))
    except Exception as error:
        raise TypeError(f"the result of rank {rank}, a {type(result).__name__}, does not pickle: {error}") from error


def _pickled_or_none(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def main(arguments: Mapping[int, str]) -> None:
    connection = socket.socket(fileno=int(arguments[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        serve(connection)
    os._exit(0)  # the kernel ends the ranks that are left


if __name__ == "__main__":
    from phalanx.cluster import server  # messages pickle under this name, not under __main__

    server.main(dict(enumerate(sys.argv)))
