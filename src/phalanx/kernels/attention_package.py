"""The flash attention of the package `flash_attn`, where it is installed: half precision, also with a soft cap.

Shapes: the package wants tokens before heads, (B, S, H, D).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

# What `attention_trial` tries out.
TRIED = ("all", "causal", "capped")


@functools.cache
def _package() -> ModuleType | None:
    try:
        from flash_attn import flash_attn_interface
    except ImportError:  # also where it was built for another version of PyTorch
        return None
    return flash_attn_interface


def takes(q: torch.Tensor, v: torch.Tensor, *, softcap: float | None, dropout: float, masked: bool) -> bool:
    fits = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    is_half = q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)
    return is_half and fits and not dropout and not masked and _package() is not None


def _settings(form: Any, causal: bool) -> dict[str, Any]:
    everywhere = {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}
    return {"dropout_p": 0.0, "softmax_scale": form.scale, "causal": causal, "softcap": form.softcap or 0.0, **everywhere}


def forward(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int
):
    package = _package()
    assert package is not None
    given = (tensor.transpose(1, 2) for tensor in (q_BHSD, k_BGTD, v_BGTD))
    out, lse, *_ = package._flash_attn_forward(*given, return_softmax=False, **_settings(form, causal))
    return out.transpose(1, 2), lse


def backward(grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD, lse_BHS, *, form: Any, causal: bool, seen: torch.Tensor | None, seed: int):
    package = _package()
    assert package is not None
    grad, q, k, v, out = (t.transpose(1, 2).to(q_BHSD.dtype).contiguous() for t in (grad_BHSD, q_BHSD, k_BGTD, v_BGTD, out_BHSD))
    found = [torch.empty_like(tensor) for tensor in (q, k, v)]
    settings = {**_settings(form, causal), "deterministic": False, "rng_state": None}
    package._flash_attn_backward(grad, q, k, v, out, lse_BHS.float().contiguous(), *found, **settings)
    return tuple(tensor.transpose(1, 2) for tensor in found)
