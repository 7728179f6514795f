"""What one stage hands to the next: the tensors with which the next block would have been called, and how to put them there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


@dataclass(frozen=True)
class Absent:
    """A tensor by its shape alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Entry:
    """One tensor that is handed on: at which places of the flattened arguments it stands, and whether a gradient comes back.

    `marks` are what layers have noted on it for the layers that follow.
    """

    places: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    marks: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, places: Sequence[int]) -> Entry:
        marks = tuple((name, value) for name, value in vars(tensor).items() if name.startswith("_phalanx_"))
        return cls(tuple(places), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, marks)

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        for name, value in self.marks:
            setattr(tensor, name, value)
        return tensor


@dataclass(frozen=True)
class Header:
    """All that the next stage must know before the tensors come; `outputs` are what blocks of each stack return, by shape."""

    entries: tuple[Entry, ...]
    outputs: dict[str, Any] = field(default_factory=dict)

    def dumps(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def loads(cls, data: bytes) -> Header:
        return pickle.loads(data)

    @property
    def learning(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.learns)

    @property
    def places(self) -> frozenset[int]:
        return frozenset(place for entry in self.entries for place in entry.places)


@dataclass
class Handed:
    """A header with its tensors, in the order of its entries."""

    header: Header
    tensors: list[torch.Tensor]

    @property
    def learning(self) -> list[torch.Tensor]:
        return [tensor for entry, tensor in zip(self.header.entries, self.tensors) if entry.learns]


def hand_over(args: tuple, kwargs: Mapping[str, Any], outputs: dict[str, Any], is_chosen: Callable[[int, torch.Tensor], bool]) -> Handed:
    """Collects those tensors among a block's arguments that `is_chosen(place, tensor)`; the others every stage makes itself."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    places: dict[int, list[int]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and is_chosen(place, leaf):
            places.setdefault(id(leaf), []).append(place)
            tensors[id(leaf)] = leaf
    entries = tuple(Entry.of(tensor, places[key]) for key, tensor in tensors.items())
    return Handed(Header(entries, outputs), list(tensors.values()))


class Substitution:
    """Puts received tensors in the place of the poison that the forward has computed where they belong."""

    def __init__(self, handed: Handed):
        self.handed = handed
        self._by_place = {place: tensor for entry, tensor in zip(handed.header.entries, handed.tensors) for place in entry.places}
        self._replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the poison is kept, so that its id stays its own

    def at_entry(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the first block of the stage, by their places."""
        leaves, structure = tree_flatten((args, kwargs))
        for place, tensor in self._by_place.items():
            if isinstance(leaves[place], torch.Tensor):
                self._replaced[id(leaves[place])] = (leaves[place], tensor)
            leaves[place] = tensor
        return tree_unflatten(leaves, structure)

    def after(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a later block: what was replaced before is replaced again."""
        if not self._replaced:
            return args, kwargs
        leaves, structure = tree_flatten((args, kwargs))
        if not any(id(leaf) in self._replaced for leaf in leaves):
            return args, kwargs
        return tree_unflatten([self._replaced.get(id(leaf), (None, leaf))[1] for leaf in leaves], structure)


def by_shape(output: Any) -> Any:
    """An output with its tensors replaced by their shapes, small enough to be sent."""
    return tree_map(_leaf_by_shape, output)


def _leaf_by_shape(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return Absent(tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else None


def with_tensors(output: Any, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> Any:
    """The inverse of `by_shape`, with tensors from `make`."""
    return tree_map(lambda leaf: make(leaf.shape, leaf.dtype) if isinstance(leaf, Absent) else leaf, output)


def signature(batch: Any) -> Hashable:
    """What the shapes in a forward depend on: the shapes and dtypes of all tensors of a batch, and its plain values."""
    return _outline(batch, _by_value)


def arrangement(batch: Any) -> Hashable:
    """Which tensors and switches a batch has, whatever their shapes: what the way through a forward depends on."""
    return _outline(batch, lambda leaf: leaf if isinstance(leaf, bool | None) else type(leaf).__name__)


def _outline(value: Any, of_leaf: Callable[[Any], Hashable]) -> Hashable:
    """The structure of a batch with its leaves as `of_leaf` says; equal on all ranks that have equal rows."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {part.name: getattr(value, part.name) for part in fields(value)}
    if isinstance(value, Mapping):
        return tuple((str(key), _outline(item, of_leaf)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_outline(item, of_leaf) for item in value)
    return of_leaf(value)


def _by_value(leaf: Any) -> Hashable:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype)
    # Other objects may show where they lie in memory, and there ranks differ.
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
