"""Randomness of a data pipeline: a function of the place in the data, never of the rank or of what ran before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def mix(*key: int) -> int:
    """A 63-bit seed that depends on every number of `key` and on their order."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*key: int) -> None:
    """Seeds the CPU generator of torch, `random` and `numpy.random` from `key`."""
    seed = mix(*key)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


class OwnRandomness:
    """A stream of randomness that code borrows for a while, leaving the program's own untouched.

    Without it a resumed run would not equal one that never stopped: reading data (and starting workers) draws from the
    generator that dropout uses, at other moments in the two runs.
    """

    def __init__(self, *key: int):
        self._key = key
        self._state: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        outer = _state()
        if self._state is None:
            seed_everything(*self._key)
        else:
            _restore(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _restore(outer)


def _state() -> tuple:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def _restore(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
