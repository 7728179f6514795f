"""The experts of a layer that are stacked parameters of one module, computed where they live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.anatomy.experts_seam import gates_as_usual
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.kernels.grouped import grouped_linear
from phalanx.kernels.silu_gate import silu_gate
from phalanx.parallel.expert.capacity import Capacity
from phalanx.parallel.expert.exchange import Dispatched, dispatch
from phalanx.parallel.expert.homes import Homes
from phalanx.parallel.expert.load import Load


class StackedForward:
    """What takes the place of a stacked module's forward: dispatch, two grouped products around the module's own gate, combine.

    `width_axis` splits the inner width of every expert over tensor-parallel ranks, which see the same tokens; each rank has a part
    of the output then. Cost over it: one all_reduce of the output forward, one of the tokens backward.
    """

    def __init__(self, homes: Homes, axes: Sequence[Axis], load: Load, width_axis: Axis | None = None, capacity: Capacity | None = None):
        self.homes, self.axes, self.load, self.capacity = homes, tuple(axes), load, capacity
        self.width_axis = width_axis if width_axis is not None and width_axis.size > 1 else None
        self.has_all, self.all_here = False, Homes.even(homes.num_experts, 1)

    def __call__(self, module: Any, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        if self.capacity is not None and module.training:
            experts_TK = self.capacity.drop(experts_TK, self.homes.num_experts, self.load)
        x, weights = x_TH, weights_TK
        if self.width_axis is not None:
            x, weights = comm.copy_to(x, self.width_axis), comm.copy_to(weights, self.width_axis)
        homes, axes = (self.all_here, ()) if self.has_all else (self.homes, self.axes)
        sent = dispatch(x, experts_TK, weights, homes, axes, self.load.name)
        out_TH = sent.combine(self._compute(module, sent))
        if self.width_axis is not None:
            out_TH = comm.reduce_from(out_TH, self.width_axis)
        return out_TH.to(x_TH.dtype)

    def _compute(self, module: Any, sent: Dispatched) -> torch.Tensor:
        """The weighted sums over the experts of this rank, by the interface that the module follows. Shapes: [M, H]."""
        return sent.rows.add_up(self._products(module, sent.rows.take(sent.x), sent.sizes), sent.weights)

    def _products(self, module: Any, x_PH: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """What the experts of this rank make of rows sorted by expert. Shapes: [P, H]."""
        transposed, biased = module.is_transposed, module.has_bias
        up = "gate_up_proj" if module.has_gate else "up_proj"
        bias = getattr(module, f"{up}_bias") if biased else None
        inner = grouped_linear(x_PH, getattr(module, up), sizes, bias, transposed=transposed)
        inner = _inside(module, inner)
        bias = self._output_bias(module.down_proj_bias) if biased else None
        y_PH = grouped_linear(inner, module.down_proj, sizes, bias, transposed=transposed)
        return module.post_expert_norm(y_PH) if module.has_post_expert_norm else y_PH

    def _output_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The parts of the width add up, so one of them has the output's bias and the others 0."""
        return bias if self.width_axis is None or self.width_axis.index == 0 else bias * 0


def _inside(module: Any, inner: torch.Tensor) -> torch.Tensor:
    """What an expert does between its two products: its own gate or activation, the usual gate by one operation."""
    if not module.has_gate:
        return module.act_fn(inner)
    is_usual = gates_as_usual(module) and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return silu_gate(inner) if is_usual else module._apply_gate(inner)
