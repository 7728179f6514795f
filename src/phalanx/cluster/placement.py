"""Where one parameter lies among the ranks: from it follows what is summed, what counts in the norm, what is sharded and who saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from phalanx.cluster.mesh import Axis
from phalanx.errors import ShapeError
from phalanx.layout import Layout


@dataclass(frozen=True)
class Placement:
    """The box of a logical parameter that this rank holds, and the ranks that hold the same box.

    Those ranks differ in what they do with it. Along `data` they see other rows: gradients are summed, and ZeRO shards over it;
    None is the data axis of the whole model. Along `sums` they do different parts of the work on the same rows: gradients are
    summed. Along `copies` they do the same work: gradients are equal, and are counted and saved once.
    """

    layout: Layout
    data: Axis | None = None
    sums: tuple[Axis, ...] = ()
    copies: tuple[Axis, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that counts and saves, as far as `sums` and `copies` go."""
        return all(axis.index == 0 for axis in (*self.sums, *self.copies))

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for parameters that are summed, sharded and copied over the same ranks, and so may share a flat tensor.

        In which order a sum goes over the ranks depends on the place in the flat tensor. Copies come to the same bits only where they
        lie at the same place on each of their ranks, and so not behind boxes whose sizes differ.
        """
        return self.data and self.data.ranks, *(tuple(axis.ranks for axis in axes if axis.size > 1) for axes in (self.sums, self.copies))


class Placements:
    """The placements of one model's parameters, as the passes of a plan declare them.

    What no pass declares is held whole by every rank; those along `copies` do the same work with it, those along `sums` other work.
    """

    def __init__(self, copies: Sequence[Axis] = (), sums: Sequence[Axis] = ()):
        self.copies = tuple(axis for axis in copies if axis.size > 1)
        self.sums = tuple(axis for axis in sums if axis.size > 1)
        self._declared: dict[tuple[nn.Module, str], Placement] = {}

    def declare(self, module: nn.Module, attribute: str, placement: Placement) -> None:
        """Says where the parameter `module.attribute` lies; the engine cuts it when it takes it over."""
        self._declared[module, attribute] = placement

    def declared(self, module: nn.Module, attribute: str) -> Placement | None:
        """What a pass has said of `module.attribute` so far."""
        return self._declared.get((module, attribute))

    def add_sums(self, owners: Sequence[tuple[nn.Module, str]], shape: Sequence[int], axis: Axis) -> None:
        """Says that the ranks of `axis` hold the same box of one parameter, whatever box that is, and do different work with it."""
        placement = self.of(owners, shape)
        for module, attribute in owners:
            self.declare(module, attribute, replace(placement, sums=(*placement.sums, axis)))

    def of(self, owners: Iterable[tuple[nn.Module, str]], shape: Sequence[int]) -> Placement:
        """The placement of a parameter of a logical shape, under all (module, attribute) pairs that share it.

        Raises: ShapeError where they disagree.
        """
        owners = list(owners)
        found = {self._declared[owner] for owner in owners if owner in self._declared}
        if len(found) > 1 or (found and not all(owner in self._declared for owner in owners)):
            names = ", ".join(f"{type(module).__name__}.{attribute}" for module, attribute in owners)
            raise ShapeError(f"{names} share one weight that the plan cuts in several ways", remedy="untied weights")
        return found.pop() if found else Placement(Layout.whole(shape), sums=self.sums, copies=self.copies)

    @property
    def is_first(self) -> bool:
        """Whether this rank counts and saves what is not declared."""
        return all(axis.index == 0 for axis in (*self.sums, *self.copies))
