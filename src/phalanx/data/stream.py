"""Global batches from any iterable: every rank reads all of them, keeps its rows, and ends where the first one ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.data.position import Position
from phalanx.data.rows import num_rows, take_rows
from phalanx.data.seeding import OwnRandomness
from phalanx.data.workers import SharedStream, rebuilt
from phalanx.errors import ConfigError, ShapeError
from phalanx.layout import split_range

_END = object()


class StreamSource:
    """The rows of one index of the data axis, out of batches that come in their own order."""

    num_samples = None

    def __init__(self, stream: Iterable, axis: Axis, world: Axis):
        if not hasattr(stream, "__iter__"):
            raise ConfigError(
                f"a loader of type {type(stream).__name__} cannot be iterated", allowed="a DataLoader, or an iterable of batches"
            )
        self._length_of, self._axis, self._world = stream, axis, world
        self._stream = _with_shared_workers(stream) if isinstance(stream, DataLoader) and stream.num_workers else stream

    @property
    def num_batches(self) -> int:
        return len(self._length_of)  # type: ignore[arg-type]

    def draw(self, position: Position) -> None:
        """Nothing: a stream comes in its own order."""

    def read(self, position: Position, order: None) -> Iterator[tuple[Any, int]]:
        """Yields (this index's rows, rows of the global batch) from `position` on, whose batches are read and dropped."""
        own = OwnRandomness(position.seed, position.epoch)
        skip, number = position.batches, 0
        with own.continued():
            batches = iter(self._stream)
        while True:
            with own.continued():
                batch = next(batches, _END)
            total = self._agree(batch, number)
            if total is None:
                return
            number += 1
            if number > skip:
                yield self._own_rows(batch, total), total

    def _own_rows(self, batch: Any, total: int) -> Any:
        if self._axis.size == 1:
            return batch
        return take_rows(batch, *split_range(total, self._axis.size, self._axis.index), total=total)

    def _agree(self, batch: Any, number: int) -> int | None:
        """The rows of a batch that all ranks have read, or None where the stream of one of them has ended."""
        ended = batch is _END
        if self._world.size == 1:
            return None if ended else _rows_or_one(batch)
        rows = 0 if ended else num_rows(batch)
        # One reduction tells both whether all go on and whether the smallest and the largest batch are the same.
        seen = torch.tensor([not ended, rows, -rows], dtype=torch.int64)
        comm.all_reduce(seen, self._world, op="min")
        go_on, least, negative_most = seen.tolist()
        if go_on and least != -negative_most:
            raise ShapeError(
                f"batch {number} of the stream has {least} rows on one rank and {-negative_most} on another",
                allowed="a stream that yields the same global batches on every rank",
            )
        return rows if go_on else None


def _with_shared_workers(loader: DataLoader) -> DataLoader:
    dataset = SharedStream(loader.dataset, loader.num_workers)
    return rebuilt(loader, dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, collate_fn=loader.collate_fn)


def _rows_or_one(batch: Any) -> int:
    # One process never cuts a batch, so here one whose rows cannot be told apart is allowed; it counts as one sample.
    try:
        return num_rows(batch)
    except ShapeError:
        return 1
