"""The global gradient norm and the factor that clips it.

A rank sums over the elements that only it counts; the sum (or, for the infinity norm, the maximum) over ranks is then the norm of
the whole model. Nothing is added, rooted or clamped before all ranks' parts are together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

CLIP_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_, so that clipped updates are equal


def local_power(parts: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """This rank's share of norm ** norm_type (of the norm itself, for infinity), as a float64 scalar.

    Cost: one read of the gradients; no host synchronisation.
    """
    # One part at a time: what lives below the device is there only while it is asked for.
    each = [torch.linalg.vector_norm(part, norm_type).double().to(device) for part in parts if part.numel()]
    if not each:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(each)
    if math.isinf(norm_type):
        return norms.max().nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose what is not a number
    return norms.pow(norm_type).sum()


def norm_from_power(power: float, norm_type: float) -> float:
    """The norm, from the sum (or maximum) over ranks of `local_power`."""
    return power if math.isinf(norm_type) or not math.isfinite(power) else power ** (1.0 / norm_type)


def clip_factor(norm: float, limit: float | None) -> float:
    """What every gradient is multiplied with so that the norm does not exceed the limit; 1 where it does not."""
    return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))
