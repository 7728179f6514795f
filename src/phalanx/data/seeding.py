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


class OwnRandomness:
    """Randomness that code borrows for a while, leaving the program's as it was.

    Without it a resumed run would not equal one that never stopped: reading data (and starting workers) draws from the
    generator that dropout uses, at other moments in the two runs.
    """

    def __init__(self, *key: int):
        self._key = key
        self._numpy = numpy.random.MT19937(0)
        self._state: tuple | None = None

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """For code that seeds everything before it draws."""
        outer = torch.get_rng_state(), random.getstate(), numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        # Numpy's generator is swapped, since copying its state costs ten times the rest; only the second half of a pair of
        # normal numbers that the program has not drawn yet is lost, in every run alike.
        numpy.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.set_rng_state(outer[0])
            random.setstate(outer[1])
            numpy.random.set_bit_generator(outer[2])  # type: ignore[attr-defined]

    @contextmanager
    def continued(self) -> Iterator[None]:
        """For code that goes on drawing where it stopped the last time, at first from the seed of the key."""
        with self.borrowed():
            if self._state is None:
                seed_everything(*self._key)
            else:
                torch.set_rng_state(self._state[0])
                random.setstate(self._state[1])
            try:
                yield
            finally:
                self._state = torch.get_rng_state(), random.getstate()
