"""Named axes of ranks: coordinates and process groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from phalanx.cluster import launch
from phalanx.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one only along one direction of the mesh, in order.

    `index` is this rank's place in `ranks`. `backend` is the one that carries processor tensors: "gloo", "fake", or "" without a
    group. `channel` tells groups over the same ranks apart.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    backend: str = field(default="", repr=False, compare=False)
    channel: str = field(default="", repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None where the axis has one rank, or the world was left.

        It is looked up, not held: the threads of a group end with the last reference to it, and must before Python does.
        """
        return launch.group_made(self.ranks, self.channel)


class Mesh:
    """All ranks of the world laid out along named axes, outermost first.

    Making one is collective: every rank of the world calls it, with the same sizes. Joined and split axes are made on first
    use, by the ranks that are on them. `parts` gives a name to several neighbouring axes: `{"tp": ("row", "col")}`.
    Raises: ConfigError where the sizes do not multiply to the world.
    """

    def __init__(self, sizes: Mapping[str, int], parts: Mapping[str, Sequence[str]] | None = None):
        world = launch.world()
        if math.prod(sizes.values()) != world.size or min(sizes.values(), default=1) < 1:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(f"the mesh {product} does not have {world.size} ranks", allowed="sizes that multiply to the world")
        self.sizes, self.parts = dict(sizes), {name: tuple(finer) for name, finer in (parts or {}).items()}
        self.rank = world.rank
        self.coordinates = dict(zip(sizes, _coordinates(world.rank, list(sizes.values())), strict=True))
        self.world = make_axis("world", range(world.size), world.rank)
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._splits: dict[tuple[str, tuple[int, ...], int], tuple[Axis, Axis]] = {}
        for name in sizes:
            self.axis(name)

    def axis(self, *names: str) -> Axis:
        """One axis, or several joined into one ("dp.cp") in the order of the mesh."""
        finer = [part for name in names for part in self.parts.get(name, (name,))]
        unknown = [name for name in finer if name not in self.sizes]
        if unknown or not names:
            raise ConfigError(f"the mesh has no axis {unknown or names}", allowed=", ".join([*self.sizes, *self.parts]))
        key = tuple(name for name in self.sizes if name in finer)
        if key not in self._axes:
            self._axes[key] = make_axis(self._name_of(key), self._ranks_along(key), self.rank)
        return self._axes[key]

    def _name_of(self, key: Sequence[str]) -> str:
        name = ".".join(key)
        for whole, parts in self.parts.items():
            name = name.replace(".".join(parts), whole)
        return name

    def size(self, name: str) -> int:
        return self.axis(name).size

    def index(self, name: str) -> int:
        return self.axis(name).index

    def split(self, axis: Axis, inner: int, names: tuple[str, str] | None = None) -> tuple[Axis, Axis]:
        """Cuts an axis into (outer, inner): runs of `inner` neighbours, and the ranks at the same place of every run.

        Raises: ShapeError where `inner` does not divide the axis.
        """
        if inner < 1 or axis.size % inner:
            raise ShapeError(
                f"axis {axis.name} of {axis.size} ranks cannot be cut into groups of {inner}", allowed=f"divisors of {axis.size}"
            )
        key = (axis.name, axis.ranks, inner)
        if key not in self._splits:
            outer_name, inner_name = names or (f"{axis.name}:outer", f"{axis.name}:inner")
            start = axis.index // inner * inner
            inside = make_axis(inner_name, axis.ranks[start : start + inner], self.rank)
            outside = make_axis(outer_name, axis.ranks[axis.index % inner :: inner], self.rank)
            self._splits[key] = (outside, inside)
        return self._splits[key]

    def channel(self, axis: Axis, name: str) -> Axis:
        """The same ranks with a group of their own: operations on it need no order relative to those on `axis`."""
        return make_axis(axis.name, axis.ranks, self.rank, channel=name)

    def rank_at(self, **coordinates: int) -> int:
        """The rank with these coordinates; axes not named keep this rank's."""
        place = {**self.coordinates, **coordinates}
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + place[name]
        return rank

    def describe(self) -> str:
        """One line for people: "4 ranks: dp 2 x tp 2; rank 1 at dp 0, tp 1"."""
        shown = [name for name, size in self.sizes.items() if size > 1] or list(self.sizes)[:1]
        sizes = " x ".join(f"{name} {self.sizes[name]}" for name in shown)
        place = ", ".join(f"{name} {self.coordinates[name]}" for name in shown)
        ranks = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
        return f"{ranks}: {sizes}; rank {self.rank} at {place}"

    def _ranks_along(self, names: Sequence[str]) -> list[int]:
        choices = itertools.product(*(range(self.sizes[name]) for name in names))
        return [self.rank_at(**dict(zip(names, choice, strict=True))) for choice in choices]


def group_of(axis: Axis) -> dist.ProcessGroup:
    """The process group of an axis that has several ranks."""
    group = axis.group
    if group is None:
        raise ShapeError(f"axis {axis.name} of {axis.size} ranks has no group", allowed="several ranks, and a world that still runs")
    return group


def make_axis(name: str, ranks: Sequence[int], rank: int, channel: str = "") -> Axis:
    """The axis over `ranks`; only they take part in making its group, and equal sets of ranks share one group per channel."""
    ranks = tuple(ranks)
    if len(ranks) == 1:
        return Axis(name, ranks, 0)
    _, backend = launch.group_of(ranks, channel)
    return Axis(name, ranks, ranks.index(rank), backend, channel)


def _coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    coordinates = []
    for size in reversed(sizes):
        rank, at = divmod(rank, size)
        coordinates.append(at)
    return coordinates[::-1]
