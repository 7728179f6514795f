"""Attention by its definition, a few queries at a time: any dtype, soft caps, dropout, values of another width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

SCORE_ELEMENTS = 2**22


def forward(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTE: torch.Tensor, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int
):
    dtype = torch.promote_types(q_BHSD.dtype, torch.float32)
    out = q_BHSD.new_empty((*q_BHSD.shape[:3], v_BGTE.shape[3]))
    lse = q_BHSD.new_empty(q_BHSD.shape[:3], dtype=dtype)
    for rows in _chunks(q_BHSD, k_BGTD):
        scores, _ = _scores(q_BHSD[:, :, rows], k_BGTD, form, _part(seen, rows, causal, k_BGTD))
        lse[:, :, rows] = torch.logsumexp(scores, -1)
        weights = _weights(scores, lse[:, :, rows])
        keep = _keep(weights, form.dropout, seed, rows)
        out[:, :, rows] = _grouped(weights if keep is None else weights * keep, v_BGTE.to(dtype))
    return out, lse


def backward(grad_BHSE, q_BHSD, k_BGTD, v_BGTE, out_BHSE, lse_BHS, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int):
    dtype = lse_BHS.dtype
    dq = q_BHSD.new_empty(q_BHSD.shape, dtype=dtype)
    dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (k_BGTD, v_BGTE))
    k_wide, v_wide = k_BGTD.to(dtype), v_BGTE.to(dtype)
    for rows in _chunks(q_BHSD, k_BGTD):
        q, grad = q_BHSD[:, :, rows].to(dtype), grad_BHSE[:, :, rows].to(dtype)
        scores, slope = _scores(q, k_BGTD, form, _part(seen, rows, causal, k_BGTD))
        weights = _weights(scores, lse_BHS[:, :, rows])
        keep = _keep(weights, form.dropout, seed, rows)
        kept = weights if keep is None else weights * keep
        dv += _gather_groups(kept, grad, dv.shape[1])
        dweights = _grouped(grad, v_wide.mT)
        if keep is not None:
            dweights *= keep
        dscores = weights * (dweights - (grad * out_BHSE[:, :, rows]).sum(-1, keepdim=True))
        if slope is not None:
            dscores *= slope
        dscores *= form.scale
        dq[:, :, rows] = _grouped(dscores, k_wide)
        dk += _gather_groups(dscores, q, dk.shape[1])
    return dq, dk, dv


def _chunks(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    size = max(1, SCORE_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], size):
        yield slice(start, min(start + size, q.shape[2]))


def _part(seen: torch.Tensor | None, rows: slice, causal: bool, k: torch.Tensor) -> torch.Tensor | None:
    """The mask of some rows; under `causal` query i sees the keys up to i."""
    if causal:
        keys, queries = torch.arange(k.shape[2], device=k.device), torch.arange(rows.start, rows.stop, device=k.device)
        return (keys[None, :] <= queries[:, None])[None, None]
    return None if seen is None else seen[:, :, rows]


def _scores(q: torch.Tensor, k: torch.Tensor, form: Any, seen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores, and their slope where they are bent."""
    dtype, slope = torch.promote_types(q.dtype, torch.float32), None
    scores = _grouped(q.to(dtype), k.to(dtype).mT) * form.scale
    if form.softcap is not None:
        bent = torch.tanh(scores / form.softcap)
        scores, slope = bent * form.softcap, 1 - bent * bent
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
    return scores, slope


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(score - lse), and 0 for a query that sees nothing."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))


def _keep(weights: torch.Tensor, dropout: float, seed: int, rows: slice) -> torch.Tensor | None:
    """What dropout multiplies the weights of some rows with: the same for the same seed and rows."""
    if not dropout:
        return None
    generator = torch.Generator(device=weights.device).manual_seed(seed + rows.start)
    return (torch.rand(weights.shape, generator=generator, device=weights.device) >= dropout).to(weights.dtype) / (1 - dropout)


def _grouped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left (B, H, S, X) times right (B, G, X, Y), where H / G neighbours share a right."""
    batch, heads, rows, width = left.shape
    groups = right.shape[1]
    product = left.reshape(batch, groups, heads // groups * rows, width) @ right
    return product.view(batch, heads, rows, right.shape[3])


def _gather_groups(left: torch.Tensor, right: torch.Tensor, groups: int) -> torch.Tensor:
    """Transposed left (B, H, S, T) times right (B, H, S, Y), summed over the heads of a group: (B, G, T, Y)."""
    batch, _, _, keys = left.shape
    return left.reshape(batch, groups, -1, keys).mT @ right.reshape(batch, groups, -1, right.shape[3])
