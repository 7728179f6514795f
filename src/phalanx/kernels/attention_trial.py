"""Whether a fused kernel says on this machine what the definition says: tried out once, since its interface may change silently.

The trial differentiates a part of the keys with the output and log-sum-exp of all of them, as a ring does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch._guards import detect_fake_mode

from phalanx.kernels import attention_reference
from phalanx.log import get_logger

HEADS, GROUPS, TOKENS, WIDTH = 4, 2, 40, 32
# Far above what rounding in half precision makes of it, far below what a wrong mask, scale or log-sum-exp does.
TOLERANCE = 0.05


@dataclass(frozen=True)
class TrialForm:
    scale: float = 0.3
    softcap: float | None = None
    dropout: float = 0.0


def is_sound(kernel: ModuleType, like: torch.Tensor) -> bool:
    """Whether the kernel may be used for tensors of this dtype and device. In a rehearsal, where nothing can be tried, it may."""
    if like.is_meta or detect_fake_mode(like) is not None:
        return True
    return flaw(kernel, like.device, like.dtype) is None


@functools.cache
def flaw(kernel: ModuleType, device: torch.device, dtype: torch.dtype) -> str | None:
    """What a kernel does wrong, or None; told once in the log as well, with what is used instead."""
    name = kernel.__name__.rpartition(".")[2]
    try:
        found = next((case for case in kernel.TRIED if not _agrees(kernel, case, device, dtype)), None)
        problem = None if found is None else f"differs from the definition ({found})"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        problem = f"raises {type(error).__name__}: {error}"
    if problem is not None:
        get_logger().warning("%s on %s in %s %s; other attention kernels are used in its place", name, device, dtype, problem)
    return problem


@torch.no_grad()
def _agrees(kernel: ModuleType, case: str, device: torch.device, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads: torch.randn(2, heads, TOKENS, WIDTH, generator=generator).to(device, dtype)  # noqa: E731
    q, k, v, grad = draw(HEADS), draw(GROUPS), draw(GROUPS), draw(HEADS)
    more_k, more_v = draw(GROUPS), draw(GROUPS)
    seen = (torch.rand(2, 1, TOKENS, TOKENS, generator=generator) < 0.5).to(device) if case == "masked" else None
    if seen is not None:
        seen[0, 0, 3] = False
    form = TrialForm(softcap=1.0 if case == "capped" else None)
    options = {"form": form, "causal": case == "causal", "seen": seen, "seed": 0}
    wide = [tensor.double() for tensor in (q, k, v)]
    pairs = list(zip(kernel.forward(q, k, v, **options), attention_reference.forward(*wide, **options), strict=True))
    # The output and log-sum-exp of more keys than these, all of which are seen.
    everything = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool, device=device)
    here = everything.tril() if case == "causal" else everything if seen is None else seen
    both = {"form": form, "causal": False, "seen": torch.cat([here, everything], 3), "seed": 0}
    out, lse = attention_reference.forward(wide[0], *(torch.cat(pair, 2).double() for pair in ((k, more_k), (v, more_v))), **both)
    exact = attention_reference.backward(grad.double(), *wide, out, lse, **options)
    given = out.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))
    pairs += zip(kernel.backward(grad, q, k, v, *given, **options), exact, strict=True)
    return all(_close(found, expected) for found, expected in pairs)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    blind = expected == -torch.inf
    if found.shape != expected.shape or not torch.equal(found == -torch.inf, blind):
        return False
    difference = (found.double() - expected).masked_fill(blind, 0.0).abs().max()
    return bool(difference <= TOLERANCE * expected.masked_fill(blind, 0.0).abs().max())
