"""Runs a command as the ranks of this machine: the engine behind `phalanx run`.

The launcher serves the store through which ranks meet. The first rank that fails ends all; its traceback is the last thing
printed, once. Ranks die with the launcher, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import torch.distributed as dist

from phalanx.cluster import failure, launch
from phalanx.cluster.stopping import STOPPED
from phalanx.errors import ConfigError

POLL_S = 0.1
# After the first failure: for the others to leave by themselves, then from SIGTERM to SIGKILL.
LEAVE_S, TERMINATE_S = 6.0, 3.0
# After SIGTERM, for ranks that notice it to end their step and to save; whoever sent it sets the limit that counts.
SAVE_S = 120.0
# A traceback of a process that still lives after this long was only logged, and is shown like any other line.
LOGGED_AFTER_S = 3.0


@dataclass(frozen=True)
class Host:
    """One line of a host file."""

    name: str
    slots: int


class RankProcess:
    """One rank: its process, and its error output, of which a traceback is held back until it is known whose is first."""

    def __init__(self, rank: int, command: Sequence[str], environment: dict[str, str], show: Callable[[str], None]):
        self.rank = rank
        self._show = show
        self._held: list[str] = []
        self._held_since = 0.0
        self._lock = threading.Lock()
        self.process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=launch.die_with_parent
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        return self.process.poll()

    def ask(self, number: int) -> None:
        """Sends a signal to the rank alone, which may still need what it started."""
        self.process.send_signal(number)

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and all it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def take_traceback(self) -> str:
        """What was held back; waits for the last lines of a process that has ended."""
        if self.exit_code() is not None:
            self._reader.join(timeout=2)
        with self._lock:
            text, self._held = "".join(self._held), []
        return text

    def show_logged(self, now: float) -> None:
        """Lets go of a traceback that did not end the process."""
        with self._lock:
            if not self._held or now - self._held_since < LOGGED_AFTER_S or self.exit_code() is not None:
                return
            lines, self._held = self._held, []
        for line in lines:
            self._show(line)

    def _read(self, stream: IO[bytes]) -> None:
        for raw in stream:
            line = raw.decode(errors="replace")
            with self._lock:
                if self._held or line.startswith("Traceback (most recent call last)"):
                    self._held_since = self._held_since if self._held else time.monotonic()
                    self._held.append(line)
                    continue
            self._show(line)


@dataclass(frozen=True)
class _Nodes:
    """All launchers of the job: the ranks of this one, and the store they share."""

    store: dist.TCPStore
    host: str
    sizes: list[int]
    node: int
    first_rank: int

    @property
    def world_size(self) -> int:
        return sum(self.sizes)


def run_processes(
    command: Sequence[str], nproc: int, *, num_nodes: int = 1, node_rank: int = 0, master: str | None = None, join_s: float = launch.JOIN_S
) -> int:
    """Runs `command` as `nproc` ranks here, of `num_nodes` machines that each run this, until all end; returns the exit code.

    `master` is "host:port" of node 0, needed with several machines; alone, a free port is taken.
    Raises: ConfigError for numbers that cannot be, a port that is taken, machines that do not come or disagree.
    """
    _check(command, nproc, num_nodes, node_rank, master)
    nodes = _join(nproc, num_nodes, node_rank, master, join_s)
    directory = tempfile.mkdtemp(prefix="phalanx-")
    file = os.path.join(directory, "store") if num_nodes == 1 else ""
    meeting = dist.FileStore(file, nproc + 1) if file else nodes.store
    ranks: list[RankProcess] = []
    try:
        with _termination_raised():
            for local_rank in range(nproc):
                ranks += [_start(command, nodes, local_rank, file)]
            code = _watch(ranks, nodes, dist.PrefixStore("phalanx/0", meeting))
            _wait_for_nodes(nodes)
            return code
    except KeyboardInterrupt:
        _end(ranks, first_signal=signal.SIGINT)
        return 130
    except _Terminated:
        return _stop(ranks)
    finally:
        _end(ranks)
        shutil.rmtree(directory, ignore_errors=True)


def read_hostfile(path: str) -> list[Host]:
    """The machines of a host file: one "name slots=N" a line, # starts a comment.

    Raises: ConfigError with file, line and what is wrong there.
    """
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the host file {path}: {error.strerror}") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 and words[1].startswith("slots=") else "1" if len(words) == 1 else ""
        if not slots.isdigit() or int(slots) < 1:
            raise ConfigError(
                f'{path}, line {number}: cannot read "{line.strip()}"', allowed="a host name, then slots=N", remedy="node1 slots=8"
            )
        if words[0] in [host.name for host in hosts]:
            raise ConfigError(f"{path}, line {number}: host {words[0]} is named twice", remedy="one line with all its slots")
        hosts.append(Host(words[0], int(slots)))
    if not hosts:
        raise ConfigError(f"the host file {path} names no host", remedy="node1 slots=8")
    return hosts


def _check(command: Sequence[str], nproc: int, num_nodes: int, node_rank: int, master: str | None) -> None:
    if not command:
        raise ConfigError("there is no command to run")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"cannot run {command[0]}: there is no such program")
    if nproc < 1 or num_nodes < 1:
        raise ConfigError(f"{nproc} processes on each of {num_nodes} machines", allowed="at least one of both")
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"this is machine {node_rank} of {num_nodes}", allowed=f"0 to {num_nodes - 1}")
    if num_nodes > 1 and master is None:
        raise ConfigError(f"{num_nodes} machines cannot find each other", remedy="give all of them host:port of machine 0")


def _address(master: str | None) -> tuple[str, int]:
    host, _, port = (master or "127.0.0.1:0").rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'cannot read the address "{master}"', allowed="host:port", remedy="node1:29500")
    return host, int(port)


def _join(nproc: int, num_nodes: int, node: int, master: str | None, join_s: float) -> _Nodes:
    """Meets the launchers of the other machines and compares what they were told."""
    host, port = _address(master)
    deadline = time.monotonic() + join_s
    store = launch.open_store(host, port, serves=node == 0, join_s=join_s)
    if store.add(f"nodes/{node}/joined", 1) > 1:
        raise ConfigError(f"machine {node} has joined twice", remedy="a different node rank on every machine")
    store.set(f"nodes/{node}", json.dumps({"num_nodes": num_nodes, "nproc": nproc}))
    sizes: list[int] = []
    for other in range(num_nodes):
        while not store.check([f"nodes/{other}"]):
            if time.monotonic() > deadline:
                missing = [str(index) for index in range(num_nodes) if not store.check([f"nodes/{index}"])]
                raise ConfigError(
                    f"machine {', '.join(missing)} of {num_nodes} did not come within {join_s:g} s", remedy="start it with the same address"
                )
            time.sleep(0.05)
        told = json.loads(store.get(f"nodes/{other}"))
        if told["num_nodes"] != num_nodes:
            raise ConfigError(
                f"machine {node} was told of {num_nodes} machines, machine {other} of {told['num_nodes']}",
                allowed="the same number everywhere",
            )
        sizes.append(told["nproc"])
    return _Nodes(store, host, sizes, node, sum(sizes[:node]))


def _start(command: Sequence[str], nodes: _Nodes, local_rank: int, file: str) -> RankProcess:
    rank = nodes.first_rank + local_rank
    place = launch.rank_environment(
        rank=rank, size=nodes.world_size, local_rank=local_rank, local_size=nodes.sizes[nodes.node], node=nodes.node,
        num_nodes=len(nodes.sizes), host=nodes.host, port=nodes.store.port, file=file,
    )  # fmt: skip
    if file:
        place |= launch.loopback_environment()
    environment = launch.child_environment({"PYTHONUNBUFFERED": "1", **place}, local_size=nodes.sizes[nodes.node])
    prefix = f"[rank {rank}] " if rank else ""
    return RankProcess(rank, command, environment, lambda line: print(prefix + line, end="", file=sys.stderr, flush=True))


def _watch(ranks: list[RankProcess], nodes: _Nodes, store: dist.Store) -> int:
    """Waits until all ranks have ended well, or one has failed anywhere; then ends the rest and tells why."""
    while True:
        codes = [rank.exit_code() for rank in ranks]
        if _published(store) is not None or any(code not in (None, 0, STOPPED) for code in codes):
            return _finish_failed(ranks, store)
        if None not in codes:
            return STOPPED if STOPPED in codes else 0
        now = time.monotonic()
        for rank in ranks:
            rank.show_logged(now)
        time.sleep(POLL_S)


def _finish_failed(ranks: list[RankProcess], store: dist.Store) -> int:
    first = _first_failure(ranks, store)
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline and any(rank.exit_code() is None for rank in ranks):
        time.sleep(POLL_S)
    codes = {rank.rank: rank.exit_code() for rank in ranks}  # before those still alive are ended from here
    _end(ranks)
    trace, code = first.traceback, codes.get(first.rank) or 1
    for rank in ranks:
        if rank.rank == first.rank:
            trace = rank.take_traceback() or trace
    print(f"rank {first.rank} failed: {first.summary}\n{trace}".rstrip(), file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _first_failure(ranks: list[RankProcess], store: dist.Store) -> failure.Failure:
    """The published failure; where a rank ended without a word, the launcher publishes for it, so that all others know."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        published = _published(store)
        if published is not None:
            return published
        time.sleep(0.02)
    silent = next(rank for rank in ranks if rank.exit_code())
    mine = failure.Failure(silent.rank, how_it_ended(silent.exit_code() or 0), "")
    with contextlib.suppress(RuntimeError):
        mine = failure.Failure.loads(store.compare_set(failure.KEY, "", mine.dumps()))
    return mine


