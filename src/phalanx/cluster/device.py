"""One face for cpu, cuda and npu: streams, memory, peak FLOP/s, default backend."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from phalanx.errors import ConfigError

KINDS = ("cuda", "npu", "cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1  # numbers of malloc.h, for mallopt of the GNU C library

# Dense matrix FLOP/s that the makers state, without sparsity, as (substring of the device's name, {dtype: FLOP/s}); first match wins.
_F32, _F16, _BF16, _FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
PEAK_FLOPS: tuple[tuple[str, dict[torch.dtype, float]], ...] = (
    ("B200", {_F32: 80e12, _F16: 2250e12, _BF16: 2250e12, _FP8: 4500e12}),
    ("H200", {_F32: 67e12, _F16: 989e12, _BF16: 989e12, _FP8: 1979e12}),
    ("H100 PCIe", {_F32: 51e12, _F16: 756e12, _BF16: 756e12, _FP8: 1513e12}),
    ("H100", {_F32: 67e12, _F16: 989e12, _BF16: 989e12, _FP8: 1979e12}),
    ("H800", {_F32: 67e12, _F16: 989e12, _BF16: 989e12, _FP8: 1979e12}),
    ("A100", {_F32: 19.5e12, _F16: 312e12, _BF16: 312e12}),
    ("A800", {_F32: 19.5e12, _F16: 312e12, _BF16: 312e12}),
    ("L40S", {_F32: 91.6e12, _F16: 362e12, _BF16: 362e12, _FP8: 733e12}),
    ("L4", {_F32: 30.3e12, _F16: 121e12, _BF16: 121e12, _FP8: 242e12}),
    ("A10G", {_F32: 31.5e12, _F16: 70e12, _BF16: 70e12}),
    ("V100", {_F32: 15.7e12, _F16: 125e12}),
    ("T4", {_F32: 8.1e12, _F16: 65e12}),
    ("4090", {_F32: 82.6e12, _F16: 165e12, _BF16: 165e12, _FP8: 330e12}),
    ("910B", {_F32: 75e12, _F16: 320e12, _BF16: 320e12}),
)


@dataclass(frozen=True)
class Memory:
    """What a device has and what is in use. Units: bytes; None where the platform does not say."""

    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    peak_bytes: int | None


class Device(Protocol):
    """What the rest of Phalanx asks of a device.

    `stream()` is None and `use_stream` does nothing where work is not queued, so callers need no branch.
    """

    kind: str
    backend: str

    def count(self) -> int: ...
    def select(self, index: int) -> torch.device: ...
    def name(self) -> str: ...
    def stream(self) -> Any: ...
    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def memory(self) -> Memory: ...
    def reset_peak(self) -> None: ...
    def keep_freed_memory(self) -> None: ...
    def peak_flops(self, dtype: torch.dtype) -> float | None: ...
    def random_state(self) -> torch.Tensor | None: ...
    def set_random_state(self, state: torch.Tensor) -> None: ...


class Cpu:
    """The processor: nothing is queued, memory is that of the process, the generator is torch's own (so no second state)."""

    kind = "cpu"
    backend = BACKENDS["cpu"]

    def count(self) -> int:
        return os.cpu_count() or 1

    def select(self, index: int) -> torch.device:
        return torch.device("cpu")

    def name(self) -> str:
        return "cpu"

    def stream(self) -> None:
        return None

    def use_stream(self, stream: None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_stream(self, stream: None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def memory(self) -> Memory:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else None
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return Memory(total, free, resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

    def reset_peak(self) -> None:
        return None  # the high-water mark of a process cannot be lowered

    def keep_freed_memory(self) -> None:
        """Lets the process keep the pages of freed tensors for the next ones, for good; only where the C library is GNU's.

        Otherwise every large tensor comes from the kernel and goes back to it, and filling in zeroed pages costs more than most
        operations on them.
        """
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            library.mallopt(_M_MMAP_MAX, 0)
            library.mallopt(_M_TRIM_THRESHOLD, -1)  # never

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None  # depends on the machine: measured, never looked up

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        return None


class Accelerator:
    """A device that torch drives through a module of its own (torch.cuda, torch.npu); the modules have one interface."""

    def __init__(self, kind: str):
        self.kind = kind
        self.backend = BACKENDS[kind]

    @property
    def module(self) -> ModuleType:
        return torch.get_device_module(self.kind)

    def count(self) -> int:
        return self.module.device_count()

    def select(self, index: int) -> torch.device:
        found = self.count()
        if index >= found:
            raise ConfigError(
                f"local rank {index} has no {self.kind} device of its own: {found} visible",
                allowed=f"at most {found} ranks on this machine",
                remedy='fewer ranks, or launch(backend="gloo") to run on the processor',
            )
        self.module.set_device(index)
        return torch.device(self.kind, index)

    def name(self) -> str:
        return self.module.get_device_name()

    def stream(self) -> Any:
        return self.module.Stream()

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self.module.stream(stream)

    def wait_stream(self, stream: Any) -> None:
        self.module.current_stream().wait_stream(stream)

    def synchronize(self) -> None:
        self.module.synchronize()

    def memory(self) -> Memory:
        free, total = self.module.mem_get_info()
        return Memory(total, free, self.module.memory_allocated(), self.module.max_memory_allocated())

    def reset_peak(self) -> None:
        self.module.reset_peak_memory_stats()

    def keep_freed_memory(self) -> None:
        return None  # torch's allocator of the device does

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        name = self.name()
        for part, flops in PEAK_FLOPS:
            if part in name:
                return flops.get(dtype)
        return None

    def random_state(self) -> torch.Tensor:
        return self.module.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state)


def get(kind: str) -> Device:
    """The device of a kind. Raises: ConfigError for a kind that does not exist."""
    if kind not in KINDS:
        raise ConfigError(f'unknown device kind "{kind}"', allowed=", ".join(KINDS))
    return Cpu() if kind == "cpu" else Accelerator(kind)


def available() -> list[str]:
    """The kinds this machine can use now, the fastest first; always ends with cpu."""
    return [kind for kind in KINDS if kind == "cpu" or _is_available(kind)]


def default() -> Device:
    """The fastest device of this machine."""
    return get(available()[0])


def resident_bytes() -> int | None:
    """Resident memory of this process, or None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


@contextlib.contextmanager
def on_stream(device: Device, stream: Any) -> Iterator[None]:
    """Runs the block on `stream`, which first waits for what the current one was given."""
    if stream is not None:
        stream.wait_stream(torch.get_device_module(device.kind).current_stream())
    with device.use_stream(stream):
        yield


def _is_available(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and module.is_available()
