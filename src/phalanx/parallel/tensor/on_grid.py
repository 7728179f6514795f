"""Tensor parallelism on a grid, for models that were read: rows of the batch over one direction, features over the others.

From the first block of a stack to its last the stream is cut by features, and so is everything inside: each rank has 1/P of every
activation and of every weight of a projection. Norms add up their rows over the ranks; before and after the stack activations are whole
but for their rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from phalanx.anatomy import Group, Norm, Proved, Split, is_linear, is_transposed, read_norm
from phalanx.cluster import comm
from phalanx.cluster.placement import Placement
from phalanx.cluster.random import SplitDraws
from phalanx.errors import PlanError, ShapeError
from phalanx.kernels.split_cross_entropy import require_tokens
from phalanx.layout import Layout, split_sizes
from phalanx.parallel.tensor.entered import Entered, enter
from phalanx.parallel.tensor.grid import Grid, Product, Ranges
from phalanx.parallel.tensor.kind import Place
from phalanx.parallel.tensor.split_logits import SplitLogits
from phalanx.parallel.tensor.split_norm import scaled_to_one, standardised
from phalanx.parallel.tensor.summa import leave, product, stored
from phalanx.parallel.tensor.vocabulary import Head


class OnGrid:
    """One of the three grids. `place` declares a parameter's placement; `term` is what the plan calls the grid.

    `joining` are the projections in no group whose outputs belong to the stream; `draws` are begun where a stack begins and ended where
    it ends, for models that draw at random in training. `is_chunked` leaves the forming of logits to the loss.
    """

    def __init__(
        self,
        grid: Grid,
        place: Place,
        term: str,
        logits: SplitLogits,
        *,
        joining: Container[nn.Module] = (),
        is_chunked: bool = False,
        draws: SplitDraws | None = None,
    ):
        self.grid, self.place, self.term, self.joining, self.draws = grid, place, term, joining, draws
        self.logits, self.is_chunked = logits, is_chunked
        self.whole: set[nn.Module] = set()
        self.widths: dict[nn.Module, int] = {}
        self.part = grid.group_index

    # -- stacks --------------------------------------------------------------------------------------------------------

    def enter(self, stack: str, blocks: list[nn.Module]) -> None:
        if not stack and len(blocks) == 1:
            raise self._refusal(type(blocks[0]).__name__, "has no stack of blocks", "models with repeated layers")

    def leave(self, stack: str, blocks: list[nn.Module]) -> None:
        # What follows a whole projection must be dropped alike on the ranks that all compute it.
        apart = not any(module in self.whole for block in blocks for module in block.modules())
        # Adapters beside a projection give out fewer features than the stream has.
        width = max((self.widths[module] for block in blocks for module in block.modules() if module in self.widths), default=None)
        if width is None:
            raise self._refusal(f"the stack {stack}", "has no projections that can be split", "stacks with heads or an MLP that can be cut")
        Stream(self.grid, blocks, width, self.draws if apart else None)

    def norm(self, module: nn.Module) -> None:
        if not any(parameter is not None for parameter in module._parameters.values()) and not hasattr(module, "normalized_shape"):
            return
        if is_linear(module):
            self.whole.add(module)
            module.forward = WholeProjection(module, self.grid, joins=module in self.joining)  # type: ignore[method-assign]
            return
        norm = read_norm(module)
        if norm is None:
            raise self._refusal(
                type(module).__name__,
                "stands between projections, and how to compute it from a part of the features is not known",
                "projections in groups, LayerNorm and RMSNorm",
            )
        names = [name for name in (norm.scale, norm.shift) if name is not None]
        width = getattr(module, names[0]).shape[0] if names else module.normalized_shape[0]  # type: ignore[index]
        for name in names:
            box = [self.grid.stream_range(width)]
            self.place(module, name, Placement(Layout.of_box((width,), box), sums=self.grid.and_rows()))
        module.forward = SplitNorm(module, norm, self.grid, width)  # type: ignore[method-assign]

    # -- groups --------------------------------------------------------------------------------------------------------

    def linear(self, item: Proved, model: nn.Module) -> None:
        group, entrance = item.group, Entrance(self.grid)
        for name in group.columns:
            module = model.get_submodule(name)
            if isinstance(module, nn.Embedding):
                self._cut(module, "weight", 1, group.columns[name], group)
            else:
                self._column(name, module, group, entrance)
        for name in group.rows:
            self._row(name, model.get_submodule(name), group, entrance)
        for name, part in group.parameters.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            if part is None:
                shape = getattr(module, attribute).shape
                self.place(module, attribute, Placement(Layout.whole(shape), sums=self.grid.and_rows((self.grid.both,))))
            else:
                self._cut(module, attribute, part[0], part[1], group)

    def _column(self, name: str, module: nn.Module, group: Group, entrance: Entrance) -> None:
        in_width = module.weight.shape[0 if is_transposed(module) else 1]  # type: ignore[union-attr, index]
        try:
            how = self.grid.columns(in_width, lambda index: self._features(group, group.columns[name], index))
        except ShapeError as error:
            raise self._refusal(
                name, f"cannot be cut: {error.found}", "as many key and value heads as parts, or a plain projection"
            ) from error
        self._project(name, module, how, entrance, in_width)

    def _row(self, name: str, module: nn.Module, group: Group, entrance: Entrance) -> None:
        out_width = module.weight.shape[1 if is_transposed(module) else 0]  # type: ignore[union-attr, index]
        self.widths[module] = out_width
        how = self.grid.out_of_group(lambda index: self._inputs(group, index), out_width)
        self._project(name, module, how, Entrance(self.grid, closes=entrance), None)

    def _project(self, name: str, module: nn.Module, how: Product, entrance: Entrance, in_width: int | None) -> None:
        if type(module).forward is not nn.Linear.forward and not is_transposed(module):
            raise self._refusal(name, "has a forward of its own", "plain projections")
        self.place(module, "weight", self.grid.weight_placement(how, module.weight.shape, transposed=is_transposed(module)))
        if module.bias is not None:
            self.place(module, "bias", self.grid.bias_placement(how, module.bias.shape))
        module.forward = Projection(module, self.grid, how, entrance, in_width)  # type: ignore[method-assign]

    def _features(self, group: Group, split: Split, index: int) -> Ranges:
        return split.ranges(*group.allotted(self.grid.both.size, index)) or ((0, 0),)

    def _inputs(self, group: Group, index: int) -> tuple[int, int]:
        low, high = group.allotted(self.grid.both.size, index)
        return low * group.width, high * group.width

    def _cut(self, module: nn.Module, attribute: str, dim: int, split: Split, group: Group) -> None:
        """A parameter that is read inside of a group, cut as its atoms are."""
        shape = getattr(module, attribute).shape
        how = self.grid.columns(1, lambda index: self._features(group, split, index))
        sums = self.grid.and_rows(how.sharing_own)
        self.place(module, attribute, Placement(Layout.cut(shape, dim, *how.own), sums=sums))

    # -- vocabulary ----------------------------------------------------------------------------------------------------

    def embedding(self, module: nn.Embedding) -> None:
        size = module.weight.shape[0]
        how = self.grid.across(module.weight.shape[1], size)
        self.place(module, "weight", self.grid.weight_placement(how, module.weight.shape, transposed=False))
        low, high = how.own[0]
        padding = module.padding_idx
        module.padding_idx = padding - low if padding is not None and low <= padding < high else None  # type: ignore[assignment]
        module.forward = TokenEmbedding(module, self.grid, size, low, high)  # type: ignore[method-assign]

    def head(self, module: nn.Module) -> None:
        shape = module.weight.shape[::-1] if is_transposed(module) else module.weight.shape  # type: ignore[union-attr, index]
        how = self.grid.across(shape[1], shape[0])
        self.place(module, "weight", self.grid.weight_placement(how, module.weight.shape, transposed=is_transposed(module)))
        if module.bias is not None:
            self.place(module, "bias", self.grid.bias_placement(how, module.bias.shape))
        projection = HeadProjection(module, self.grid, how)
        module.forward = Head(  # type: ignore[method-assign]
            module, self.logits, shape[0], projection.multiply, projection.weights, is_chunked=self.is_chunked
        )

    def _refusal(self, name: str, reason: str, allowed: str) -> PlanError:
        return PlanError(f"{self.term} cuts features, and {name} {reason}", allowed=allowed, remedy=f"tp{self.grid.both.size}, which is 1D")


class Stream:
    """What flows through one stack of blocks: cut by features from the first block to the last.

    With `draws`, ranks with other features draw other random numbers on the way, as dropout does.
    """

    def __init__(self, grid: Grid, blocks: list[nn.Module], width: int, draws: SplitDraws | None):
        self.grid, self.width, self.draws = grid, width, draws
        blocks[0].register_forward_pre_hook(self._cut, with_kwargs=True)
        blocks[-1].register_forward_hook(self._join)

    def _cut(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """This rank's features of the first argument."""
        key = None if args else next(iter(kwargs))
        x = args[0] if key is None else kwargs[key]
        if x.shape[-1] != self.width:
            raise ShapeError(
                f"the first argument of {type(block).__name__} has shape {tuple(x.shape)}",
                allowed=f"the {self.width} features that its projections give out",
                remedy="a 1D tensor term",
            )
        if self.draws is not None and block.training:
            self.draws.begin()
        part = comm.scatter_to(x, self.grid.both, -1)
        return ((part, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: part})

    def _join(self, block: nn.Module, args: tuple, output: Any) -> Any:
        """The features of all ranks of what comes out: of all, or of the first of several."""
        if self.draws is not None:
            self.draws.end()
        first = output[0] if isinstance(output, tuple | list) else output
        whole = comm.gather_from(first, self.grid.both, -1, list(self.grid.stream_sizes(self.width)))
        return type(output)((whole, *output[1:])) if isinstance(output, tuple | list) else whole


