"""The layers of experts of a model, as strategies see them: stacked ones and lists alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.expert_lists import ExpertList, expert_lists
from phalanx.anatomy.experts_seam import StackedExperts, stacked_experts
from phalanx.errors import ConfigError
from phalanx.parallel.expert.load import Load
from phalanx.parallel.expert.share import PassShare

Bias = tuple[nn.Module, str]


@dataclass
class ExpertLayer:
    """One layer of experts as found in a model: stacked, or a list that its block calls."""

    found: StackedExperts | ExpertList
    load: Load

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def num_experts(self) -> int:
        return self.found.num_experts

    @property
    def block(self) -> nn.Module:
        return self.found.parent if isinstance(self.found, StackedExperts) else self.found.block

    @property
    def experts(self) -> nn.Module:
        return self.found.module if isinstance(self.found, StackedExperts) else self.found.experts

    def router(self) -> nn.Module:
        """Raises: ConfigError where no part of the block looks like its router."""
        routers = [child for child in self.block.children() if child is not self.experts and self._has_row_each(child)]
        if len(routers) != 1:
            raise ConfigError(
                f"{self.name}: {len(routers)} parts of {type(self.block).__name__} look like its router",
                allowed="one part beside the experts whose weight has a row for each expert",
                remedy="Routing() without losses or biases",
            )
        return routers[0]

    def _has_row_each(self, module: nn.Module) -> bool:
        return any(p is not None and p.dim() == 2 and p.shape[0] == self.num_experts for p in module._parameters.values())

    def correction_bias(self) -> Bias | None:
        """The buffer, as (module, name), that a router adds to its scores when it chooses, and not when it weighs."""
        inside = {id(module) for module in self.experts.modules()}
        for module in self.block.modules():
            for name, buffer in module._buffers.items():
                if id(module) not in inside and buffer is not None and "correction_bias" in name and buffer.numel() == self.num_experts:
                    return module, name
        return None


def find_layers(model: nn.Module, share: PassShare) -> list[ExpertLayer]:
    """The layers of experts of a model, in order; each counts its load from now on, but for lists: `spread_experts` lets these count."""
    everything: list[StackedExperts | ExpertList] = [*stacked_experts(model), *expert_lists(model)]
    layers = [ExpertLayer(found, Load(found.name, found.num_experts, share)) for found in everything]
    for layer in layers:
        if isinstance(layer.found, StackedExperts):
            layer.experts.register_forward_pre_hook(_counting(layer.load))
    return layers


def _counting(load: Load) -> Any:
    @torch._dynamo.disable
    def before(module: nn.Module, args: Any) -> None:
        if module.training:
            load.count(args[1], load.share.counted(args[1]))

    return before


def correction_biases(layers: Sequence[ExpertLayer]) -> list[Bias]:
    """Those of all layers. Raises: ConfigError for a router without one."""
    found = [layer.correction_bias() for layer in layers]
    without = [layer.name for layer, bias in zip(layers, found, strict=True) if bias is None]
    if without or not layers:
        raise ConfigError(
            f"the router of {without[0] if without else 'no layer'} has no correction bias",
            allowed="bias_rate for models such as DeepSeek-V3, whose routers choose by scores plus a bias",
            remedy="Routing(sequence=0.001)",
        )
    return [bias for bias in found if bias is not None]