def _published(store: dist.Store) -> failure.Failure | None:
    try:
        return failure.Failure.loads(store.get(failure.KEY)) if store.check([failure.KEY]) else None
    except RuntimeError as error:
        return failure.Failure(0, f"the launcher of machine 0 has gone: {str(error).splitlines()[0]}", "")


def how_it_ended(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}"


def _end(ranks: list[RankProcess], first_signal: signal.Signals = signal.SIGTERM) -> None:
    """Ends all ranks and what they started: asked first, then killed."""
    alive = [rank for rank in ranks if rank.exit_code() is None]
    for rank in alive:
        rank.signal(first_signal)
    _await_end(alive, TERMINATE_S)
    for rank in ranks:
        rank.signal(signal.SIGKILL)
        rank.process.wait()


def _stop(ranks: list[RankProcess]) -> int:
    """Hands SIGTERM on, gives ranks that notice it time to save, and returns the exit code."""
    for rank in ranks:
        rank.ask(signal.SIGTERM)
    _await_end(ranks, SAVE_S)
    for rank in ranks:
        print(rank.take_traceback(), end="", file=sys.stderr, flush=True)
    return 0 if all(rank.exit_code() == 0 for rank in ranks) else STOPPED


def _await_end(ranks: list[RankProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.exit_code() is None for rank in ranks):
        time.sleep(0.05)


def _wait_for_nodes(nodes: _Nodes) -> None:
    """Keeps the store of machine 0 until the other launchers need it no more."""
    if len(nodes.sizes) == 1:
        return
    with contextlib.suppress(RuntimeError):
        gone = nodes.store.add("nodes/gone", 1)
        failed_at: float | None = None
        while nodes.node == 0 and gone < len(nodes.sizes):
            if _published(dist.PrefixStore("phalanx/0", nodes.store)) is not None:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > LEAVE_S + TERMINATE_S:
                    return
            time.sleep(POLL_S)
            gone = nodes.store.add("nodes/gone", 0)


class _Terminated(BaseException):
    """SIGTERM has come, which schedulers send."""


@contextlib.contextmanager
def _termination_raised() -> Iterator[None]:
    """Raises _Terminated inside when SIGTERM comes, so that ranks are ended in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
