"""PyTorch's fused attention for processors, which returns the log-sum-exp and takes grouped heads as they are."""

from __future__ import annotations

from typing import Any

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# What `attention_trial` tries out.
TRIED = ("all", "causal", "masked")


def takes(q: torch.Tensor, v: torch.Tensor, *, softcap: float | None, dropout: float, masked: bool) -> bool:
    return q.device.type == "cpu" and q.is_floating_point() and q.shape[3] == v.shape[3] and softcap is None and not dropout


def forward(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int
):
    added = _added(seen, q_BHSD)
    out, lse = _FORWARD(q_BHSD, k_BGTD, v_BGTD, 0.0, causal, attn_mask=added, scale=form.scale)
    if added is not None:  # the kernel is not of one mind about the log-sum-exp of a query that sees nothing
        lse = lse.masked_fill((added == -torch.inf).all(-1), -torch.inf)
    return out, lse


def backward(grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int):
    added = _added(seen, q_BHSD)
    if added is not None:  # the weights of a query that sees nothing are exp(-inf - lse): 0 for any finite lse
        lse_BHS = lse_BHS.masked_fill(lse_BHS == -torch.inf, 0.0)
    return _BACKWARD(grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS, 0.0, causal, attn_mask=added, scale=form.scale)


def _added(seen: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The mask as the kernel wants it: to be added, in the dtype of the queries."""
    if seen is None or seen.dtype != torch.bool:
        return None if seen is None else seen.to(q.dtype)
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
