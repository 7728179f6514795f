"""Random streams that are the same on some ranks and different on others, by the coordinates they are named with."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._guards import detect_fake_mode

from phalanx.cluster import device as devices


class Streams:
    """Generators for processor and device, one pair for each (name, coordinates), all from one seed.

    Ranks that give the same name and coordinates draw the same numbers: `fork("dropout", dp_index)` is equal across tensor
    ranks and different across data ranks. A stream keeps its place between uses; the state outside is left as it was.
    """

    def __init__(self, seed: int, device: devices.Device | None = None):
        self.seed = seed
        self._device = device or devices.Cpu()
        self._states: dict[str, dict[str, torch.Tensor]] = {}

    @contextlib.contextmanager
    def fork(self, name: str, *coordinates: int) -> Iterator[None]:
        """Runs the block on the stream's own state. Cost: two copies of 5 kB and of the device's state."""
        if detect_fake_mode() is not None:  # tensors without data need no numbers, and their states cannot be read
            yield
            return
        key = "/".join([name, *map(str, coordinates)])
        outer = self._read()
        if key in self._states:
            self._write(self._states[key])
        else:
            self._start(key)
        try:
            yield
        finally:
            self._states[key] = self._read()
            self._write(outer)

    def state_dict(self) -> dict[str, Any]:
        """The seed and the place of every stream used so far."""
        return {"seed": self.seed, "streams": {key: dict(state) for key, state in self._states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over seed and places; streams not named start anew from the seed."""
        self.seed = state["seed"]
        self._states = {key: dict(parts) for key, parts in state["streams"].items()}

    def _start(self, key: str) -> None:
        _seed(self._device, derive_seed(self.seed, key))

    def _read(self) -> dict[str, torch.Tensor]:
        return _read_state(self._device)

    def _write(self, state: Mapping[str, torch.Tensor]) -> None:
        _write_state(self._device, state)


class SplitDraws:
    """Draws that differ between the ranks of an axis for a while, where they work on different parts of the same rows.

    What they draw follows from the state outside, which is equal on all of them and moves on by one draw: a block that is computed
    again from the same state draws the same again. `begin` and `end` may each be called twice.
    Cost: two copies of 5 kB and of the device's state.
    """

    def __init__(self, index: int, device: devices.Device | None = None):
        self.index, self._device = index, device or devices.Cpu()
        self._outer: dict[str, torch.Tensor] | None = None

    def begin(self) -> None:
        if self._outer is not None or detect_fake_mode() is not None:
            return
        drawn = int(torch.randint(2**62, (), device="cpu"))
        self._outer = _read_state(self._device)
        _seed(self._device, derive_seed(drawn, "split", self.index))

    def end(self) -> None:
        if self._outer is not None:
            _write_state(self._device, self._outer)
            self._outer = None


class SameDraws:
    """What is drawn from now on, to be drawn once more: work that is done twice draws the same, whatever is drawn in between.

    Cost: four copies of 5 kB and of the device's state.
    """

    def __init__(self, device: devices.Device):
        self._device = device
        self._start = _read_state(device) if detect_fake_mode() is None else None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The same draws inside; the state outside is left as it was."""
        if self._start is None:
            yield
            return
        outer = _read_state(self._device)
        _write_state(self._device, self._start)
        try:
            yield
        finally:
            _write_state(self._device, outer)


def _read_state(device: devices.Device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    own = device.random_state()
    if own is not None:
        state["device"] = own
    return state


def _write_state(device: devices.Device, state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        device.set_random_state(state["device"])


def _seed(device: devices.Device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.kind != "cpu":
        torch.get_device_module(device.kind).manual_seed(seed)


def derive_seed(seed: int, *parts: object) -> int:
    """A 63-bit seed that depends on every part and is the same on every machine and in every run."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
