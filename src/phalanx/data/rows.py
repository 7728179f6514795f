"""Rows of a batch: how many there are, taking some of them, and gathering per-row results in global order.

A batch is a tensor, or tensors inside mappings, sequences and dataclasses. Tensors whose first dimension is the batch are
cut, and so are lists with one item per row; everything else belongs to the whole batch and is passed as it is.

What belongs to the whole batch is decided where it is cut first. Its rows may later be cut again, and by then there may be
just as many of them as a whole tensor is long; so the parts remember what stayed whole, and later cuts ask them first.
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

# Attributes of the tensors that a cut makes. What is shared with other batches gets none: there it may be cut.
_SPARE = "_phalanx_spare_row"
_WHOLE = "_phalanx_whole"


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
    spare = take_rows(batch, 0, 1, total) if start >= stop and total else None
    return _Cut(batch, slice(start, stop), total).take(batch, spare)


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


class _MarkedArray(numpy.ndarray):
    """An array that takes attributes, as a tensor does."""


class _Cut:
    """One cut of a batch: which tensors and lists it divides, and what it leaves whole."""

    def __init__(self, batch: Any, rows: slice, total: int):
        self.rows, self.total = rows, total
        self.known_whole = {id(item) for leaf in _arrays(batch) for item in getattr(leaf, _WHOLE, ())}
        # Marks hang on the rows of tensors; where only lists are divided they hang on new views of whole tensors.
        self.divides_tensors = self._divides_any(batch)
        self.whole: list = []
        self.made: list = []

    def take(self, batch: Any, spare: Any) -> Any:
        part = self._take(batch)
        for leaf in self.made:
            if spare is not None:
                setattr(leaf, _SPARE, spare)
            if self.whole:
                setattr(leaf, _WHOLE, self.whole)
        return part

    def _take(self, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor | numpy.ndarray):
            return self._mark(batch[self.rows]) if self._divides(batch) else self._keep(batch)
        is_plain = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
        if not is_plain or self._divides_any(batch):
            return _rebuild(batch, self._take)
        if len(batch) == self.total and id(batch) not in self.known_whole:
            return self._keep(batch[self.rows])
        part = _rebuild(batch, self._take)
        self.whole.append(part)
        return part

    def _divides(self, leaf: Any) -> bool:
        return bool(leaf.ndim) and leaf.shape[0] == self.total and id(leaf) not in self.known_whole

    def _divides_any(self, batch: Any) -> bool:
        """Whether some tensor inside has the batch as its first dimension (so that a list of `total` items is a structure)."""
        return any(self._divides(leaf) for leaf in _arrays(batch))

    def _keep(self, value: Any) -> Any:
        """A whole tensor, or the items of some rows: no later cut divides a tensor in there."""
        if not self.divides_tensors and next(_arrays(value), None) is not None:
            if not isinstance(value, torch.Tensor | numpy.ndarray):
                return _rebuild(value, self._keep)
            value = self._mark(value[...])
        self.whole.extend(leaf for leaf in _arrays(value) if leaf.ndim)
        return value

    def _mark(self, made: Any) -> Any:
        if type(made) is numpy.ndarray:
            made = made.view(_MarkedArray)
        self.made.append(made)
        return made


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
