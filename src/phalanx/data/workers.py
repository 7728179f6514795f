"""Loader workers: rebuilding a person's `DataLoader` around another reader without losing one of its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from phalanx.errors import ConfigError


def rebuilt(loader: DataLoader, dataset: Dataset, **changes: Any) -> DataLoader:
    """A loader over `dataset` with the workers, prefetching and pinning of another.

    Raises: ConfigError where the other does not keep the order of batches.
    """
    workers: dict[str, Any] = {}
    if loader.num_workers:
        if not loader.in_order:
            raise ConfigError(
                "in_order=False lets workers hand out batches in any order, so a place in the data has no meaning",
                remedy="in_order=True",
            )
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": StartWorker(loader.dataset, loader.worker_init_fn),
        }
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        **workers,
        **changes,
    )


class StartWorker:
    """Starts a worker of a rebuilt loader: shows the person's code its own data set, then runs its `worker_init_fn`."""

    def __init__(self, dataset: Any, person_init: Callable[[int], None] | None):
        self._dataset, self._person_init = dataset, person_init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        object.__setattr__(info, "dataset", self._dataset)
        _watch(info)
        if self._person_init is not None:
            self._person_init(worker)


class SharedStream(IterableDataset):
    """An iterable data set read by several workers, which refuses one that every worker would read in full.

    Such a data set must share itself out by `get_worker_info()`; one that never asks yields each sample once per worker.
    """

    def __init__(self, dataset: Any, num_workers: int):
        self._dataset, self._num_workers = dataset, num_workers

    def __iter__(self) -> Iterator[Any]:
        for sample in self._dataset:
            if self._num_workers > 1 and not _QUESTIONS:
                raise ConfigError(
                    f"{type(self._dataset).__name__} does not ask for its worker, so {self._num_workers} workers yield each sample "
                    f"{self._num_workers} times",
                    remedy="num_workers=1, or a data set that shares itself out by torch.utils.data.get_worker_info()",
                )
            yield sample


# What the person's code asked of the worker info in this worker process.
_QUESTIONS: list[str] = []


def _watch(info: Any) -> None:
    class WatchedInfo(type(info)):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            _QUESTIONS.append(name)
            return super().__getattribute__(name)

    _QUESTIONS.clear()
    object.__setattr__(info, "__class__", WatchedInfo)
