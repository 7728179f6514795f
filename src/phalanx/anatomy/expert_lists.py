"""Finds blocks of a person's own model that hold a router and a list of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from phalanx.errors import ConfigError

# Block class -> the attribute that is its list of experts, for blocks that cannot be read.
_NAMED: dict[type[nn.Module], str] = {}


@dataclass(frozen=True)
class ExpertList:
    """A block whose forward calls the experts of a list, each on the tokens that chose it."""

    name: str
    block: nn.Module
    attribute: str

    @property
    def experts(self) -> nn.ModuleList:
        return getattr(self.block, self.attribute)

    @property
    def num_experts(self) -> int:
        return len(self.experts)


def name_experts(block_class: type[nn.Module], attribute: str) -> None:
    """Says that `attribute` of every block of this class is its list of experts: for a block that `expert_lists` does not find."""
    if not issubclass(block_class, nn.Module):
        raise ConfigError(f"{block_class!r} is no nn.Module", allowed="the class of a block that holds a list of experts")
    _NAMED[block_class] = attribute


def expert_lists(model: nn.Module) -> list[ExpertList]:
    """The blocks with a list of experts, outermost first.

    A block is one where its class was named, or it has a list with "expert" in its name, of two or more modules of one shape, beside
    a part whose weight has one row for each of them: the router.
    """
    found: list[ExpertList] = []
    for name, module in model.named_modules():
        if any(not outer.name or name.startswith(f"{outer.name}.") for outer in found):
            continue
        attribute = next((_NAMED[kind] for kind in type(module).__mro__ if kind in _NAMED), None) or _readable(module)
        if attribute is not None:
            found.append(ExpertList(name, module, attribute))
    return found


def _readable(module: nn.Module) -> str | None:
    lists = [(name, child) for name, child in module.named_children() if isinstance(child, nn.ModuleList)]
    for name, experts in lists:
        if "expert" in name.lower() and len(experts) > 1 and _are_alike(experts) and _has_router(module, experts):
            return name
    return None


def _are_alike(experts: nn.ModuleList) -> bool:
    shapes = [[(name, tuple(p.shape)) for name, p in expert.named_parameters()] for expert in experts]
    return bool(shapes[0]) and all(each == shapes[0] and type(expert) is type(experts[0]) for each, expert in zip(shapes, experts))


def _has_router(module: nn.Module, experts: nn.ModuleList) -> bool:
    beside = [parameter for child in module.children() if child is not experts for parameter in child.parameters()]
    return any(p.dim() == 2 and p.shape[0] == len(experts) for p in [*beside, *module._parameters.values()] if p is not None)
