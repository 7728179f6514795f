"""2D tensor parallelism: every matrix in blocks on a square of q x q ranks.

Rows of the batch lie over `row`, features over `col`; of a weight the rank has a block of 1/q of its outputs by 1/q of those.
A projection gathers its inputs over `col` and its weight over `row`; the output stays where it is computed. Backward, both are gathered
again (or kept, with `keep`), and both gradients are summed back the same ways: the gather's dual is the scattered sum.

Cost: elements that a rank sends for a layer with activations x and 12 h^2 weights, forward and backward, without norms:
3(q-1)/q^2 (7x + 12h^2); 2(q-1)/q^2 (7x + 12h^2) with `keep`. With `outputs_move` the second projection of a pair leaves its inputs, which
may be four times as wide as its outputs, and moves the outputs: (q-1)/q^2 (10x + 36h^2), with `keep` (q-1)/q^2 (8x + 24h^2).
Memory: 1/q^2 of weights, gradients and activations; for the time of one projection 1/q of its input and of its weight.
Source: van de Geijn and Watts 1997 (SUMMA); Xu et al. 2021 (Optimus).
"""

from __future__ import annotations

from phalanx.cluster.mesh import Axis, Mesh
from phalanx.parallel.tensor.grid import Grid


def grid_2d(mesh: Mesh, *, keep: bool = False, outputs_move: bool = False) -> Grid:
    """The grid over the axes `row` and `col` of the mesh."""
    none = Axis("none", (mesh.rank,), 0)
    return Grid(mesh.axis("row"), none, mesh.axis("col"), mesh.axis("col"), keep, outputs_move)
