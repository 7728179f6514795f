"""silu(gate) · up of two halves that lie side by side, with one tensor kept for the backward and none joined there.

Legend: P rows, I units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Shapes: [P, 2 I], gate first -> [P, I]."""
    return _SiluGate.apply(gate_up)


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_both = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_both.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_both
