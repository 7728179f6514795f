"""Randomness of a data pipeline: a function of the place in the data, never of the rank or of what ran before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Leaves the program's randomness as it was.

    Without it a resumed run would not equal one that never stopped: reading data (and starting workers) draws from the
    generator that dropout uses, at other moments in the two runs.
    """
    outer = _state()
    # Numpy's generator is swapped, since copying its state costs ten times the rest; only the second half of a pair of
    # normal numbers that the program has not drawn yet is lost, in every run alike.
    numpy.random.set_bit_generator(numpy.random.MT19937(0))
    try:
        yield
    finally:
        _restore(outer)


class OwnRandomness:
    """A stream of randomness that code borrows for a while, and goes on with the next time."""

    def __init__(self, *key: int):
        self._key = key
        self._state: tuple | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with kept_randomness():
            if self._state is None:
                seed_everything(*self._key)
            else:
                _restore(self._state)
            try:
                yield
            finally:
                self._state = _state()


def _state() -> tuple:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_bit_generator()


def _restore(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_bit_generator(state[2])
