"""Moves tokens to the ranks of their experts and results back: each token once per rank, however many experts it chose there.

Over two axes (between nodes, then inside one) a token crosses to a node once and is spread there. Nothing is dropped or padded.
Legend: T tokens here, K choices, H hidden, M rows after a hop.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError
from phalanx.kernels.grouped_rows import GroupedRows, sort_choices
from phalanx.layout import split_sizes
from phalanx.parallel.expert.homes import Homes

# Expert numbers travel beside the weights, as integers of the same width.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sizes:
    """How many rows go to and come from every rank, hop by hop, and how many rows each expert here gets: known on the host."""

    sent: list[list[int]]
    received: list[list[int]]
    experts: list[int]


@dataclass
class Hop:
    """One all-to-all of a dispatch, to be undone by its combine."""

    axis: Axis
    rows: GroupedRows
    sent: list[int]
    received: list[int]


@dataclass
class Dispatched:
    """What the experts of this rank are to compute, and the way back.

    Shapes: `x` [M, H] and `weights` [M, K] of the tokens that came; `rows` are sorted by expert, `sizes[e]` of local expert e.
    """

    x: torch.Tensor
    sizes: list[int]
    weights: torch.Tensor
    rows: GroupedRows
    hops: list[Hop]

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of what a token's experts made of it on all ranks, back where the token lives.

        Shapes: y [M, H], summed over the experts here -> [T, H]. Cost: as `dispatch`, without the weights. Grad: the same way forth.
        """
        for hop in reversed(self.hops):
            (y,) = _Move.apply(hop.axis, hop.received, hop.sent, _rooted(y))
            y = hop.rows.add_up(y)
        return y


def dispatch(
    x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, homes: Homes, axes: Sequence[Axis], layer: str
) -> Dispatched:
    """Sends every token to the ranks that hold the experts it chose; a choice outside of 0 to E - 1 is none.

    `axes` are outermost first; the home of an expert counts ranks along them. One host read.
    Cost: over one axis of e ranks and with choices spread evenly, at most K T H (e - 1)/e elements and the weights and numbers of
    the choices; a token with several experts on one rank is sent once.
    Raises: CommError where other ranks run another layer now.
    """
    axes = [axis for axis in axes if axis.size > 1]
    home_E, place_E = homes.tables(x_TH.device)
    sizes = _agree_on_sizes(experts_TK, homes, axes, layer)
    hops = []
    for number, axis in enumerate(axes):
        inner = math.prod(after.size for after in axes[number + 1 :])
        # Choices whose experts live beyond other ranks of the hops so far fall outside of 0 to size - 1.
        next_TK = _div(_where_chosen(home_E, experts_TK, homes), inner) - rank_along(axes[:number]) * axis.size
        sent, received = sizes.sent[number], sizes.received[number]
        rows = sort_choices(next_TK, axis.size, once=True).rows(sum(sent))
        x_TH = _rooted(x_TH)
        hops.append(Hop(axis, rows, sent, received))
        experts_TK = experts_TK.index_select(0, rows.tokens)
        x_TH, weights_TK, experts_TK = _send(rows.take(x_TH), rows.take(weights_TK), experts_TK, hops[-1])
    own = rank_along(axes)
    place_TK = torch.where(_where_chosen(home_E, experts_TK, homes) == own, _where_chosen(place_E, experts_TK, homes), -1)
    rows = sort_choices(place_TK, len(homes.held[own])).rows(sum(sizes.experts))
    return Dispatched(x_TH, sizes.experts, weights_TK, rows, hops)


def _rooted(x: torch.Tensor) -> torch.Tensor:
    """A tensor with a gradient, so that every rank has the exchange in its graph, and comes to it in its backward."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()


def _where_chosen(table_E: torch.Tensor, experts_TK: torch.Tensor, homes: Homes) -> torch.Tensor:
    """The table's value for every choice, and -1 for each that names no expert."""
    chosen = (experts_TK >= 0) & (experts_TK < homes.num_experts)
    return torch.where(chosen, table_E[experts_TK.long().clamp(0, homes.num_experts - 1)], -1)


def rank_along(axes: Sequence[Axis]) -> int:
    """This rank's place among all ranks along several axes, outermost first."""
    rank = 0
    for axis in axes:
        rank = rank * axis.size + axis.index
    return rank


