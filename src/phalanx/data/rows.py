"""Rows of a batch: how many there are, taking some of them, and gathering per-row results in global order.

A batch is a tensor, or tensors inside mappings, sequences and dataclasses. Tensors whose first dimension is the batch are
cut, and so are lists with one item per row; everything else belongs to the whole batch and is passed as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy
import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ShapeError

_SPARE = "_phalanx_spare_row"


def num_rows(batch: Any) -> int:
    """The number of rows of a batch: the first dimension that most entries of a mapping share, or all of a plain sequence.

    A list may be a structure or hold one item per row, so it speaks for its own length as well as for what it holds.
    Raises: ShapeError where no size is named, or where two are equally frequent.
    """
    if isinstance(batch, torch.Tensor | numpy.ndarray) and batch.ndim:
        return int(batch.shape[0])
    entries = _children(batch)
    votes = Counter(size for entry in entries for size in _possible_sizes(entry))
    is_plain = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    if is_plain and not (votes and any(isinstance(entry, torch.Tensor | numpy.ndarray) for entry in entries)):
        votes[len(entries)] += 1
    if not votes:
        raise ShapeError(
            f"a batch of type {type(batch).__name__} has no tensor with a first dimension, so its rows cannot be told apart",
            allowed="tensors whose first dimension is the batch, also inside mappings, sequences and dataclasses",
        )
    (size, count), *others = votes.most_common()
    if others and (is_plain or others[0][1] == count):
        raise ShapeError(
            f"the entries of a batch begin with {size} and with {others[0][0]}, so its rows cannot be told apart",
            allowed="one first dimension that most entries of a mapping, or all of a sequence, share",
            remedy="a mapping from names to tensors, without what is not per row",
        )
    return size


def take_rows(batch: Any, start: int, stop: int, total: int | None = None) -> Any:
    """Rows start to stop of a batch that has `total` rows (default: `num_rows(batch)`), in the batch's own structure.

    Where that leaves none, the result carries one real row of the batch, which `spare_row` returns.
    """
    total = num_rows(batch) if total is None else total
    spare = _take(batch, slice(0, 1), total) if start >= stop and total else None
    return _take(batch, slice(start, stop), total, spare)


def spare_row(batch: Any) -> Any:
    """One real row of the global batch from which `batch` got no rows, or None where it has rows.

    The row hangs on the batch's tensors as loaded: ask before copying them to another device.
    """
    return next((getattr(leaf, _SPARE) for leaf in _arrays(batch) if hasattr(leaf, _SPARE)), None)


def gather_rows(local: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Per-row results of all indices of the data axis, in the order of the global batch.

    Shapes: (local rows, ...) -> (rows of the global batch, ...); the number of local rows may differ, also be 0.
    Cost: every index sends its rows to every other.
    """
    if axis.size == 1:
        return local
    parts = comm.gather_objects(local.detach().cpu(), axis)
    return torch.cat(parts).to(local.device)


def _arrays(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor | numpy.ndarray):
        yield batch
    else:
        for item in _children(batch):
            yield from _arrays(item)


def _children(batch: Any) -> list:
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else []


def _possible_sizes(entry: Any) -> set[int]:
    if isinstance(entry, torch.Tensor | numpy.ndarray):
        return {int(entry.shape[0])} if entry.ndim else set()
    inner = {size for child in _children(entry) for size in _possible_sizes(child)}
    return inner | {len(entry)} if isinstance(entry, list | tuple) and not hasattr(entry, "_fields") else inner


def _take(batch: Any, rows: slice, total: int, spare: Any = None) -> Any:
    if isinstance(batch, torch.Tensor | numpy.ndarray):
        if not batch.ndim or batch.shape[0] != total:
            return batch
        part = batch[rows]
        if spare is not None and isinstance(part, torch.Tensor):
            setattr(part, _SPARE, spare)
        return part
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and len(batch) == total and not _is_cut(batch, total):
        return batch[rows]
    return _rebuild(batch, lambda item: _take(item, rows, total, spare))


def _is_cut(batch: Any, total: int) -> bool:
    """Whether some tensor inside has the batch as its first dimension (so that a list of `total` items is a structure)."""
    return any(leaf.ndim and leaf.shape[0] == total for leaf in _arrays(batch))


def _rebuild(batch: Any, function: Callable[[Any], Any]) -> Any:
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {field.name: function(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **changes)
    if isinstance(batch, Mapping):
        values = {key: function(value) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return values
        clone = copy.copy(batch)  # keeps the class and what it holds besides (a default factory, encodings)
        clone.update(values)
        return clone
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(function(item) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(function(item) for item in batch)
    return batch
