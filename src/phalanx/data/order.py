"""In which order an epoch visits a map-style data set, and where its global batches end.

The order depends on the seed and the epoch alone. It is the same on every rank and for every number of data ranks, so a
place in it, counted in samples, means the same under any plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.data.seeding import OwnRandomness, mix
from phalanx.errors import ConfigError


@dataclass(frozen=True)
class EpochOrder:
    """The samples of one epoch in order, and how they are cut into global batches.

    `sizes` are the batch sizes where a custom batch sampler chose them, else every batch has `batch_size` samples.
    """

    indices: torch.Tensor | list
    batch_size: int
    drop_last: bool
    sizes: list[int] | None = None

    def batches(self, start: int = 0) -> Iterator[tuple[int, list]]:
        """Yields (place of the first sample, data set indices) of each global batch from sample `start` on.

        A batch that `start` cuts in two yields its rest.
        """
        for first, last in self._bounds(start):
            part = self.indices[first:last]
            yield first, part.tolist() if isinstance(part, torch.Tensor) else list(part)

    def digest(self) -> int | None:
        """A checksum of an order that a custom sampler drew, by which a resumed run sees whether it drew another one."""
        return None if isinstance(self.indices, torch.Tensor) else zlib.crc32(repr(self.indices).encode())

    def _bounds(self, start: int) -> Iterator[tuple[int, int]]:
        total = len(self.indices)
        if self.sizes is not None:
            last = 0
            for size in self.sizes:
                first, last = last, last + size
                if last > start:
                    yield max(first, start), last
            return
        for first in range(start, total, self.batch_size):
            last = min(first + self.batch_size, total)
            if last - first == self.batch_size or not self.drop_last:
                yield first, last


class BuiltInOrder:
    """The order of PyTorch's own sequential and random samplers, with a shuffle that is ours: seeded per epoch."""

    def __init__(self, batches: BatchSampler, world: Axis):
        self._sampler: Any = batches.sampler
        self._batch_size, self._drop_last = batches.batch_size, batches.drop_last
        self._person_seed = _generator_seed(self._sampler)
        if self._person_seed is not None and world.size > 1:
            self._person_seed = comm.broadcast_object(self._person_seed, world, source=0)
        self._num_samples = len(batches.sampler)  # type: ignore[arg-type]
        if self.num_batches == 0:
            raise ConfigError(
                f"drop_last leaves no batch of {self._batch_size} from {self._num_samples} samples",
                remedy=f"drop_last=False, or batch_size={self._num_samples}",
            )

    @property
    def num_batches(self) -> int:
        full, rest = divmod(self._num_samples, self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    def draw(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch."""
        if isinstance(self._sampler, SequentialSampler):
            indices = torch.arange(self._num_samples)
        else:
            generator = torch.Generator()
            generator.manual_seed(mix(seed, epoch, self._person_seed or 0))
            indices = _random_indices(self._sampler, generator)
        return EpochOrder(indices, self._batch_size, self._drop_last)


class CustomOrder:
    """The order a person's own sampler draws: on one rank, with seeded randomness, and sent to all others.

    Cost: the list of one epoch's indices, broadcast once per epoch.
    """

    def __init__(self, loader: DataLoader, world: Axis):
        self._batches: Any = loader.batch_sampler
        self._world = world
        # A batch sampler, and the sampler it may cut into batches: each with the seed its own generator was given.
        both = (self._batches, getattr(self._batches, "sampler", None))
        self._samplers: list[tuple[Any, int | None]] = [(sampler, _generator_seed(sampler)) for sampler in both if sampler is not None]
        for sampler, _ in self._samplers:
            replicas = getattr(sampler, "num_replicas", 1)
            if isinstance(replicas, int) and replicas > 1:
                raise ConfigError(
                    f"{type(sampler).__name__} already shares the data out over {replicas} ranks",
                    allowed="a loader of global batches, as in a single-device program",
                    remedy="DataLoader(..., shuffle=True) without it",
                )

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def draw(self, seed: int, epoch: int) -> EpochOrder:
        """The order of one epoch; a collective over all ranks."""
        # In a rehearsal there is nobody to hear the order from.
        draws_here = self._world.index == 0 or self._world.backend == "fake"
        drawn: Any = self._draw_here(seed, epoch) if draws_here else None
        if self._world.size > 1:
            drawn = comm.broadcast_object(drawn, self._world, source=0)
        indices, sizes = drawn
        if not indices:
            raise ConfigError("the sampler of the data loader drew no sample", remedy="a sampler that yields at least one index")
        if sizes is not None:
            return EpochOrder(indices, max(sizes), drop_last=False, sizes=sizes)
        return EpochOrder(indices, self._batches.batch_size, self._batches.drop_last)

    def _draw_here(self, seed: int, epoch: int) -> tuple[list, list[int] | None]:
        for sampler, person_seed in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if person_seed is not None:
                # The generator's state is not in any checkpoint; seeded by the epoch, a resumed run draws the same order.
                sampler.generator.manual_seed(mix(seed, epoch, person_seed))
        with OwnRandomness(seed, epoch).continued():
            if type(self._batches) is BatchSampler:
                return list(self._batches.sampler), None
            lists = [list(batch) for batch in self._batches]
        return list(chain.from_iterable(lists)), [len(batch) for batch in lists]


def order_of(loader: DataLoader, world: Axis) -> BuiltInOrder | CustomOrder:
    """The order in which a map-style loader visits its data set.

    Raises: ConfigError where the data set is empty.
    """
    if _length(loader.dataset) == 0:
        raise ConfigError("the data set is empty", remedy="a data set with at least one sample")
    batches = loader.batch_sampler
    if type(batches) is BatchSampler and type(batches.sampler) in (SequentialSampler, RandomSampler):
        return BuiltInOrder(batches, world)
    return CustomOrder(loader, world)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _generator_seed(sampler: Any) -> int | None:
    generator = getattr(sampler, "generator", None)
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def _random_indices(sampler: RandomSampler, generator: torch.Generator) -> torch.Tensor:
    size, wanted = len(sampler.data_source), sampler.num_samples
    if sampler.replacement:
        return torch.randint(size, (wanted,), generator=generator)
    rounds = [torch.randperm(size, generator=generator) for _ in range(-(-wanted // size))]
    return torch.cat(rounds)[:wanted]
