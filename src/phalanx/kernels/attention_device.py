"""PyTorch's flash attention for accelerators: half precision, no mask; it returns the log-sum-exp in float32."""

from __future__ import annotations

from typing import Any

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

# What `attention_trial` tries out.
TRIED = ("all", "causal")


def takes(q: torch.Tensor, v: torch.Tensor, *, softcap: float | None, dropout: float, masked: bool) -> bool:
    fits = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    plain = softcap is None and not dropout and not masked
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and fits and plain


def forward(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int
):
    out, lse, *_ = _FORWARD(q_BHSD, k_BGTD, v_BGTD, 0.0, causal, False, scale=form.scale)
    return out, lse


def backward(grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int):
    lengths = q_BHSD.shape[2], k_BGTD.shape[2]
    unused = torch.zeros(2, dtype=torch.int64, device=q_BHSD.device)  # the random state of a dropout that is 0
    tensors = grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS.contiguous()
    return _BACKWARD(*tensors, None, None, *lengths, 0.0, causal, unused, unused, scale=form.scale)
