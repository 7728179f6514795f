"""PyTorch's memory-efficient attention for accelerators: takes a mask, and values of another width; its log-sum-exp is in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

_FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

# What `attention_trial` tries out.
TRIED = ("all", "causal", "masked")
# The kernel reads masks and widths in whole vectors, and the log-sum-exp in blocks of queries.
MASK_ALIGNMENT, WIDTH_ALIGNMENT, QUERY_BLOCK = 16, 8, 32


def takes(q: torch.Tensor, v: torch.Tensor, *, softcap: float | None, dropout: float, masked: bool) -> bool:
    fits = q.shape[3] % WIDTH_ALIGNMENT == 0 and v.shape[3] % WIDTH_ALIGNMENT == 0
    is_known = q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return q.device.type == "cuda" and is_known and fits and softcap is None and not dropout


def forward(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTE: torch.Tensor, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int
):
    bias = _bias(seen, q_BHSD, k_BGTD)
    k, v = (_for_each_head(tensor, q_BHSD) for tensor in (k_BGTD, v_BGTE))
    out, lse, *_ = _FORWARD(q_BHSD, k, v, bias, True, 0.0, causal, scale=form.scale)
    lse = lse[:, :, : q_BHSD.shape[2]]
    if seen is not None:  # what the kernel says of a query that sees nothing is its own affair
        blind = _blind(seen)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)
    return out, lse


def backward(grad_BHSE, q_BHSD, k_BGTD, v_BGTE, out_BHSE, lse_BHS, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int):
    bias = _bias(seen, q_BHSD, k_BGTD)
    k, v = (_for_each_head(tensor, q_BHSD) for tensor in (k_BGTD, v_BGTE))
    # The weights of a query that sees nothing, and of none at all, are exp(score - inf): 0.
    ends = pad(lse_BHS.float().masked_fill(lse_BHS == -torch.inf, torch.inf), (0, -lse_BHS.shape[2] % QUERY_BLOCK), value=torch.inf)
    unused = torch.zeros((), dtype=torch.int64, device=q_BHSD.device)  # the random state of a dropout that is 0
    wanted = [True, True, True, False]
    given = grad_BHSE, q_BHSD, k, v, bias, out_BHSE.to(q_BHSD.dtype), ends.contiguous(), unused, unused
    dq, dk, dv, _ = _BACKWARD(*given, 0.0, wanted, causal, scale=form.scale)
    return dq, _of_groups(dk, k_BGTD), _of_groups(dv, v_BGTE)


def _bias(seen: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The mask to be added, for every row and head, with a length in memory that the kernel can read. Shapes: (B, H, S, T)."""
    if seen is None:
        return None
    added = seen.to(q.dtype) if seen.dtype != torch.bool else torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    num_keys = k.shape[2]
    room = pad(added, (0, -num_keys % MASK_ALIGNMENT)).contiguous()
    return room[..., :num_keys].expand(q.shape[0], q.shape[1], q.shape[2], num_keys)


def _blind(seen: torch.Tensor) -> torch.Tensor:
    """Which queries see nothing."""
    return ~seen.any(-1) if seen.dtype == torch.bool else (seen == -torch.inf).all(-1)


def _for_each_head(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) if tensor.shape[1] != q.shape[1] else tensor


def _of_groups(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values that several heads share."""
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2, dtype=torch.float32)
