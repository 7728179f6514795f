"""Ranks on this machine from a warm server: `run_ranks(function, world)` in a fraction of a second."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.spawn
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from phalanx.cluster import failure, launch
from phalanx.cluster.server import Ended, Outcome, Request, Started, receive_message, send_message
from phalanx.cluster.spawn import how_it_ended
from phalanx.errors import CommError, ConfigError

_preload = ["torch", "torch.distributed", "phalanx.cluster.comm", "phalanx.cluster.random"]
_lock = threading.Lock()


class RankError(CommError):
    """A rank of `run_ranks` failed; `rank` is the first that did, `trace` its own traceback, `__cause__` its exception."""

    def __init__(self, found: str, *, allowed: str | None = None, remedy: str | None = None, rank: int = -1, trace: str = ""):
        super().__init__(found, allowed=allowed, remedy=remedy)
        self.rank, self.trace = rank, trace

    def __reduce__(self) -> Any:
        return _rebuild, (self.found, self.rank, self.trace)

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.trace}".rstrip()


def _rebuild(found: str, rank: int, trace: str) -> RankError:
    return RankError(found, rank=rank, trace=trace)


def preload(*modules: str) -> None:
    """Names modules that the server imports before it forks, so that ranks find them loaded. Cannot be imported: left out."""
    _preload.extend(name for name in modules if name not in _preload)


def warm(*modules: str) -> None:
    """Has the server import these and what else ranks will find loaded, while the caller does something else."""
    preload(*modules)
    with _lock:
        send_message(_server().connection, Request(b"", [], tuple(_preload), False, 0.0, list(sys.path), os.getcwd()))


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120, debug: bool = False) -> list[Any]:
    """Calls `function(*args)` on `world` processes that form a world of their own; returns the results by rank.

    Function, arguments and results must pickle: a function of a module, not a closure. One thread a rank, gloo, no network.
    Raises: RankError for the first rank that fails, dies, or is not through after `timeout_s`; all others are ended.
    """
    if world < 1:
        raise ConfigError(f"run_ranks over {world} ranks", allowed="1 or more")
    payload = _pickled(function, args)
    with _lock:
        directory = tempfile.mkdtemp(prefix="phalanx-")
        file = os.path.join(directory, "store")
        store = dist.FileStore(file, world)
        request = Request(
            payload=payload,
            environments=[_environment(rank, world, file) for rank in range(world)],
            preload=tuple(_preload),
            debug=debug,
            timeout_s=600.0,
            sys_path=list(sys.path),
            directory=os.getcwd(),
            preparation=_preparation() if b"__main__" in payload else {},
        )
        job = _Job(_server(), request, store, timeout_s)
        try:
            return job.results()
        finally:
            job.close()
            shutil.rmtree(directory, ignore_errors=True)


class _Server:
    """The server process and the socket to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.connection, theirs = socket.socketpair()
        environment = launch.child_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, local_size=1)
        command = [sys.executable, "-m", "phalanx.cluster.server", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        atexit.register(self.close)

    def is_usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        self.connection.close()
        self.process.terminate()  # no rank is running, but it may still be importing
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)


_current: _Server | None = None


def _server() -> _Server:
    global _current
    if _current is None or not _current.is_usable():
        _current = _Server()
    return _current


