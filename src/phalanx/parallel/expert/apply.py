"""Spreads the experts of a model over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from phalanx.anatomy.expert_lists import ExpertList
from phalanx.anatomy.experts_seam import StackedExperts, StackedParameter, replace_forward
from phalanx.cluster.mesh import Axis
from phalanx.cluster.placement import Placement, Placements
from phalanx.errors import ConfigError, PlanError
from phalanx.layout import Layout, Range, split_range
from phalanx.parallel.expert.axes import ExpertAxes
from phalanx.parallel.expert.capacity import Capacity
from phalanx.parallel.expert.homes import Homes, by_load
from phalanx.parallel.expert.layers import ExpertLayer
from phalanx.parallel.expert.lending import Lending
from phalanx.parallel.expert.listed import ListedForward
from phalanx.parallel.expert.load import Load
from phalanx.parallel.expert.routing import Routing
from phalanx.parallel.expert.stacked import StackedForward
from phalanx.plan.file import unknown_key


def spread_experts(layers: Sequence[ExpertLayer], axes: ExpertAxes, placements: Placements, routing: Routing, lending: Lending) -> None:
    """Divides the experts of every layer among the ranks, and notes in `lending` how they come together again.

    Raises: PlanError for more ranks than experts, and for bounds on the choices of experts that a block calls itself; ConfigError for
    loads of layers that are not there.
    """
    for name in routing.loads or ():
        if name not in (known := [layer.name for layer in layers]):
            raise unknown_key(name, known, "Routing(loads=...)")
    for layer in layers:
        if axes.size > layer.num_experts:
            raise PlanError(
                f"ep{axes.size} for {layer.num_experts} experts in {layer.name}",
                allowed="at most one rank for each expert",
                remedy=f"ep{layer.num_experts}",
            )
        homes = _homes(layer, axes.size, routing)
        if isinstance(layer.found, StackedExperts):
            _spread_stacked(layer.found, layer.load, homes, axes, placements, routing, lending)
        elif routing.capacity is not None:
            raise PlanError(f"a capacity for {layer.name}, which calls its experts itself", allowed="stacked experts of transformers")
        elif axes.is_divided:
            _spread_list(layer.found, layer.load, homes, axes, placements, lending)
        else:
            layer.load.count_calls(layer.found.experts)


def _homes(layer: ExpertLayer, size: int, routing: Routing) -> Homes:
    loads = (routing.loads or {}).get(layer.name)
    if loads is None:
        return Homes.even(layer.num_experts, size)
    if len(loads) != layer.num_experts:
        raise ConfigError(f"{len(loads)} loads for the {layer.num_experts} experts of {layer.name}", allowed="one number for each expert")
    return by_load(loads, size)


def _spread_stacked(
    experts: StackedExperts, load: Load, homes: Homes, axes: ExpertAxes, placements: Placements, routing: Routing, lending: Lending
) -> None:
    capacity = None if routing.capacity is None else Capacity(routing.capacity)
    if not axes.is_divided and capacity is None:
        return
    # What follows the second product is applied to whole sums only.
    splits_width = axes.width is not None and not experts.module.has_post_expert_norm
    if axes.is_divided:
        _refuse_added_weights(experts)
    for parameter in experts.parameters() if axes.is_divided else ():
        placement = _placement(experts, parameter, homes, axes, splits_width)
        placements.declare(experts.module, parameter.name, placement)
        shape, (_, *inside) = placement.layout.shape, placement.layout.box
        lending.add(experts.module, parameter.name, Layout.of_box(shape, [[(0, shape[0])], *inside]))
    forward = StackedForward(homes, axes.hops, load, axes.width if splits_width else None, capacity)
    lending.forwards.append(forward)
    replace_forward(experts.module, forward)


def _refuse_added_weights(experts: StackedExperts) -> None:
    """Adapters add to stacked weights as a whole, of which a rank has a part: as parametrizations, or from a module around them."""
    computed = [parameter.name for parameter in experts.parameters() if parameter.name not in experts.module._parameters]
    if computed or experts.name.rpartition(".")[2] == "base_layer":
        raise PlanError(
            f"{', '.join(computed) or 'the weights'} of {experts.name}: an adapter computes them, and the plan divides them",
            allowed="experts whose stacked weights are parameters, where ep or tp divides them",
            remedy="adapters on other modules, or a plan without ep and tp, such as zero1",
        )


def _placement(experts: StackedExperts, parameter: StackedParameter, homes: Homes, axes: ExpertAxes, splits_width: bool) -> Placement:
    shape = tuple(getattr(experts.module, parameter.name).shape)
    box: list[Sequence[Range]] = [[(0, size)] for size in shape]
    box[0] = homes.ranges(axes.index) or [(0, 0)]
    if not splits_width or axes.width is None:
        return axes.place(Layout.of_box(shape, box))
    if parameter.inner_dim is None:
        return Placement(Layout.of_box(shape, box), axes.data, sums=(axes.width,))
    box[parameter.inner_dim] = _width_ranges(shape[parameter.inner_dim], parameter.num_blocks, experts.width, axes.width)
    return Placement(Layout.of_box(shape, box), axes.data)


def _width_ranges(size: int, num_blocks: int, width: int, axis: Axis) -> list[Range]:
    """This rank's part of a dimension that holds the inner width in equal blocks, each of one or more neighbours per unit of it."""
    block = size // num_blocks
    start, stop = split_range(width, axis.size, axis.index)
    unit = block // width
    return [(number * block + start * unit, number * block + stop * unit) for number in range(num_blocks)]


