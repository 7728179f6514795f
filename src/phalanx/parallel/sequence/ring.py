"""Ring attention: keys and values travel round the ring, each rank merges what its queries see, and gradients travel home.

The next block is on its way while the present one is worked on. In the backward keys and values travel once more, and with them,
from the first foreign rank on, their gradients: so a block's gradient makes as many steps as the block itself.

Shapes: B rows, H heads of queries, G of keys and values, n tokens of a rank, D and E widths.
Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); the order is that of `cut`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.kernels.attention import Form, attend, differentiate, merge, wide_dtype
from phalanx.kernels.attention_sight import Sight
from phalanx.parallel.kept import kept
from phalanx.parallel.sequence.cut import Rows


def ring_attention(
    q_BHnD: torch.Tensor, k_BGnD: torch.Tensor, v_BGnE: torch.Tensor, sight: Sight, form: Form, rows: Rows, axis: Axis
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of the whole ring; on an axis of one rank, to its own.

    Cost: forward (r - 1) times k and v, backward twice that. Grad: exact, from the merged result and log-sum-exp.
    """
    return _Ring.apply(q_BHnD, k_BGnD, v_BGnE, sight, form, rows, axis)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, sight: Sight, form: Form, rows: Rows, axis: Axis) -> torch.Tensor:
        # On one rank the attention is cheap to compute again for what it would hold; a ring would send everything once more.
        compute = partial(_forward, q, k, v, sight, form, rows, axis)
        out, lse = kept(compute) if axis.size > 1 else compute()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.told = sight, form, rows, axis
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return *_backward(grad, *ctx.saved_tensors, *ctx.told), None, None, None, None


class _Travel:
    """A buffer on its way to the next rank, and one on its way here."""

    def __init__(self, leaving: torch.Tensor, axis: Axis):
        arriving = torch.empty_like(leaving)
        self.leaving, self.arriving = leaving, arriving
        sends, receives = [0] * axis.size, [0] * axis.size
        sends[(axis.index + 1) % axis.size] = receives[(axis.index - 1) % axis.size] = leaving.numel()
        self.pending = comm.all_to_all(arriving, leaving, axis, receives, sends, wait=False) if leaving.numel() else None

    def arrived(self) -> torch.Tensor:
        if self.pending is not None:
            self.pending.wait()
        return self.arriving


def _blocks(k: torch.Tensor, v: torch.Tensor, axis: Axis) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Every rank's keys and values with the index they come from, the own first; the next ones travel while the caller works."""
    block = _packed(k, v) if axis.size > 1 else None
    for step in range(axis.size):
        travel = _Travel(block, axis) if block is not None and step < axis.size - 1 else None
        yield (axis.index - step) % axis.size, k, v
        if travel is not None:
            block = travel.arrived()
            k, v = _unpacked(block, k, v)


def _forward(q, k, v, sight: Sight, form: Form, rows: Rows, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    queries = rows.tokens(axis.index)
    own_q = q[:, :, : queries.length]
    out = lse = None
    for source, block_k, block_v in _blocks(k, v, axis):
        keys = rows.tokens(source)
        part = attend(own_q, block_k[:, :, : keys.length], block_v[:, :, : keys.length], sight, queries, keys, form)
        if part is None:
            continue
        if out is None or lse is None:
            out, lse = part if axis.size == 1 else (part[0].to(part[1].dtype), part[1])  # several parts are summed wide
        else:
            merge(out, lse, *part)
    if out is None or lse is None:
        out = own_q.new_zeros((*own_q.shape[:3], v.shape[3]))
        lse = own_q.new_full(own_q.shape[:3], -torch.inf, dtype=wide_dtype(q))
    return pad(out.to(q.dtype), (0, 0, 0, q.shape[2] - queries.length)), lse


def _backward(grad, q, k, v, out, lse, sight: Sight, form: Form, rows: Rows, axis: Axis) -> tuple[torch.Tensor, ...]:
    queries = rows.tokens(axis.index)
    real = slice(0, queries.length)
    given = grad[:, :, real], q[:, :, real]
    dq, home, travel = _zeros(q), (_zeros(k), _zeros(v)), None
    for source, block_k, block_v in _blocks(k, v, axis):
        keys = rows.tokens(source)
        block = block_k[:, :, : keys.length], block_v[:, :, : keys.length]
        part = differentiate(*given, *block, out[:, :, real], lse, sight, queries, keys, form)
        if part is not None:
            dq[:, :, real].add_(part[0])
        if source == axis.index:
            _add(home, part, keys.length)
            continue
        # What earlier ranks found for this block has come along one step behind it; the first foreign rank starts.
        found = torch.zeros(k.numel() + v.numel(), dtype=dq.dtype, device=k.device) if travel is None else travel.arrived()
        _add(_unpacked(found, k, v), part, keys.length)
        travel = _Travel(found, axis)
    if travel is not None:
        for total, arrived in zip(home, _unpacked(travel.arrived(), k, v), strict=True):
            total.add_(arrived)
    return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=wide_dtype(like), device=like.device)


def _add(totals: tuple[torch.Tensor, torch.Tensor], part: Any, length: int) -> None:
    if part is not None:
        for total, contribution in zip(totals, part[1:], strict=True):
            total[:, :, :length].add_(contribution)


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(block: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)
