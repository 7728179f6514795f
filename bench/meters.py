"""What one rank of one row measures: CPU seconds, wall time, bytes on the wire, allocator bytes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

Step = Callable[[int], float]


def loopback_sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.strip().partition(":")
        if interface == "lo":
            return int(counters.split()[8])
    return 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure_time(step: Step, warmup: int, steps: int, ledger_bytes: Callable[[], int] | None = None) -> dict:
    """Means over `steps` steps after `warmup` others: CPU seconds of all threads of this process, wall, page faults, bytes.

    The loopback counter sees all ranks, so its bytes are the job's; `ledger_bytes` counts what this rank hands over.
    """
    losses = [step(index) for index in range(warmup)]
    _meet()
    sent, ledger = loopback_sent_bytes(), ledger_bytes() if ledger_bytes else 0
    usage, cpu = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    walls = []
    for index in range(warmup, warmup + steps):
        begin = time.perf_counter()
        losses.append(step(index))
        walls.append(time.perf_counter() - begin)
    cpu_s = (time.process_time() - cpu) / steps
    after = resource.getrusage(resource.RUSAGE_SELF)
    _meet()
    return {
        "cpu_s": cpu_s,
        "system_s": (after.ru_stime - usage.ru_stime) / steps,
        "page_faults": (after.ru_minflt - usage.ru_minflt) / steps,
        "wall_s": statistics.median(walls),
        "job_wire_bytes": (loopback_sent_bytes() - sent) / steps,
        "ledger_bytes": (ledger_bytes() - ledger) / steps if ledger_bytes else None,
        "losses": losses,
    }


class _MallocCounts(ctypes.Structure):
    """glibc's `struct mallinfo2`, of which the bytes in mappings of their own matter here."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("hblkhd", ctypes.c_size_t),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


M_MMAP_THRESHOLD, LARGE_BYTES = -3, 128 * 1024


def map_large_blocks(*_: object) -> None:
    """Makes malloc give every large block, and so every tensor that matters, a mapping of its own."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def count_blocks_of_phalanx() -> None:
    """Keeps Phalanx from keeping the pages of freed tensors: it then takes all memory in one piece, in which no block can be counted."""
    from phalanx.cluster import device

    device.Cpu.keep_freed_memory = map_large_blocks


def large_block_bytes() -> int:
    """Bytes in large blocks that are in use, whichever thread took them."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _MallocCounts
    return count().hblkhd


def measure_memory(build: Callable[[], Step], warmup: int, steps: int = 4) -> dict:
    """Bytes of large blocks held when a step begins, and the most that PyTorch's allocator adds to them within a step.

    The rise is the smallest of several steps: what a thread of gloo frees escapes the profiler, so a rise can only be too high.
    The profiler must be on before the model exists: the allocator forgets what it gave out while nobody listened.
    """
    map_large_blocks()
    before = large_block_bytes()
    held = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = build()
        for index in range(warmup):
            step(index)
        for index in range(warmup, warmup + steps):
            _meet()
            gc.collect()
            held = large_block_bytes() - before
            with record_function("bench.step"):
                step(index)
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == "bench.step"]
    if held <= 0:
        raise RuntimeError("nothing was held at the start of a step: the large blocks of this row escape the count")
    return {"held_bytes": held, "peak_bytes": held + min(_rise(changes, *span) for span in spans)}


def _rise(changes: list[tuple[int, int]], begin: int, end: int) -> int:
    """The highest running sum of the changes between two times."""
    return max(itertools.accumulate((change for at, change in changes if begin <= at <= end), initial=0))
