"""The experts of one model while it trains: what they were chosen for, and what follows from that after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import PlanError
from phalanx.parallel.expert.layers import Bias
from phalanx.parallel.expert.load import LayerLoad, Load, layer_load


@dataclass
class Mixture:
    """The loads of all layers, and the correction biases of their routers where these follow the loads.

    Ranks along `tokens` see different tokens, or have other layers. `stepped` and `reported` are what was counted when a step ended
    last, and when someone read the loads last: neither moves the other. `uncounted` says why there are no loads to be read.
    """

    loads: list[Load]
    tokens: Sequence[Axis]
    device: torch.device
    biases: Sequence[Bias] = ()
    bias_rate: float = 0.0
    uncounted: PlanError | None = None
    stepped: torch.Tensor | float = field(default=0.0, repr=False)
    reported: torch.Tensor | float = field(default=0.0, repr=False)

    def after_step(self) -> None:
        """Moves every correction bias by `bias_rate`: up for experts with less than the mean load of the step, down for the others.

        Cost: one all_reduce of the counts of all layers.
        """
        if not self.bias_rate:
            return
        step = self._so_far() - self.stepped
        self._sum(step)
        for load, (module, name), counts in zip(self.loads, self.biases, self._by_layer(step), strict=True):
            chosen, bias = counts[: load.num_experts], module._buffers[name]
            assert bias is not None
            bias += (self.bias_rate * torch.sign(chosen.mean() - chosen)).to(bias.dtype)

    def end_step(self) -> None:
        """Leaves the choices of a step, taken or not, out of the next one's; they stay in what `read` gives."""
        if self.bias_rate:
            self.stepped = self._so_far()

    def read(self) -> list[LayerLoad]:
        """The loads on all ranks since the last read. Collective; one host read. Raises: `uncounted`."""
        if self.uncounted is not None:
            raise self.uncounted
        if not self.loads:
            return []
        so_far = self._so_far()
        totals, self.reported = so_far - self.reported, so_far
        self._sum(totals)
        return [layer_load(load.name, counts.tolist()) for load, counts in zip(self.loads, self._by_layer(totals.cpu()), strict=True)]

    def _sum(self, counts: torch.Tensor) -> None:
        for axis in self.tokens:
            comm.all_reduce(counts, axis)

    def _so_far(self) -> torch.Tensor:
        return torch.cat([load.so_far(self.device) for load in self.loads])

    def _by_layer(self, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return counts.split([load.num_experts + 1 for load in self.loads])
