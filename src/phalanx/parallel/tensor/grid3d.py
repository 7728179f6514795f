"""3D tensor parallelism: inputs, weights and outputs each cut into q^3 parts on a cube of ranks.

Rows of the batch lie over `plane`, features over `row` times `col`. A projection into a group gathers its inputs over `col` and its
weight over `plane`, multiplies, and adds up partial outputs over `row`, of which each rank keeps a part; the projection out of the group
does so with `row` and `col` exchanged, which brings the features back to where the stream has them. Each gather's dual is a scattered
sum and the other way round.

Cost: elements that a rank sends for a layer with activations x and 12 h^2 weights, forward and backward, without norms:
(q-1)/q^3 (39x + 36h^2); with `keep`, which holds the gathered inputs and weights, 2(q-1)/q^3 (16x + 12h^2).
Memory: 1/q^3 of weights, gradients and activations (with `keep` 1/q^2 of inputs and weights); for the time of one projection 1/q^2 of
its input, weight and output.
Source: Agarwal et al. 1995 (3D products); Bian et al. 2021 (tensor parallelism in three dimensions).
"""

from __future__ import annotations

from phalanx.cluster.mesh import Mesh
from phalanx.parallel.tensor.grid import Grid


def grid_3d(mesh: Mesh, *, keep: bool = False) -> Grid:
    """The cube over the axes `plane`, `row` and `col` of the mesh."""
    return Grid(mesh.axis("plane"), mesh.axis("row"), mesh.axis("col"), mesh.axis("row", "col"), keep)
