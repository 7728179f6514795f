"""The tiers below the device, behind one contract: a budget, a link of some bandwidth each way, and copies that run beside.

A `Place` is room for bytes in a tier. Between the device and a place, bytes move in the background and are counted; at the edges
(saving, loading, the host's optimizer) a place shows itself as a tensor.
"""

from __future__ import annotations

import mmap
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import CapacityError, ConfigError
from phalanx.layout import round_up
from phalanx.memory.arena import Budget

PAGE_BYTES = 4096  # what direct files and mappings align to
BOUNCE_BYTES = 8 << 20  # a read or write of the disk goes through aligned memory of this size


class Copy:
    """A copy that may still run; whoever needs its result waits."""

    def __init__(self, future: Future | None = None, event: Any = None):
        self._future, self._event = future, event

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
        if self._event is not None:
            self._event.wait()


@dataclass
class Place:
    """Room in a tier, shown as a flat tensor of bytes."""

    tier: Tier
    num_bytes: int
    bytes: torch.Tensor = field(repr=False)
    offset: int = 0  # in the file, for the disk

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[: self.num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)


class Tier(ABC):
    """Room for bytes below the device.

    `read_bytes` and `written_bytes` count what went up to the device and down from it. A link with a stated `bytes_per_s` is no
    faster than that.
    """

    name = ""

    def __init__(self, capacity: int, bytes_per_s: float | None = None):
        self.budget = Budget(self.name, capacity)
        self.bytes_per_s = bytes_per_s
        self.read_bytes = self.written_bytes = 0
        self._workers: dict[str, ThreadPoolExecutor] = {}  # one for each way

    @abstractmethod
    def room(self, num_bytes: int) -> Place:
        """Takes room from the budget."""

    def read(self, place: Place, start: int, out: torch.Tensor) -> Copy:
        """Copies bytes from `start` of a place into a flat tensor of the device."""
        self.read_bytes += out.nbytes
        return self._start("read", out.nbytes, lambda: self._read(place, start, out))

    def write(self, place: Place, start: int, source: torch.Tensor) -> Copy:
        """Copies a flat tensor of the device into a place; the source must stay as it is until the copy is waited for."""
        self.written_bytes += source.nbytes
        return self._start("write", source.nbytes, lambda: self._write(place, start, source))

    def raise_up(self, source: torch.Tensor, out: torch.Tensor) -> Copy:
        """Copies a tensor of this tier into one of the device, cast to its dtype on the way."""
        self.read_bytes += out.nbytes
        return self._start("read", out.nbytes, lambda: out.copy_(source, non_blocking=True))

    def count_written(self, num_bytes: int) -> None:
        """Counts bytes that came down as something else computed with them, such as a sum."""
        self.written_bytes += num_bytes

    @abstractmethod
    def _read(self, place: Place, start: int, out: torch.Tensor) -> None: ...

    @abstractmethod
    def _write(self, place: Place, start: int, source: torch.Tensor) -> None: ...

    def _start(self, way: str, num_bytes: int, copy: Callable[[], Any]) -> Copy:
        if not self.is_asynchronous:
            copy()
            return Copy()
        if way not in self._workers:
            self._workers[way] = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name} tier, {way}")
        return Copy(self._workers[way].submit(self._timed, num_bytes, copy))

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run beside the device's work."""
        return self.bytes_per_s is not None

    def _timed(self, num_bytes: int, copy: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        copy()
        if self.bytes_per_s is not None:
            time.sleep(max(0.0, num_bytes / self.bytes_per_s - (time.perf_counter() - begin)))

    def close(self) -> None:
        for worker in self._workers.values():
            worker.shutdown(wait=True)
        self._workers.clear()


class Host(Tier):
    """The machine's memory; pinned where the device is another, so that copies run beside its work."""

    name = "host"

    def __init__(self, capacity: int, device: torch.device, bytes_per_s: float | None = None):
        super().__init__(capacity, bytes_per_s)
        self.device = device
        self.stream = torch.get_device_module(device).Stream() if device.type != "cpu" else None

    def room(self, num_bytes: int) -> Place:
        self.budget.take(num_bytes)
        return Place(self, num_bytes, torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.stream is not None))

    def _read(self, place: Place, start: int, out: torch.Tensor) -> None:
        as_bytes(out).copy_(place.bytes[start : start + out.nbytes], non_blocking=True)

    def _write(self, place: Place, start: int, source: torch.Tensor) -> None:
        place.bytes[start : start + source.nbytes].copy_(as_bytes(source), non_blocking=True)

    @property
    def is_asynchronous(self) -> bool:
        return self.stream is not None or super().is_asynchronous

    def _start(self, way: str, num_bytes: int, copy: Callable[[], Any]) -> Copy:
        if self.stream is None:
            return super()._start(way, num_bytes, copy)
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            copy()
        event = self.stream.record_event()
        return Copy(event=event)