class Entrance:
    """The way into a group: what several columns take in enters once. `closes` forgets what entered before."""

    def __init__(self, grid: Grid, closes: Entrance | None = None):
        self.grid, self.closes = grid, closes
        self._entered: list[tuple[weakref.ref, Entered]] = []

    def __call__(self, x: torch.Tensor, how: Product, in_width: int | None) -> Entered:
        if self.closes is not None:
            self.closes._entered.clear()
            return enter(x, how.enter, how.sizes, keep=self.grid.keep)
        for source, entered in self._entered:
            if source() is x:
                return entered
        entered = self._enter(x, how, in_width)
        self._entered.append((weakref.ref(x), entered))
        return entered

    def _enter(self, x: torch.Tensor, how: Product, in_width: int | None) -> Entered:
        if x.shape[-1] == in_width:  # whole: it came from another stack
            start, stop = how.in_range
            return Entered(comm.copy_to(x, self.grid.both)[..., start:stop])
        if x.shape[-1] != how.sizes[how.enter.index]:
            raise ShapeError(
                f"a projection met activations of shape {tuple(x.shape)}",
                allowed=f"{how.sizes[how.enter.index]} of {in_width} features",
                remedy="a 1D tensor term",
            )
        return enter(x, how.enter, how.sizes, keep=self.grid.keep)


