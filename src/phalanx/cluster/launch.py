"""How this process became a rank: torchrun, Slurm, Open MPI, or alone; the only file that reads environment variables."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.cluster import deadlock, failure
from phalanx.cluster import device as devices
from phalanx.cluster.sentry import Sentry
from phalanx.errors import CommError, ConfigError

JOIN_S = 25.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an environment puts this process, and how it meets the others: at host and port, or in a file."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    num_nodes: int = 1
    host: str = ""
    port: int = 0
    file: str = ""
    store_is_served: bool = False
    prefix: str = "phalanx"
    source: str = "single process"


@dataclass(frozen=True)
class World:
    """All processes of the job as this rank sees them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    num_nodes: int
    device: torch.device
    backend: str
    timeout_s: float
    debug: bool
    store: dist.Store | None = field(default=None, repr=False, compare=False)

    @property
    def is_fake(self) -> bool:
        """True in a rehearsal: the other ranks do not exist."""
        return self.backend == "fake"


_world: World | None = None
_groups: dict[tuple[tuple[int, ...], str], tuple[dist.ProcessGroup, str]] = {}


def launch(*, backend: str | None = None, timeout_s: float = 600, debug: bool | None = None) -> World:
    """Makes this process a rank of the job it was started in; a second call returns the same world.

    Reads what torchrun, Slurm (srun) or Open MPI set; without any of them the world is this process, and no process group is
    made. `debug` compares every collective between ranks before it runs (PHALANX_DEBUG=1).
    Raises: ConfigError for an incomplete environment, a port that is taken, ranks that do not come.
    """
    global _world
    if _world is not None:
        return _world
    if debug is None:
        debug = os.environ.get("PHALANX_DEBUG", "0") not in ("", "0")
    place = read_place(os.environ)
    device = devices.get("cpu") if backend == "gloo" else devices.default()
    torch_device = device.select(place.local_rank)
    device.keep_freed_memory()
    backend = backend or device.backend
    store: Any = None  # the stubs of dist.Store lack clone()
    hook = sys.excepthook  # torch puts its own, which prefixes every line
    if dist.is_initialized():  # the program made its own process group: take that
        store = dist.PrefixStore("phalanx", dist.distributed_c10d._get_default_store())
        place = Place(**{**vars(place), "rank": dist.get_rank(), "size": dist.get_world_size()})
        backend = dist.get_backend_config()
    elif place.size > 1:
        store = _meet(place, backend, timeout_s)
    _world = World(
        place.rank, place.size, place.local_rank, place.local_size, place.num_nodes, torch_device, backend, timeout_s, debug, store
    )
    if store is not None:
        failure.start(store.clone(), place.rank, place.size, hook, Sentry(place.rank).look)
        atexit.register(shutdown)
    return _world


def world() -> World:
    """The world of this process; launches a single process if nothing ran."""
    return _world or launch()


def rehearse(size: int, rank: int = 0) -> World:
    """A world of `size` ranks of which only this one exists: collectives count bytes and move none."""
    global _world
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    if _world is not None:
        raise ConfigError(f"a world of {_world.size} ranks is already running", remedy="shutdown() first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    _world = World(rank, size, rank, size, 1, torch.device("cpu"), "fake", 600.0, False)
    return _world


def shutdown() -> None:
    """Leaves the world: waits for ranks that still need the store of this one, then ends the threads of watch and groups.

    They must be gone before Python is: a thread that comes back from a store, or that drops the tensors of an operation, waits for
    the interpreter, and one that waits while the interpreter ends takes the process down with SIGABRT.
    """
    global _world
    if _world is None:
        return
    atexit.unregister(shutdown)
    _say_goodbye(_world)
    failed = failure.noticed() is not None
    failure.stop()
    _world = None
    _groups.clear()
    if dist.is_initialized() and not failed:  # groups with operations that will never end are left to the end of the process
        gc.collect()  # operations and groups in circles of references
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def group_of(ranks: tuple[int, ...], channel: str = "") -> tuple[dist.ProcessGroup, str]:
    """The process group over `ranks` and the backend that carries processor tensors; made once per set of ranks and channel.

    Collective over `ranks` only.
    """
    current = world()
    if (ranks, channel) not in _groups:
        if ranks == tuple(range(current.size)) and not channel:
            group = dist.group.WORLD
        else:
            timeout = timedelta(seconds=current.timeout_s)
            with _named_alike(channel):
                group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=not current.is_fake)
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError(f"no group over ranks {ranks}")
        backend = "fake" if current.is_fake else "gloo" if "gloo" in current.backend else current.backend
        _groups[ranks, channel] = (group, backend)
    return _groups[ranks, channel]


