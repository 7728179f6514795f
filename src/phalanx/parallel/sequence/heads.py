"""Ulysses: an all-to-all turns "my tokens of all heads" into "all tokens of my heads", and back.

Heads need not divide: ranks get as equal numbers of query heads as there are, and of key heads those that these need, so a key
head may go to several ranks, and its gradient comes back as a sum.

Shapes: B rows, H heads, n tokens of a rank, N = n times the ranks, D width.
Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.kernels.attention_sight import Range
from phalanx.layout import split_range


@dataclass(frozen=True)
class HeadSplit:
    """Which heads of `num_heads` queries and `num_groups` keys and values each of `ranks` works on."""

    num_heads: int
    num_groups: int
    ranks: int

    @property
    def queries(self) -> list[Range]:
        return [split_range(self.num_heads, self.ranks, rank) for rank in range(self.ranks)]

    @property
    def keys(self) -> list[Range]:
        share = self.num_heads // self.num_groups
        return [(start // share, (stop - 1) // share + 1) if start < stop else (0, 0) for start, stop in self.queries]

    def key_of_query(self, rank: int) -> list[int] | None:
        """For each query head of a rank its key head among the rank's own; None where equal runs of queries share a key."""
        (start, stop), (first, last) = self.queries[rank], self.keys[rank]
        share = self.num_heads // self.num_groups
        chosen = [head // share - first for head in range(start, stop)]
        groups = last - first
        regular = groups > 0 and len(chosen) % groups == 0 and chosen == [index * groups // len(chosen) for index in range(len(chosen))]
        return None if regular or not chosen else chosen


def to_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of this rank's heads. Shapes: (B, H, n, D) -> (B, own heads, N, D). Cost: (u - 1)/u of q and the keys sent."""
    split = HeadSplit(q.shape[1], k.shape[1], axis.size)
    q, k, v = _ToHeads.apply(axis, split, q, k, v)
    chosen = split.key_of_query(axis.index)
    if chosen is not None:
        index = torch.tensor(chosen, device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    return q, k, v


def to_tokens(out: torch.Tensor, axis: Axis, num_heads: int) -> torch.Tensor:
    """This rank's tokens of all heads. Shapes: (B, own heads, N, E) -> (B, H, n, E)."""
    return _ToTokens.apply(out, axis, HeadSplit(num_heads, num_heads, axis.size).queries)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, split: HeadSplit, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axis, ctx.ranges = axis, [split.queries, split.keys, split.keys]
        ctx.heads = [tensor.shape[1] for tensor in tensors]
        return tuple(_spread(tensors, ctx.ranges, axis))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_collect(grads, ctx.ranges, ctx.heads, ctx.axis)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, axis: Axis, ranges: list[Range]) -> torch.Tensor:
        ctx.axis, ctx.ranges = axis, ranges
        return _collect([out], [ranges], [ranges[-1][1]], axis)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _spread([grad], [ctx.ranges], ctx.axis)[0], None, None


def _spread(tensors: Sequence[torch.Tensor], ranges: Sequence[Sequence[Range]], axis: Axis) -> list[torch.Tensor]:
    """Sends each rank the heads it works on and joins the tokens that come: (B, H, n, D) -> (B, own heads, N, D)."""
    sent = [tensor[:, start:stop] for peer in range(axis.size) for tensor, heads in zip(tensors, ranges) for start, stop in [heads[peer]]]
    shapes = [(t.shape[0], heads[axis.index][1] - heads[axis.index][0], *t.shape[2:]) for t, heads in zip(tensors, ranges)]
    arrived = _exchange(sent, len(tensors), [shapes] * axis.size, tensors[0], axis)
    counts = [torch.Size(shape).numel() for shape in shapes]
    joined, offset, table = [], 0, arrived.view(axis.size, -1) if arrived.numel() else arrived.view(axis.size, 0)
    for (rows, heads, tokens, width), count in zip(shapes, counts):
        part = table[:, offset : offset + count].view(axis.size, rows, heads, tokens, width)
        joined.append(part.permute(1, 2, 0, 3, 4).reshape(rows, heads, axis.size * tokens, width))
        offset += count
    return joined


def _collect(tensors: Sequence[torch.Tensor], ranges: Sequence[Sequence[Range]], totals: Sequence[int], axis: Axis) -> list[torch.Tensor]:
    """The adjoint of `_spread`: (B, own heads, N, D) -> (B, H, n, D); what arrives for one head from several ranks is summed."""
    tokens = tensors[0].shape[2] // axis.size
    sent = [tensor[:, :, peer * tokens : (peer + 1) * tokens] for peer in range(axis.size) for tensor in tensors]
    shapes = [
        [(t.shape[0], heads[peer][1] - heads[peer][0], tokens, t.shape[3]) for t, heads in zip(tensors, ranges)]
        for peer in range(axis.size)
    ]
    arrived, offset = _exchange(sent, len(tensors), shapes, tensors[0], axis), 0
    results = [t.new_zeros((t.shape[0], total, tokens, t.shape[3])) for t, total in zip(tensors, totals)]
    for peer in range(axis.size):
        for result, heads, shape in zip(results, ranges, shapes[peer]):
            count = torch.Size(shape).numel()
            result[:, heads[peer][0] : heads[peer][1]] += arrived[offset : offset + count].view(shape)
            offset += count
    return results


def _exchange(
    sent: Sequence[torch.Tensor], per_peer: int, shapes: Sequence[Sequence[tuple[int, ...]]], like: torch.Tensor, axis: Axis
) -> torch.Tensor:
    """One all-to-all of several tensors for every peer, each written once into the buffer that leaves."""
    sizes = [part.numel() for part in sent]
    leaving = like.new_empty(sum(sizes))
    for part, room in zip(sent, leaving.split(sizes)):
        room.view(part.shape).copy_(part)
    in_splits = [sum(sizes[start : start + per_peer]) for start in range(0, len(sizes), per_peer)]
    out_splits = [sum(torch.Size(shape).numel() for shape in of_peer) for of_peer in shapes]
    arriving = like.new_empty(sum(out_splits))
    comm.all_to_all(arriving, leaving, axis, out_splits, in_splits)
    return arriving
