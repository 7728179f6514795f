"""Attention over a grid of ranks: heads are exchanged inside the groups of Ulysses, blocks travel along the rings between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from phalanx.cluster.mesh import Axis
from phalanx.kernels.attention import Form
from phalanx.kernels.attention_sight import Sight
from phalanx.layout import split_range
from phalanx.parallel.sequence.cut import Rows
from phalanx.parallel.sequence.heads import to_heads, to_tokens
from phalanx.parallel.sequence.ring import ring_attention


@dataclass(frozen=True)
class Grid:
    """The two axes over which a sequence is cut."""

    ring: Axis
    ulysses: Axis

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, form: Form, rows: Rows, grid: Grid) -> torch.Tensor:
    """The attention of this rank's tokens to all tokens of their rows that they see.

    Shapes: q (B, H, n, D), k (B, G, n, D), v (B, G, n, E) -> (B, H, n, E), n = `rows.cut.local_length`.
    Cost: `(u - 1)/u (2 h + 2 h_kv) b s / u` elements for u ranks of Ulysses, forward and again backward; of a ring of r ranks
    `(r - 1) 2 b s h_kv / r` forward and twice that backward.
    """
    axis, num_heads = grid.ulysses, q.shape[1]
    if axis.size == 1:
        return ring_attention(q, k, v, sight, form, rows, grid.ring)
    if form.dense is not None and form.dense.shape[1] > 1:
        start, stop = split_range(num_heads, axis.size, axis.index)
        form = replace(form, dense=form.dense[:, start:stop])
    out = ring_attention(*to_heads(q, k, v, axis), sight, form, rows, grid.ring)
    return to_tokens(out, axis, num_heads)
