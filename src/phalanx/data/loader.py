"""The boosted loader: a person's loader of global batches, seen from one index of the data axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from phalanx.cluster.mesh import Axis
from phalanx.data.position import Position
from phalanx.data.reader import MapSource
from phalanx.data.stream import StreamSource
from phalanx.errors import ConfigError


def boost_loader(loader: Iterable, *, axis: Axis, seed: int = 0, world: Axis | None = None) -> BoostedLoader:
    """Cuts the global batches of a loader into the rows of each index of the data axis.

    The batches of `loader` are those of the single-device program. A map-style `DataLoader` is rebuilt so that each index
    reads only its rows, shuffled by `seed` and epoch; of any other iterable every rank reads all and keeps its rows.
    `world` holds all ranks that iterate together (default: `axis`); over it they agree on a custom sampler's order and on
    the end of a stream.

    Raises: ConfigError where there is no data, or where it is shared out among ranks already.
    """
    if isinstance(loader, BoostedLoader):
        raise ConfigError("the loader is boosted already", remedy="the loader of the single-device program")
    return BoostedLoader(loader, axis=axis, seed=seed, world=world or axis)


class BoostedLoader:
    """Iterates over this index's rows of each global batch; its place is counted in global samples.

    Each pass is an epoch. As with a plain loader a pass that was broken off is over, and the next one begins afresh; only
    `load_state_dict` lets it begin in the middle.
    """

    def __init__(self, loader: Iterable, *, axis: Axis, seed: int, world: Axis):
        self.loader = loader
        is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        self._source: Any = (MapSource if is_map_style else StreamSource)(loader, axis, world)  # type: ignore[arg-type]
        self._position = Position(seed)
        self._order_digest: int | None = None
        self._resumes = False

    @property
    def dataset(self) -> Any:
        return self.loader.dataset  # type: ignore[attr-defined]

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def __len__(self) -> int:
        """Global batches in a whole epoch, the same for every number of data ranks."""
        return self._source.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, thereby the shuffle, of the next pass; a place loaded in that very epoch is kept."""
        if not (self._resumes and epoch == self._position.epoch):
            self._start(epoch)

    def state_dict(self) -> dict[str, int | None]:
        """The place behind the last batch that was handed out, whatever the workers have read ahead; equal on all ranks."""
        return asdict(self._position) | {"num_samples": self._source.num_samples, "order_digest": self._order_digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next pass go on behind the place in `state`, also under another number of data ranks.

        The seed of the saved run is taken over, since the place is one in its order.
        Raises: ConfigError where the place belongs to a data set of another size, or is not one.
        """
        try:
            position = Position(**{name: int(state[name]) for name in ("seed", "epoch", "batches", "samples")})
        except KeyError as missing:
            raise ConfigError(f"the saved place in the data lacks {missing}", allowed="what BoostedLoader.state_dict returned") from None
        now, then = self._source.num_samples, state.get("num_samples")
        if position.batches and now != then:
            raise ConfigError(
                f"the saved place is in a data set of {_count(then)}, and this one has {_count(now)}",
                remedy="the data set of the saved run, or a place between two epochs",
            )
        self._position, self._order_digest, self._resumes = position, state.get("order_digest"), True

    def __iter__(self) -> Iterator[Any]:
        if self._position.batches and not self._resumes:
            self._start(self._position.epoch + 1)
        # A pass moves its own position: one that is still running elsewhere no longer moves the loader's.
        self._position = replace(self._position)
        resumes, self._resumes = self._resumes, False
        return self._run(self._position, resumes)

    def _run(self, position: Position, resumes: bool) -> Iterator[Any]:
        order = self._source.draw(position)
        self._take_digest(order.digest() if order is not None else None, resumes and position.batches > 0)
        for batch, total in self._source.read(position, order):
            position.batches += 1
            position.samples += total
            yield batch
        if not position.batches:
            raise ConfigError("the loader yielded no batch", allowed="a loader with at least one batch in each pass")
        if position is self._position:
            self._start(position.epoch + 1)

    def _take_digest(self, drawn: int | None, resumes: bool) -> None:
        if resumes and drawn != self._order_digest:
            raise ConfigError(
                "the sampler drew another order than in the run whose place was loaded, so samples would repeat or be left out",
                remedy="a sampler whose order follows from its arguments, the epoch, or the global random state",
            )
        self._order_digest = drawn

    def _start(self, epoch: int) -> None:
        self._position, self._order_digest, self._resumes = Position(self._position.seed, epoch), None, False


def _count(samples: int | None) -> str:
    return "unknown size" if samples is None else f"{samples} samples"
