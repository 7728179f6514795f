"""2.5D tensor parallelism: d squares of q x q ranks, each with all weights in blocks, and with its own rows of the batch.

A square works as in two dimensions, on 1/d of the rows. `depth` is an axis of data: gradients are summed over it once in a step, and
ZeRO shards over it. It trades memory for bytes: the activations that move shrink by d, the weights that move do not.

Cost: elements that a rank sends for a layer with activations x and 12 h^2 weights: 3(q-1)/q^2 (7x/d + 12h^2), with the options of
`grid2d` alike, and once in an optimizer step 2(d-1)/d 12h^2/q^2.
Memory: 1/(q^2 d) of activations, 1/q^2 of weights and gradients.
Source: Solomonik and Demmel 2011 (2.5D products); Wang et al. 2021 (Tesseract).
"""

from __future__ import annotations

from phalanx.cluster.mesh import Mesh
from phalanx.parallel.tensor.grid import Grid
from phalanx.parallel.tensor.grid2d import grid_2d


def grid_25d(mesh: Mesh, *, keep: bool = False, outputs_move: bool = False) -> Grid:
    """The square of this rank's depth, over the axes `row` and `col` of the mesh."""
    return grid_2d(mesh, keep=keep, outputs_move=outputs_move)