def _agree_on_sizes(experts_TK: torch.Tensor, homes: Homes, axes: Sequence[Axis], layer: str) -> Sizes:
    """Tells every rank how many rows will come to it by every hop; the one host read of a layer of experts.

    A rank tells each rank of the first axis all that concerns it: rows of this hop, of the later hops, rows of each expert. Sums of
    these are passed on by the next hop. With them goes the layer: messages of two layers may have the same sizes.
    """
    if detect_fake_mode(experts_TK) is not None:
        return _even_sizes(experts_TK, homes, axes)
    home_E, place_E = homes.tables(experts_TK.device)
    home_TK = _where_chosen(home_E, experts_TK, homes)
    columns = []
    for number in range(len(axes)):
        inner = math.prod(axis.size for axis in axes[number + 1 :])
        num_groups = len(homes.held) // inner
        columns.append(sort_choices(_div(home_TK, inner), num_groups, once=True).counts)
    slot_TK = torch.where(home_TK < 0, -1, home_TK * homes.most_held + _where_chosen(place_E, experts_TK, homes))
    columns.append(sort_choices(slot_TK, len(homes.held) * homes.most_held).counts)
    known, mark = [], zlib.crc32(layer.encode())
    for axis in axes:
        marks = torch.full((axis.size, 1), mark, device=experts_TK.device)
        told = torch.cat([marks, *(column.view(axis.size, -1) for column in columns)], 1)
        heard = torch.empty_like(told)
        comm.all_to_all(heard, told, axis)
        known += [columns[0], heard[:, 1], heard[:, 0]]
        widths = [column.numel() // axis.size for column in columns[1:]]
        columns = list(heard[:, 2:].sum(0).split(widths))
    *parts, experts = _on_host([*known, columns[0]])
    for axis, marks_heard in zip(axes, parts[2::3], strict=True):
        _require_same_layer(marks_heard, mark, layer, axis)
    return Sizes(parts[0::3], parts[1::3], experts[: len(homes.held[rank_along(axes)])])


def _on_host(parts: list[torch.Tensor]) -> list[list[int]]:
    """The numbers of several vectors by one read."""
    numbers, lengths = torch.cat(parts).tolist(), [part.numel() for part in parts]
    return [numbers[sum(lengths[:at]) : sum(lengths[: at + 1])] for at in range(len(lengths))]


def _require_same_layer(marks: list[int], mark: int, layer: str, axis: Axis) -> None:
    elsewhere = next((rank for rank, other in zip(axis.ranks, marks, strict=True) if other != mark), None)
    if elsewhere is not None:
        raise CommError(
            f"rank {axis.ranks[axis.index]} runs {layer} while rank {elsewhere} runs other experts",
            allowed="the same layers in the same order on all ranks that exchange tokens",
            remedy="no layers that some ranks skip, or no ep",
        )


def _div(home_TK: torch.Tensor, inner: int) -> torch.Tensor:
    return torch.div(home_TK, inner, rounding_mode="floor")


def _even_sizes(experts_TK: torch.Tensor, homes: Homes, axes: Sequence[Axis]) -> Sizes:
    """The sizes under choices that are spread evenly: what a rehearsal, which has no numbers to read, goes by."""
    rows, num_choices = experts_TK.shape
    pairs = rows * num_choices
    sent, received = [], []
    for axis in axes:
        sent.append([min(rows, size) for size in split_sizes(pairs, axis.size)])
        received.append([sent[-1][axis.index]] * axis.size)
        rows = sum(received[-1])
    here = len(homes.held[rank_along(axes)])
    return Sizes(sent, received, split_sizes(min(pairs, rows * num_choices), here) if here else [])


def _send(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, hop: Hop) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One hop of rows with the weights and numbers of their choices; the numbers travel as they are, in one message with the weights."""
    x, weights, experts = _Move.apply(hop.axis, hop.sent, hop.received, x, weights, experts)
    return x, weights, experts


class _Move(torch.autograd.Function):
    """Rows to other ranks: `sent[j]` to rank j, `received[j]` from it. With (x, weights, experts) all three move, in two messages."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, sent: list[int], received: list[int], x: torch.Tensor, *beside: torch.Tensor) -> tuple:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        moved, pending = _start_move(x, axis, sent, received)
        if not beside:
            pending.wait()
            return (moved,)
        weights, experts = beside
        packed = torch.cat([weights.view(_INTEGERS[weights.element_size()]), experts.to(_INTEGERS[weights.element_size()])], 1)
        unpacked, behind = _start_move(packed, axis, sent, received)
        pending.wait()
        behind.wait()
        num_choices = experts.shape[1]
        weights, experts = unpacked[:, :num_choices].contiguous().view(weights.dtype), unpacked[:, num_choices:]
        ctx.mark_non_differentiable(experts)
        return moved, weights, experts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *beside: torch.Tensor) -> tuple:
        moved, pending = _start_move(grad.contiguous(), ctx.axis, ctx.received, ctx.sent)
        if not beside:
            pending.wait()
            return None, None, None, moved
        weights, behind = _start_move(beside[0].contiguous(), ctx.axis, ctx.received, ctx.sent)
        pending.wait()
        behind.wait()
        return None, None, None, moved, weights, None


def _start_move(x: torch.Tensor, axis: Axis, sent: list[int], received: list[int]) -> tuple[torch.Tensor, comm.Pending]:
    x = x.contiguous()
    out = x.new_empty(sum(received), *x.shape[1:])
    return out, comm.all_to_all(out, x, axis, received, sent, wait=False)
