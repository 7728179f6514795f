"""The seam through which the experts of a mixture are exchanged, and what can be read of them.

`transformers` keeps the experts of a layer as stacked parameters in one module that follows a common interface: its forward takes
(tokens, chosen experts, their weights), and flags say how the stacked matrices lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "down_proj")


@dataclass(frozen=True)
class StackedParameter:
    """One stacked parameter: which dimension is the width inside an expert, if any, and of how many equal blocks that consists."""

    name: str
    inner_dim: int | None = None
    num_blocks: int = 1


@dataclass(frozen=True)
class StackedExperts:
    """A module that holds the experts of one layer as stacked parameters, expert by expert along dimension 0."""

    name: str
    module: Any
    parent: nn.Module

    @property
    def num_experts(self) -> int:
        return int(self.module.num_experts)

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.module.has_gate else "up_proj"

    def parameters(self) -> Iterator[StackedParameter]:
        """The stacked parameters that follow the interface; others of the module belong to all experts alike."""
        module = self.module
        # Interleaved gates and ups are neighbours: a run of pairs is a run. Concatenated ones are two blocks.
        blocks = 2 if module.has_gate and module.is_concatenated else 1
        yield StackedParameter(self.up_name, 2 if module.is_transposed else 1, blocks)
        yield StackedParameter("down_proj", 1 if module.is_transposed else 2)
        if module.has_bias:
            yield StackedParameter(f"{self.up_name}_bias", 1, blocks)
            yield StackedParameter("down_proj_bias")

    @property
    def width(self) -> int:
        """The inner width of one expert."""
        return int(self.module.down_proj.shape[1 if self.module.is_transposed else 2])


def stacked_experts(model: nn.Module) -> list[StackedExperts]:
    """The modules of a model that follow the experts interface of `transformers`, in order."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    return [
        StackedExperts(name, module, parents.get(id(module), module))
        for name, module in model.named_modules()
        if all(hasattr(module, flag) for flag in _FLAGS) and module.down_proj.shape[0] == module.num_experts
    ]


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Makes `forward(module, ...)` what the module computes; a copy of the model computes with its own parameters."""
    module.forward = MethodType(forward, module)


def gates_as_usual(module: nn.Module) -> bool:
    """Whether experts multiply the activation of their first half with their second, as the interface does by default."""
    from transformers.integrations.moe import _default_apply_gate

    return getattr(type(module), "_apply_gate", None) is _default_apply_gate
