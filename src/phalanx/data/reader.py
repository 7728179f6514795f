"""Global batches of a map-style data set, of which each index of the data axis reads its own rows only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from phalanx.cluster.mesh import Axis
from phalanx.data.order import EpochOrder, order_of
from phalanx.data.position import Position
from phalanx.data.rows import take_rows
from phalanx.data.seeding import OwnRandomness, seed_everything
from phalanx.data.workers import rebuilt
from phalanx.errors import ConfigError
from phalanx.layout import split_range


class MapSource:
    """The rows of one index of the data axis, read and collated by the person's data set and collate function."""

    def __init__(self, loader: DataLoader, axis: Axis, world: Axis):
        if loader.batch_sampler is None:
            raise ConfigError(
                "batch_size=None makes the data set's own items the batches, of which no index can read only its rows",
                remedy="batch_size=1, or the data set itself as an iterable of batches",
            )
        self._axis, self._order = axis, order_of(loader, world)
        self.num_samples = len(loader.dataset)  # type: ignore[arg-type]
        self._requests = Requests()
        self._rows = rebuilt(loader, RowReader(loader), sampler=self._requests, batch_size=None, collate_fn=_as_it_is)

    @property
    def num_batches(self) -> int:
        return self._order.num_batches

    def draw(self, position: Position) -> EpochOrder:
        """The order of the epoch of `position`."""
        return self._order.draw(position.seed, position.epoch)

    def read(self, position: Position, order: EpochOrder) -> Iterator[tuple[Any, int]]:
        """Yields (this index's rows, rows of the global batch) of each global batch from `position` on."""
        own, start = OwnRandomness(position.seed, position.epoch), position.samples
        self._requests.fill(self._request(first, indices, position) for first, indices in order.batches(start))
        with own.continued():
            batches = iter(self._rows)
        for _, indices in order.batches(start):
            # Only without workers does the person's code run here, and draw.
            with nullcontext() if self._rows.num_workers else own.borrowed():
                batch = next(batches)
            # Beyond the rows of the batch there is only its spare row, of which nothing is taken.
            yield (batch if self._axis.index < len(indices) else take_rows(batch, 0, 0, total=1)), len(indices)

    def _request(self, first: int, indices: list, position: Position) -> RowRequest:
        start, stop = split_range(len(indices), self._axis.size, self._axis.index)
        if start == stop:
            start, stop = 0, 1
        return RowRequest(indices[start:stop], first + start, position.seed, position.epoch)


@dataclass(frozen=True)
class RowRequest:
    """Some consecutive rows of a global batch: their data set indices, and the place of the first one in the epoch."""

    indices: list
    first: int
    seed: int
    epoch: int


class Requests:
    """The sampler of a rebuilt loader: what is to be read in the pass that begins next."""

    def __init__(self) -> None:
        self._items: Iterable[RowRequest] = ()

    def fill(self, items: Iterable[RowRequest]) -> None:
        """Sets the requests of the next pass."""
        self._items = items

    def __iter__(self) -> Iterator[RowRequest]:
        return iter(self._items)


class RowReader(Dataset):
    """Reads and collates requested rows; each sample's randomness follows its place in the epoch and nothing else.

    A data set that reads several samples at once, and the collate function, are seeded by the place of their first row.
    """

    def __init__(self, loader: DataLoader):
        self._dataset, self._collate = loader.dataset, loader.collate_fn

    def __getitem__(self, request: RowRequest) -> Any:
        read_many = getattr(self._dataset, "__getitems__", None)
        if read_many is not None:
            self._seed(request, request.first)
            rows = read_many(request.indices)
        else:
            rows = []
            for place, index in enumerate(request.indices, request.first):
                self._seed(request, place)
                rows.append(self._dataset[index])
        self._seed(request, request.first)
        return self._collate(rows)

    def _seed(self, request: RowRequest, place: int) -> None:
        seed_everything(request.seed, request.epoch, place)


def _as_it_is(batch: Any) -> Any:
    return batch