def _spread_list(experts: ExpertList, load: Load, homes: Homes, axes: ExpertAxes, placements: Placements, lending: Lending) -> None:
    """Experts of a list are held by one rank each, as whole as the passes before have left them; others hold nothing of them.

    A weight that experts of several ranks share is held by all: each adds what its experts make of its gradient.
    """
    shared = _shared_between_homes(experts, homes)
    for number, expert in enumerate(experts.experts):
        is_here = number in homes.held[axes.index]
        for module in expert.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None or id(parameter) in shared:
                    continue
                cut = placements.declared(module, attribute)
                layout = cut.layout if cut is not None else Layout.whole(parameter.shape)
                placed = axes.place(layout if is_here else _nothing(parameter.shape))
                placements.declare(module, attribute, placed if cut is None else replace(cut, layout=placed.layout, data=placed.data))
                lending.add(module, attribute, layout)
    forward = ListedForward(experts.block.forward, experts.attribute, homes, axes.hops, load)
    lending.forwards.append(forward)
    replace_forward(experts.block, forward)


def _shared_between_homes(experts: ExpertList, homes: Homes) -> set[int]:
    home = {expert: rank for rank, held in enumerate(homes.held) for expert in held}
    places: dict[int, set[int]] = {}
    for number, expert in enumerate(experts.experts):
        for parameter in expert.parameters():
            places.setdefault(id(parameter), set()).add(home[number])
    return {parameter for parameter, ranks in places.items() if len(ranks) > 1}


def _nothing(shape: Sequence[int]) -> Layout:
    if not shape:
        raise PlanError("an expert has a parameter without dimensions", allowed="parameters of one dimension or more", remedy="shape (1,)")
    return Layout.cut(shape, 0, (0, 0))


def refuse_without_experts(model: nn.Module, size: int, routing: Routing) -> None:
    """Raises: PlanError and ConfigError where experts are spoken of and none were found."""
    if size > 1:
        raise PlanError(
            f"ep{size} for {type(model).__name__}, in which no experts were found",
            allowed="stacked experts of transformers, and blocks with a router and a list of experts (name_experts names others)",
            remedy="leave ep out",
        )
    if routing != Routing():
        raise ConfigError(f"{routing} for {type(model).__name__}, in which no experts were found", remedy="leave routing out")