@contextlib.contextmanager
def _named_alike(channel: str) -> Iterator[None]:
    """Names a group after its ranks and channel alone.

    PyTorch adds the number of groups that a rank has made so far, and ranks with other numbers would wait for each other for ever.
    """
    before = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: f"{'_'.join(map(str, ranks))} {channel}"
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


def group_made(ranks: tuple[int, ...], channel: str = "") -> dist.ProcessGroup | None:
    """The group that `group_of` has made in this world, if it has."""
    group, _ = _groups.get((ranks, channel), (None, ""))
    return group


def read_place(environ: Mapping[str, str]) -> Place:
    """The place that a set of environment variables describes; torchrun's come first, then Open MPI's, then Slurm's."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        return _slurm(environ)
    return Place()


def rank_environment(
    *, rank: int, size: int, local_rank: int, local_size: int, node: int = 0, num_nodes: int = 1, host: str, port: int, file: str = ""
) -> dict[str, str]:
    """The variables that make a child process a rank, as torchrun sets them, with the store served by its parent.

    With `file` the ranks of Phalanx meet there: no port, and no name service that could keep them waiting.
    """
    return {
        **({"PHALANX_STORE": file} if file else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "phalanx",
    }


def child_environment(extra: Mapping[str, str], *, local_size: int) -> dict[str, str]:
    """This process's environment for a child rank: its share of the cores unless said otherwise."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local_size)))
    return {**environment, **extra}


def loopback_environment() -> dict[str, str]:
    """The variables for ranks that are all on this machine: gloo then needs no name service and no network."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if os.path.exists("/sys/class/net/lo") and "GLOO_SOCKET_IFNAME" not in os.environ else {}


def become_rank(environment: Mapping[str, str]) -> None:
    """Takes over an environment in a process that was forked, and forgets the world of its parent."""
    global _world
    os.environ.update(environment)
    _world = None
    _groups.clear()
    failure.forget()


def die_with_parent() -> None:
    """Asks the kernel to end this process with its parent, so that killing a launcher leaves nothing behind (Linux)."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it went in between
            os._exit(1)