class Disk(Tier):
    """One file, read and written past the page cache where the file system can, and mapped where a tensor is wanted.

    The file has no name from the start: it is scratch, and goes with the process however that ends. Its room is allocated before
    it is promised, so that a full disk is found before the first step.
    """

    name = "disk"

    def __init__(self, capacity: int, folder: str | Path, bytes_per_s: float | None = None):
        super().__init__(capacity, bytes_per_s)
        path = Path(folder) / f"phalanx-{uuid.uuid4().hex}.tier"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"the disk tier cannot write in {folder}: {error.strerror}", remedy="a disk_path that exists") from error
        self._direct = self._open_direct(path)
        os.unlink(path)
        self._end = 0
        self._bounces: dict[bool, torch.Tensor] = {}  # for reads, and for writes

    def _open_direct(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        except OSError:  # a file system in memory has nothing to go past
            return self._file

    @property
    def is_asynchronous(self) -> bool:
        return True

    def room(self, num_bytes: int) -> Place:
        size = round_up(max(num_bytes, 1), PAGE_BYTES)
        self.budget.take(size)
        offset, self._end = self._end, self._end + size
        try:
            os.posix_fallocate(self._file, offset, size)
        except OSError as error:
            raise CapacityError(
                f"the disk has no room for {size} bytes more of the {self.budget.capacity} that it was to hold: {error.strerror}",
                remedy=f"disk = {offset}, or another disk_path",
            ) from error
        mapping = mmap.mmap(self._file, size, offset=offset)
        return Place(self, num_bytes, torch.frombuffer(mapping, dtype=torch.uint8), offset)

    def _read(self, place: Place, start: int, out: torch.Tensor) -> None:
        self._through_bounce(place, start, as_bytes(out), is_read=True)

    def _write(self, place: Place, start: int, source: torch.Tensor) -> None:
        self._through_bounce(place, start, as_bytes(source), is_read=False)

    def _through_bounce(self, place: Place, start: int, target: torch.Tensor, is_read: bool) -> None:
        """In pieces through aligned memory; a place begins at a page, and what does not end at one goes through the mapping."""
        if is_read not in self._bounces:
            self._bounces[is_read] = torch.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), dtype=torch.uint8)
        whole = target.numel() // PAGE_BYTES * PAGE_BYTES if start % PAGE_BYTES == 0 else 0
        for begin in range(0, whole, BOUNCE_BYTES):
            piece = target[begin : min(begin + BOUNCE_BYTES, whole)]
            bounce = self._bounces[is_read][: piece.numel()]
            at = place.offset + start + begin
            if is_read:
                self._transfer(os.preadv, bounce, at)
                piece.copy_(bounce)
            else:
                bounce.copy_(piece)
                self._transfer(os.pwritev, bounce, at)
        rest = place.bytes[start + whole : start + target.numel()]
        if rest.numel():
            target[whole:].copy_(rest) if is_read else rest.copy_(target[whole:])

    def _transfer(self, call: Callable, memory: torch.Tensor, offset: int) -> None:
        view, done = memoryview(memory.numpy()), 0
        while done < len(view):
            try:
                moved = call(self._direct, [view[done:]], offset + done)
            except OSError as error:
                raise CapacityError(
                    f"the disk tier failed at byte {offset + done}: {error.strerror}",
                    allowed="a disk that works; checkpoints are not touched by it",
                    remedy="the last checkpoint, and another disk_path",
                ) from error
            if moved == 0:
                raise CapacityError(f"the disk tier ends at byte {offset + done}", remedy="the last checkpoint, and another disk_path")
            done += moved

    def close(self) -> None:
        super().close()
        for descriptor in {self._file, self._direct}:
            os.close(descriptor)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.detach().view(-1).view(torch.uint8)