class _Job:
    """One run: the pipes from its ranks, and what has come through them."""

    def __init__(self, server: _Server, request: Request, store: dist.Store, timeout_s: float):
        self.size, self.timeout_s, self.store = len(request.environments), timeout_s, store
        self.server = server
        self.pids: list[int] = []
        self.ended: dict[int, int] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the job
        pipes = [os.pipe() for _ in range(self.size)]
        self.pipes = {read: (rank, bytearray()) for rank, (read, _) in enumerate(pipes)}
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        try:
            send_message(server.connection, request, [1, 2, self.stacks.fileno(), *(write for _, write in pipes)])
        finally:
            for _, write in pipes:
                os.close(write)

    def results(self) -> list[Any]:
        """Waits for all ranks; ends early at the first failure."""
        deadline: float | None = None  # the clock starts when the ranks do, not while the server still imports
        echo_until: float | None = None
        while len(self.outcomes) < self.size:
            now = time.monotonic()
            if deadline is None and self.pids:
                deadline = now + self.timeout_s
            if deadline is not None and now > deadline:
                raise self._too_late()
            if echo_until is None and any(outcome.echo for outcome in self.outcomes.values()):
                echo_until = now + 5
            if echo_until is not None and now > echo_until:
                raise self._first_failure()
            self._read(0.25)
            for rank, outcome in self.outcomes.items():
                if outcome.result is None and not outcome.echo:
                    raise self._error(rank, outcome)
        if any(outcome.echo for outcome in self.outcomes.values()):
            raise self._first_failure()
        return [pickle.loads(self.outcomes[rank].result or b"") for rank in range(self.size)]

    def close(self) -> None:
        """Ends what is left of every rank, and of the processes that it started."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while len(self.ended) < len(self.pids) and time.monotonic() < deadline and self.server.is_usable():
            self._read(0.1)
        for descriptor in self.pipes:
            os.close(descriptor)
        self.stacks.close()

    def _read(self, seconds: float) -> None:
        """Takes in what ranks and server have to say within `seconds`."""
        sources: list[Any] = [self.server.connection, *self.pipes]
        ready, _, _ = select.select(sources, [], [], seconds)
        for source in ready:
            if source is self.server.connection:
                self._hear_server()
            elif source in self.pipes:
                self._hear_rank(source)

    def _hear_rank(self, descriptor: int) -> None:
        rank, data = self.pipes[descriptor]
        part = os.read(descriptor, 2**20)
        data += part
        if not part:
            os.close(descriptor)
            del self.pipes[descriptor]
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # a rank that was killed may have written half
                self.outcomes[rank] = pickle.loads(data)

    def _hear_server(self) -> None:
        try:
            message, _ = receive_message(self.server.connection)
        except (EOFError, ConnectionError):
            self.server.process.wait(timeout=5)
            raise RankError(f"the server of the rank pool ended with exit code {self.server.process.returncode}") from None
        if isinstance(message, Started):
            self.pids = message.pids
        elif isinstance(message, Ended) and message.pid in self.pids:
            rank = self.pids.index(message.pid)
            self.ended[rank] = message.exit_code
            self._take_rest(rank)
            if rank not in self.outcomes:
                found = self._published()
                if found is not None and found.rank == rank:  # it ended from outside of what it was doing
                    self.outcomes[rank] = Outcome(rank, summary=found.summary, trace=found.traceback)
                else:
                    self.outcomes[rank] = Outcome(rank, summary=f"{how_it_ended(message.exit_code)} without a result")

    def _take_rest(self, rank: int) -> None:
        """Reads what an ended rank had written: the pipe may be held open by a process that it left behind."""
        for descriptor, (owner, _) in list(self.pipes.items()):
            while owner == rank and descriptor in self.pipes and select.select([descriptor], [], [], 0)[0]:
                self._hear_rank(descriptor)

    def _error(self, rank: int, outcome: Outcome) -> RankError:
        error = RankError(f"rank {rank} of {self.size} failed: {outcome.summary}", rank=rank, trace=outcome.trace)
        if outcome.error is not None:
            error.__cause__ = pickle.loads(outcome.error)
        return error

    def _first_failure(self) -> RankError:
        """All that is known are ranks that follow a failure: the one that was published."""
        first = self._published()
        if first is not None:
            return RankError(f"rank {first.rank} of {self.size} failed: {first.summary}", rank=first.rank, trace=first.traceback)
        rank, outcome = next((rank, outcome) for rank, outcome in self.outcomes.items() if outcome.echo)
        return self._error(rank, outcome)

    def _published(self) -> failure.Failure | None:
        key = f"phalanx/0/{failure.KEY}"
        return failure.Failure.loads(self.store.get(key)) if self.store.check([key]) else None

    def _too_late(self) -> RankError:
        """Names the ranks that are not through, with the stack of the first."""
        late = [rank for rank in range(self.size) if rank not in self.outcomes]
        traces = []
        for rank in late:
            self.stacks.seek(0, os.SEEK_END)
            start = self.stacks.tell()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
            time.sleep(0.1)
            self.stacks.seek(start)
            traces.append(f"rank {rank} was here:\n{self.stacks.read().decode(errors='replace')}")
        names = ", ".join(map(str, late))
        return RankError(f"rank {names} of {self.size} not through after {self.timeout_s:g} s", rank=late[0], trace="\n".join(traces))


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"{name} or its arguments cannot be sent to other processes: {error}", allowed="functions of a module, arguments that pickle"
        ) from error


def _preparation() -> dict[str, Any]:
    """How a rank loads the program's own file, for functions that are defined in it."""
    preparation = multiprocessing.spawn.get_preparation_data("phalanx-rank")
    preparation.pop("authkey", None)  # may not travel, and ranks have no use for it
    if "init_main_from_name" not in preparation and not os.path.isfile(preparation.get("init_main_from_path", "")):
        raise ConfigError("the function is defined in a program without a file", remedy="put it into a module")
    return preparation


def _environment(rank: int, size: int, file: str) -> dict[str, str]:
    place = launch.rank_environment(rank=rank, size=size, local_rank=rank, local_size=size, host="127.0.0.1", port=0, file=file)
    return {**place, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **launch.loopback_environment()}