def _torchrun(environ: Mapping[str, str]) -> Place:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ConfigError(
            f"the environment sets some of {', '.join(needed)} but not {', '.join(missing)}", remedy="torchrun, or unset all of them"
        )
    size, rank = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _checked(
        Place(
            rank=rank,
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", rank % local_size),
            local_size=local_size,
            num_nodes=_number(environ, "GROUP_WORLD_SIZE", max(1, size // local_size)),
            host=environ["MASTER_ADDR"],
            port=_number(environ, "MASTER_PORT"),
            store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            file=environ.get("PHALANX_STORE", ""),
            prefix=f"phalanx/{attempt}",
            source="torchrun",
        )
    )


def _open_mpi(environ: Mapping[str, str]) -> Place:
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "job"
    host = environ.get("MASTER_ADDR")
    if host is None:
        if local_size != size:
            raise ConfigError("Open MPI does not say where rank 0 runs", remedy="mpirun -x MASTER_ADDR=<host of rank 0>")
        host = "127.0.0.1"
    return _checked(
        Place(
            rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
            size=size,
            local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            local_size=local_size,
            num_nodes=-(-size // local_size),
            host=host,
            port=_number(environ, "MASTER_PORT", port_of_job(job)),
            source="Open MPI",
        )
    )


def _slurm(environ: Mapping[str, str]) -> Place:
    size_name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), "SLURM_NTASKS")
    size = _number(environ, size_name)
    nodes = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(-(-size // len(nodes)))
    per_node = expand_counts(tasks)
    node = _number(environ, "SLURM_NODEID", 0)
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    return _checked(
        Place(
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID", 0),
            local_size=per_node[node] if node < len(per_node) else -(-size // len(nodes)),
            num_nodes=len(nodes),
            host=environ.get("MASTER_ADDR") or nodes[0],
            port=_number(environ, "MASTER_PORT", port_of_job(f"{environ.get('SLURM_JOB_ID')}.{step}")),
            source="Slurm",
        )
    )


def expand_hosts(text: str) -> list[str]:
    """Slurm's short host list in full: "a[01-03,7],b" is a01 a02 a03 a7 b."""
    hosts = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        head, ranges, tail = match.groups()
        for piece in ranges.split(","):
            first, _, last = piece.partition("-")
            hosts += [f"{head}{number:0{len(first)}d}{tail}" for number in range(int(first), int(last or first) + 1)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node in full: "4(x2),3" is 4 4 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f'cannot read the tasks per node "{text}"', allowed='a list such as "4(x2),3"')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def port_of_job(name: str) -> int:
    """A port that all ranks of one job compute alike, and different jobs mostly differently."""
    return 20000 + zlib.crc32(name.encode()) % 12000  # below the range that systems give out for outgoing connections


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"the environment variable {name} is not set")
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f'the environment variable {name} is "{text}"', allowed="a whole number") from None


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"{place.source} gives rank {place.rank} of {place.size}", allowed=f"0 to {place.size - 1}")
    return place


def _meet(place: Place, backend: str, timeout_s: float) -> dist.Store:
    """Connects to the store of the job and makes the process group of the world."""
    if place.store_is_served:
        die_with_parent()
    serves = place.rank == 0 and not place.store_is_served
    meeting = dist.FileStore(place.file, place.size) if place.file else open_store(place.host, place.port, serves=serves)
    store = dist.PrefixStore(place.prefix, meeting)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout_s)
        )
        # A rank that is through early must not leave while others are still connecting to it.
        if store.add("met", 1) == place.size:
            store.set("all met", "")
        store.wait(["all met"], timedelta(seconds=JOIN_S))
    except RuntimeError as error:
        raise CommError(f"the {place.size} ranks did not come together: {_first_line(error)}") from error
    return store


def open_store(host: str, port: int, *, serves: bool, join_s: float = JOIN_S) -> dist.TCPStore:
    """The store at host:port, served by this process or another. Raises: ConfigError where the port is taken or nobody answers."""
    if not serves:
        _await_answer(host, port, join_s)
    try:
        return dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=join_s))
    except (RuntimeError, ValueError) as error:
        text = _first_line(error)
        if serves and ("EADDRINUSE" in text or "address already in use" in text.lower() or "bind" in text.lower()):
            raise ConfigError(f"port {port} on {host} is taken", remedy="leave the port out, or give a free one") from None
        if serves:
            raise ConfigError(f"cannot serve at {host}:{port}: {text}") from None
        raise ConfigError(
            f"nobody answers at {host}:{port} after {join_s:.0f} s: {text}", remedy="check the address and that node 0 runs"
        ) from None


def _await_answer(host: str, port: int, join_s: float) -> None:
    """Returns when somebody listens at host:port. The store itself would wait as well, and print its stack where nobody comes.

    Raises: ConfigError with the last reason.
    """
    deadline = time.monotonic() + join_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:  # also a name that is not known (yet)
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"nobody answers at {host}:{port} after {join_s:g} s: {error.strerror or error}",
                    remedy="check the address and that node 0 runs",
                ) from None
        time.sleep(0.1)


def _say_goodbye(current: World) -> None:
    """Tells the store that this rank is through; the rank that serves it stays until all have said so."""
    store = current.store
    if store is None or failure.noticed() is not None:
        return
    try:
        deadlock.tell(store, current.rank, deadlock.Wait("the end of its program"))
        gone = store.add("gone", 1)
        deadline = time.monotonic() + 30
        while current.rank == 0 and gone < current.size and time.monotonic() < deadline and failure.noticed() is None:
            time.sleep(0.02)
            gone = store.add("gone", 0)
    except RuntimeError:
        return  # the store has gone before us: nobody needs to know any more


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