class Projection:
    """A projection into a group or out of it."""

    def __init__(self, module: nn.Module, grid: Grid, how: Product, entrance: Entrance, in_width: int | None):
        self.module, self.grid, self.how, self.entrance, self.in_width = module, grid, how, entrance, in_width
        self.transposed = is_transposed(module)
        first = how.in_range[1] - how.in_range[0] if self.transposed else how.num_out
        self.sizes = grid.stored_sizes(first)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        grid, how, module = self.grid, self.how, self.module
        entered = self.entrance(x, how, self.in_width)
        partial = product(entered, module.weight, grid.rows, 0, self.sizes, transposed=self.transposed, keep=grid.keep)
        out = leave(partial, how.leave, how.parts)
        return out if module.bias is None else out + module.bias


class WholeProjection:
    """A projection that could not be split: every rank computes all of it, from all features and for all that takes it in whole.

    Cost: a gather of its input over the ranks that have other features, and backward one of its output's gradient where it joins the
    stream.
    """

    def __init__(self, module: nn.Module, grid: Grid, joins: bool):
        self.module, self.axis, self.joins = module, grid.both, joins
        self.in_width = module.weight.shape[0 if is_transposed(module) else 1]  # type: ignore[union-attr, index]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_width:
            x = comm.gather_from(x, self.axis, -1, split_sizes(self.in_width, self.axis.size))
        out = type(self.module).forward(self.module, x)
        return comm.scatter_to(out, self.axis, -1) if self.joins else out


class SplitNorm:
    """A norm of rows whose features lie on several ranks."""

    def __init__(self, module: nn.Module, norm: Norm, grid: Grid, width: int):
        self.module, self.norm, self.axis, self.sizes = module, norm, grid.both, grid.stream_sizes(width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.sizes[self.axis.index]:
            raise ShapeError(
                f"a {type(self.module).__name__} met activations of shape {tuple(x.shape)}",
                allowed=f"{self.sizes[self.axis.index]} of {sum(self.sizes)} features",
                remedy="a 1D tensor term",
            )
        eps = torch.finfo(x.dtype).eps if self.norm.eps is None else self.norm.eps
        unit = (standardised if self.norm.is_centred else scaled_to_one)(x, self.axis, self.sizes, eps)
        return self.norm.scaled(unit, self.module._parameters)  # type: ignore[arg-type]


class TokenEmbedding:
    """Looks up the tokens of this rank's part of the vocabulary, and sums over the ranks.

    Cost: (n - 1)/n of the weight's part for the gather over rows, and of its gradient; twice the looked up activations for the sum.
    """

    def __init__(self, module: nn.Embedding, grid: Grid, size: int, low: int, high: int):
        self.module, self.grid, self.size, self.low, self.high = module, grid, size, low, high

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        require_tokens(tokens, None, self.size)
        is_elsewhere = (tokens < self.low) | (tokens >= self.high)
        parameters, local = self.module._parameters, self.module.weight
        parameters["weight"] = stored(local, self.grid.rows, 0, self.grid.stored_sizes(self.high - self.low))  # type: ignore[assignment]
        try:
            found = type(self.module).forward(self.module, (tokens - self.low).masked_fill(is_elsewhere, 0))
        finally:
            parameters["weight"] = local
        return comm.reduce_from(found.masked_fill(is_elsewhere[..., None], 0), self.grid.both)


class HeadProjection:
    """The product with a head's weight, whose parts lie along the rows of the grid."""

    def __init__(self, module: nn.Module, grid: Grid, how: Product):
        self.module, self.grid, self.transposed = module, grid, is_transposed(module)
        self.sizes = grid.stored_sizes(how.in_range[1] - how.in_range[0] if self.transposed else how.num_out)

    def multiply(self, entered: Entered) -> torch.Tensor:
        grid, module = self.grid, self.module
        logits = product(entered, module.weight, grid.rows, 0, self.sizes, transposed=self.transposed, keep=grid.keep)
        return logits if module.bias is None else logits + module.bias

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = stored(self.module.weight, self.grid.rows, 0, self.sizes)
        return weight.T if self.transposed else weight, self.module.bias
