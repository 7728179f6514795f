"""Cuts a model into stages, and takes out of it what this rank's stages do not hold."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.reads import BEFORE_ALL, Blocks, Places


@dataclass(frozen=True)
class Cut:
    """Which blocks each stage holds (`starts[s]` to `starts[s + 1]`), which stages read each parameter, and what the blocks cost."""

    blocks: tuple[tuple[str, nn.Module], ...]
    starts: tuple[int, ...]
    homes: dict[int, frozenset[int]]
    costs: LayerCosts

    @classmethod
    def balanced(cls, blocks: Blocks, places: Places, costs: LayerCosts, num_stages: int, sizes: Sequence[int] | None = None) -> Cut:
        """Stages of equal cost as nearly as whole blocks allow, or of the given `sizes`.

        Raises: PlanError where there are fewer blocks than stages, or `sizes` do not add up.
        """
        if len(blocks) < num_stages:
            raise PlanError(
                f"a pipeline of {num_stages} stages for a model of {len(blocks)} layers",
                allowed="at least one layer in each stage",
                remedy=f"pp{len(blocks)}" if len(blocks) > 1 else "leave pp out",
            )
        if sizes is None:
            sizes = costs.sizes(num_stages)
        if len(sizes) != num_stages or sum(sizes) != len(blocks) or min(sizes) < 1:
            raise PlanError(f"stages of {list(sizes)} layers", allowed=f"{num_stages} sizes from 1 that add up to {len(blocks)}")
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        stage_at = lambda place: 0 if place == BEFORE_ALL else bisect_right(starts, place) - 1  # noqa: E731
        homes = {key: frozenset(map(stage_at, found)) for key, found in places.items()}
        return cls(tuple(blocks), tuple(starts), homes, costs)

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.starts)]

    def range(self, stage: int) -> tuple[int, int]:
        """The first and the last block of a stage."""
        return self.starts[stage], self.starts[stage + 1] - 1

    def blocks_of(self, stage: int) -> list[nn.Module]:
        return [block for _, block in self.blocks[self.starts[stage] : self.starts[stage + 1]]]

    def stages_of(self, parameter: nn.Parameter) -> frozenset[int]:
        return self.homes[id(parameter)]


def counted(model: nn.Module, blocks: Blocks, places: Places) -> LayerCosts:
    """Costs by the number of weights that multiply; forward and both halves of the backward take about equal time."""
    each = tuple(cost_of(block) for _, block in blocks)
    first, last = costs_of_ends(model, blocks, places)
    held = (1.0,) * len(blocks)
    return LayerCosts(forward=each, input=each, weight=each, activation_bytes=held, first=(first, first, first), last=(last, last, last))


def cost_of(module: nn.Module) -> float:
    """Multiplications of one token in a module's forward: the elements of its matrices, embeddings left out."""
    tables = {id(parameter) for part in module.modules() if isinstance(part, nn.Embedding) for parameter in part.parameters(False)}
    return float(sum(p.numel() for p in module.parameters() if p.dim() >= 2 and id(p) not in tables))


def costs_of_ends(model: nn.Module, blocks: Blocks, places: Places) -> tuple[float, float]:
    """The costs of what is read before the first block and after the last one."""
    inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    looked_up = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters(False)}
    first = last = 0.0
    for parameter in model.parameters():
        if id(parameter) in inside or parameter.dim() < 2:
            continue
        found = places[id(parameter)]
        if BEFORE_ALL in found and id(parameter) not in looked_up:
            first += parameter.numel()
        if len(blocks) - 1 in found:  # an embedding that is read there too multiplies as the head
            last += parameter.numel()
    return first, last


class Poison:
    """Stands for what this rank does not hold: NaN in any shape, without memory; whoever reads it spoils the loss at once.

    `as_zeros` shows 0 instead, which tells whether a NaN came from here.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._values: dict[torch.dtype, torch.Tensor] = {}

    def like(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._values:
            value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            self._values[dtype] = torch.full((), value, dtype=dtype, device=self.device)
        return self._values[dtype].expand(tuple(shape))

    def show(self, value: float) -> None:
        """Changes what all of it reads as, where its dtype can."""
        for dtype, held in self._values.items():
            if dtype.is_floating_point or dtype.is_complex:
                held.fill_(value)


@dataclass
class Away:
    """A parameter that other ranks hold: under which (module, attribute) pairs, and the dtype it computes in."""

    pairs: list[tuple[nn.Module, str]]
    shape: torch.Size
    dtype: torch.dtype

    def show(self, tensor: torch.Tensor) -> None:
        """Puts a plain tensor in its place."""
        for module, name in self.pairs:
            module._parameters.pop(name, None)
            module.__dict__[name] = tensor

    def lend(self, value: torch.Tensor) -> None:
        """Puts a parameter of this value in its place, until `show`."""
        parameter = nn.Parameter(value.to(self.dtype, copy=True), requires_grad=False)
        for module, name in self.pairs:
            del module.__dict__[name]
            module._parameters[name] = parameter


def take_out(
    model: nn.Module, cut: Cut, stages: Iterable[int], poison: Poison, computes_in: Callable[[torch.dtype], torch.dtype] = lambda own: own
) -> list[Away]:
    """Removes the parameters that none of `stages` reads; poison of their shapes stays in their place, in the dtype they compute in.

    A parameter that is read in several places stays under all its names, so that ranks agree on how it is called.
    """
    stages, away = frozenset(stages), {}
    for module, name, parameter in owners(model):
        if not cut.stages_of(parameter) & stages:
            entry = away.setdefault(id(parameter), Away([], parameter.shape, computes_in(parameter.dtype)))
            entry.pairs.append((module, name))
    for entry in away.values():
        entry.show(poison.like(entry.shape, entry.dtype))
    return list(away.values())


def owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every (module, attribute, parameter), tied ones under each owner."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
