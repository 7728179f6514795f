"""The start of a model under a plan: the weights and buffers of the world's first rank, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from phalanx import materialize
from phalanx.cluster.mesh import Axis
from phalanx.memory.engine import broadcast_from_first
from phalanx.memory.partition import clean_name


class StartState:
    """Makes all ranks begin with the same values; taken before any pass cuts the model, so that all ranks see the same names.

    Cost: a broadcast of each tensor that has memory; one tensor at a time beside the model.
    """

    def __init__(self, model: nn.Module, world: Axis, device: torch.device):
        self.model, self.world, self.device = model, world, device
        self.is_lazy = materialize.is_lazy(model)
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if not self.is_lazy:
            self._share_parameters()
            self._place_buffers()

    @property
    def fill(self) -> Callable | None:
        """For a model without memory: hands (name, full value) of every parameter to its argument, and places buffers."""
        return self._fill if self.is_lazy else None

    def _share_parameters(self) -> None:
        if self.world.size == 1:
            return
        for parameter in self.model.parameters():
            value = broadcast_from_first(parameter.detach().to(self.device), self.world)
            if parameter.is_contiguous():
                parameter.data.copy_(value)
            else:
                parameter.data = value.to(parameter.device)

    def _place_buffers(self) -> None:
        placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a buffer that modules share stays shared; the old one keeps its id
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in placed:
                        placed[id(buffer)] = buffer, broadcast_from_first(buffer.to(self.device), self.world)
                    module._buffers[name] = placed[id(buffer)][1]

    def _fill(self, receive: Callable[[str, torch.Tensor], None]) -> None:
        """Replays the construction of a lazy model: parameters go to `receive`, buffers to their place."""

        def place(name: str, value: torch.Tensor) -> None:
            value = broadcast_from_first(value.to(self.device), self.world)
            if name in self.parameters:
                receive(clean_name(name), value)
            else:
                owner, _, attribute = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[attribute] = value

        materialize.replay(self.model, place)
