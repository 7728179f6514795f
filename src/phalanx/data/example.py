"""A few rows of a loader to try a model out on, without moving the loader on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from phalanx.data.rows import num_rows, take_rows

FEW_ROWS = 2


def first_batch(loader: Any) -> Any:
    """The first rows of what a loader yields; None where looking at them would use them up.

    Random transforms of a dataset draw from a copy of the generator.
    """
    if isinstance(loader, Sequence) and len(loader):
        batch = loader[0]
        return take_rows(batch, 0, min(FEW_ROWS, num_rows(batch)))
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        with torch.random.fork_rng(devices=[]):
            items = [loader.dataset[index] for index in range(min(FEW_ROWS, len(loader.dataset)))]  # type: ignore[arg-type]
        return loader.collate_fn(items) if items else None
    return None
