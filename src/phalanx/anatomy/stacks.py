"""Finds the repeated blocks of a model, which become chunks, recompute units and pipeline pieces."""

from __future__ import annotations

from torch import nn

from phalanx.anatomy.expert_lists import expert_lists


def layer_stacks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of every repeated container, as (qualified name, block) in the order in which the model registers them.

    A container is an `nn.ModuleList` or `nn.Sequential` with at least two children of one class that hold parameters; the
    outermost wins, so a block's inner lists are not blocks, and experts never are. A block that is listed twice appears once.
    """
    blocks: list[tuple[str, nn.Module]] = []
    _collect(model, "", blocks, {id(found.experts) for found in expert_lists(model)})
    return blocks


def execution_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What runs as one: the blocks of all stacks, and mixtures outside of these, in which a rank runs only the experts that it needs."""
    blocks = layer_stacks(model)
    inside = {id(module) for _, block in blocks for module in block.modules()}
    return [*blocks, *((found.name, found.block) for found in expert_lists(model) if id(found.block) not in inside)]


def _collect(module: nn.Module, name: str, blocks: list[tuple[str, nn.Module]], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    repeated = _repeated_children(module)
    for child_name, child in module.named_children():
        qualified = f"{name}.{child_name}" if name else child_name
        if id(child) in repeated and id(child) not in seen:
            seen.add(id(child))
            blocks.append((qualified, child))
        else:
            _collect(child, qualified, blocks, seen)


def _repeated_children(module: nn.Module) -> set[int]:
    """The ids of the children of a container that share their class with another child and hold parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return set()
    of_class: dict[type, list[nn.Module]] = {}
    for child in module.children():
        if next(child.parameters(), None) is not None:
            of_class.setdefault(type(child), []).append(child)
    return {id(child) for children in of_class.values() if len(children) > 1 for child in children}
