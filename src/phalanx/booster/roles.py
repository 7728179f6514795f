"""What the axes of a mesh are for under a plan: which ranks see other rows, which share state, which do the same work."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster.mesh import Axis, Mesh
from phalanx.plan import Plan


@dataclass(frozen=True)
class AxisRoles:
    """`data` has the ranks that hold the same state and over which ZeRO shards it.

    `rows` cuts the rows of a data index once more, as the grids of tensor parallelism do; `stored` are those of its ranks that hold
    other parts of the weights. `copies` compute the same loss.
    """

    data: Axis
    rows: Axis
    stored: Axis
    copies: Axis

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh) -> AxisRoles:
        none = Axis("none", (mesh.rank,), 0)
        data = mesh.axis("dp", "cp")
        if plan.tp_kind == "1d":
            return cls(data, none, none, mesh.axis("tp"))
        if plan.tp_kind == "3d":
            return cls(data, mesh.axis("plane"), mesh.axis("plane"), mesh.axis("row", "col"))
        rows, col = mesh.axis("row"), mesh.axis("col")
        if plan.tp_kind == "2d":
            return cls(data, rows, rows, col)
        return cls(mesh.axis("dp", "cp", "depth"), mesh.axis("depth", "row"), rows, col)
