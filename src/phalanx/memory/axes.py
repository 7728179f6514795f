"""The ranks among which one kind of parameter is sharded, and those that hold the same shards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.cluster.mesh import Axis, Mesh


@dataclass(frozen=True)
class StateAxes:
    """A data axis cut for the state: `shards` within a group, `replicas` between groups.

    `reduce` has the ranks of `shards` on a channel of its own: gathers and reductions interleave freely.
    """

    shards: Axis
    replicas: Axis
    reduce: Axis

    @classmethod
    def cut(cls, mesh: Mesh, data: Axis, group: int | None = None) -> StateAxes:
        """Groups of `group` neighbours (of the largest common divisor, where it does not divide the axis), or one group of all."""
        inner = math.gcd(group or data.size, data.size)
        names = ("replicas", "shards") if inner < data.size else ("", data.name)
        replicas, shards = mesh.split(data, inner, names=names)
        return cls(shards, replicas, mesh.channel(shards, "reduce"))
