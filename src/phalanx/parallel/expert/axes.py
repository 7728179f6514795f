"""The ranks among which experts are divided, and what the others are to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.cluster.mesh import Axis, Mesh
from phalanx.cluster.placement import Placement
from phalanx.layout import Layout
from phalanx.parallel.expert.exchange import rank_along


@dataclass(frozen=True)
class ExpertAxes:
    """The ranks among which the experts of every layer are divided.

    `hops` together hold all experts once, outermost first; ranks along `data` hold the same ones and see other tokens. Tensor ranks
    see the same tokens and hold a part of every expert's inner width each (`width`), or see other tokens of the same rows
    (`sequence`), as they do where the sequence is split between layers. `tokens` has all ranks that see other tokens.
    """

    hops: tuple[Axis, ...]
    data: Axis
    width: Axis | None = None
    sequence: Axis | None = None

    @classmethod
    def of(cls, mesh: Mesh, size: int, *, by_sequence: bool, fewest: int, local_size: int = 1) -> ExpertAxes:
        """Groups of `size` data ranks. Tensor ranks that see other tokens are further places for experts, if there are enough of them.

        `fewest` is the smallest number of experts of a layer, `local_size` the number of ranks of a node.
        """
        data, group = mesh.split(mesh.axis("dp", "cp"), size, names=("edp", "ep"))
        tensor = mesh.axis("tp")
        hops = hops_of(mesh, group, local_size)
        if tensor.size == 1:
            return cls(hops, data)
        if not by_sequence:
            return cls(hops, data, width=tensor)
        if fewest >= size * tensor.size:
            return cls((*hops, tensor), data)
        return cls(hops, data, sequence=tensor)

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.hops)

    @property
    def index(self) -> int:
        return rank_along(self.hops)

    @property
    def is_divided(self) -> bool:
        return self.size > 1 or self.width is not None or self.sequence is not None

    def place(self, layout: Layout) -> Placement:
        """The placement of a part of the experts that is not split by width."""
        copies = (self.width,) if self.width is not None else ()
        return Placement(layout, self.data, sums=(self.sequence,) if self.sequence is not None else (), copies=copies)


def hops_of(mesh: Mesh, axis: Axis, local_size: int) -> tuple[Axis, ...]:
    """The axis as one hop, or as one between nodes and one inside, where it has as many neighbours in each of several nodes."""
    nodes = [rank // local_size for rank in axis.ranks]
    inside = nodes.count(nodes[0])
    runs = [nodes[start : start + inside] for start in range(0, axis.size, inside)]
    if inside in (1, axis.size) or any(run != [run[0]] * inside for run in runs):
        return (axis,)
    return mesh.split(axis, inside, names=("ep:between", "ep:inside"))
