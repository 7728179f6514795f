"""Spreads the experts of a model over ranks: which rank holds which, and what takes the place of their forwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from phalanx.anatomy.expert_lists import ExpertList, expert_lists
from phalanx.anatomy.experts_seam import StackedExperts, StackedParameter, replace_forward, stacked_experts
from phalanx.cluster.mesh import Axis
from phalanx.cluster.placement import Placement, Placements
from phalanx.errors import PlanError
from phalanx.layout import Layout, Range, split_range
from phalanx.parallel.expert.capacity import Capacity
from phalanx.parallel.expert.exchange import rank_along
from phalanx.parallel.expert.homes import Homes
from phalanx.parallel.expert.listed import ListedForward
from phalanx.parallel.expert.load import Load
from phalanx.parallel.expert.stacked import StackedForward


@dataclass(frozen=True)
class ExpertAxes:
    """The ranks among which the experts of every layer are divided.

    `hops` together hold all experts once, outermost first; ranks along `data` hold the same ones and see other tokens; ranks along
    `width` see the same tokens and each hold a part of every expert's inner width.
    """

    hops: tuple[Axis, ...]
    data: Axis
    width: Axis

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.hops)

    @property
    def index(self) -> int:
        return rank_along(self.hops)


def spread_experts(model: nn.Module, axes: ExpertAxes, placements: Placements, capacity: Capacity | None = None) -> list[Load]:
    """Divides the experts of every layer among the ranks; returns what counts the load of each layer.

    Raises: PlanError for a model in which no experts are found.
    """
    stacked, lists = stacked_experts(model), expert_lists(model)
    if not stacked and not lists:
        raise PlanError(
            f"ep{axes.size} for {type(model).__name__}, in which no experts were found",
            allowed="models of transformers with stacked experts, and blocks with a router and a list of experts",
            remedy="leave ep out",
        )
    for experts in [*stacked, *lists]:
        if axes.size > experts.num_experts:
            raise PlanError(
                f"ep{axes.size} for {experts.num_experts} experts in {experts.name}",
                allowed="at most one rank for each expert",
                remedy=f"ep{experts.num_experts}",
            )
    if lists and capacity is not None:
        raise PlanError(
            f"a capacity for {type(lists[0].block).__name__}, which calls its experts itself", allowed="stacked experts of transformers"
        )
    loads = [_spread_stacked(experts, axes, placements, capacity) for experts in stacked]
    return loads + [_spread_list(experts, axes, placements) for experts in lists]


def _spread_stacked(experts: StackedExperts, axes: ExpertAxes, placements: Placements, capacity: Capacity | None) -> Load:
    homes = Homes.even(experts.num_experts, axes.size)
    # What follows the second product is applied to whole sums only.
    splits_width = axes.width.size > 1 and not experts.module.has_post_expert_norm
    for parameter in experts.parameters():
        placements.declare(experts.module, parameter.name, _placement(experts, parameter, homes, axes, splits_width))
    load = Load(experts.name, experts.num_experts)
    replace_forward(experts.module, StackedForward(homes, axes.hops, load, axes.width if splits_width else None, capacity))
    return load


def _spread_list(experts: ExpertList, axes: ExpertAxes, placements: Placements) -> Load:
    """Experts of a list are held whole, by one rank each; the others hold nothing of their parameters."""
    homes = Homes.even(experts.num_experts, axes.size)
    copies = (axes.width,) if axes.width.size > 1 else ()
    for number, expert in enumerate(experts.experts):
        for module in expert.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    layout = Layout.whole(parameter.shape) if number in homes.held[axes.index] else _nothing(parameter.shape)
                    placements.declare(module, attribute, Placement(layout, axes.data, copies=copies))
    load = Load(experts.name, experts.num_experts)
    replace_forward(experts.block, ListedForward(experts.block.forward, experts.attribute, homes, axes.hops, load))
    return load


def _nothing(shape: Sequence[int]) -> Layout:
    if not shape:
        raise PlanError("an expert has a parameter without dimensions", allowed="parameters of one dimension or more", remedy="shape (1,)")
    return Layout.cut(shape, 0, (0, 0))


def _placement(experts: StackedExperts, parameter: StackedParameter, homes: Homes, axes: ExpertAxes, splits_width: bool) -> Placement:
    shape = tuple(getattr(experts.module, parameter.name).shape)
    box: list[Sequence[Range]] = [[(0, size)] for size in shape]
    box[0] = homes.ranges(axes.index) or [(0, 0)]
    if not splits_width:
        return Placement(Layout.of_box(shape, box), axes.data, copies=(axes.width,) if axes.width.size > 1 else ())
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
