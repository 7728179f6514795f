"""Applies one kind of tensor parallelism to a model that was read."""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.anatomy import Anatomy, Group, make_local, stacks_of
from phalanx.parallel.tensor.kind import Kind


def split_model(model: nn.Module, anatomy: Anatomy, kind: Kind, size: int, index: int) -> list[Any]:
    """Hands every module of the model to `kind` by its role, and makes head counts local for part `index` of `size`.

    Returns handles whose `remove()` makes the head counts whole again.
    """
    local: list[Any] = []
    stacks = [(stack, [block for _, block in blocks]) for stack, blocks in stacks_of(model)]
    for stack, blocks in stacks:
        kind.enter(stack, blocks)
    for item in anatomy.seams:
        low, high = item.group.allotted(size, index)
        local += make_local(model, item.local, item.group, low, high)
        kind.linear(item, model)
        model.get_submodule(item.group.rows[0]).register_forward_pre_hook(_is_called)
    for module in {id(module): module for name in anatomy.vocabulary for module in [model.get_submodule(name)]}.values():
        (kind.embedding if isinstance(module, nn.Embedding) else kind.head)(module)  # type: ignore[operator]
    taken = {id(module) for item in anatomy.seams for module in _modules(model, item.group)}
    taken |= {id(model.get_submodule(name)) for name in anatomy.vocabulary}
    for stack, blocks in stacks:
        for module in {id(module): module for block in blocks for module in block.modules()}.values():
            if id(module) not in taken and module._parameters:
                kind.norm(module)
        kind.leave(stack, blocks)
    return local


def _is_called(module: nn.Module, args: tuple) -> None:
    """Without a hook inside, PyTorch's encoder layers pass by their modules in evaluation, and multiply with a part of the weights."""


def _modules(model: nn.Module, group: Group) -> list[nn.Module]:
    """The modules of a group that own parameters."""
    names = [*group.columns, *group.rows, *(name.rpartition(".")[0] for name in group.parameters)]
    return [model.get_submodule(name) for name in names]
