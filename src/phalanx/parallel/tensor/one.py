"""1D tensor parallelism: columns, then rows, with one sum (or with `sp` one gather and one scattered sum) for each pair.

Cost: in elements per rank of a group of t, for a layer with two pairs and activations x: 8(t-1)/t x forward and backward, with and
without `sp`; 1/t of the pairs' parameters and, with `sp`, 1/t of the activations between them. With `sp` inputs that were gathered are
kept, or gathered again in the backward: then 10(t-1)/t x, and 1/t of all activations.
Source: Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022 (sequence parallelism).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from phalanx.anatomy import Entry, Group, Proved, Split, is_linear, is_transposed, num_features
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis, make_axis
from phalanx.cluster.placement import Placement
from phalanx.cluster.random import SplitDraws
from phalanx.errors import PlanError
from phalanx.kernels.split_cross_entropy import require_tokens
from phalanx.layout import Layout, split_range
from phalanx.parallel.tensor.entered import Entered, enter_whole, entered_as
from phalanx.parallel.tensor.kind import Place
from phalanx.parallel.tensor.split_logits import SplitLogits
from phalanx.parallel.tensor.stream import Stream
from phalanx.parallel.tensor.summa import product
from phalanx.parallel.tensor.vocabulary import Head

Ranges = tuple[tuple[int, int], ...]


class OneDimensional:
    """Splits over `axis`; with `by_sequence` the stream between groups is split as well. `place` declares a parameter's placement.

    `keep` False gathers the stream again in the backward, and holds this rank's part of it until then. `is_chunked` leaves the forming of
    logits to the loss.
    `draws` are begun where activations are split and ended where they are not, for models that draw at random in training.
    """

    def __init__(
        self,
        axis: Axis,
        place: Place,
        logits: SplitLogits,
        *,
        by_sequence: bool = False,
        keep: bool = True,
        is_chunked: bool = False,
        draws: SplitDraws | None = None,
    ):
        self.axis, self.place, self.by_sequence, self.keep, self.draws = axis, place, by_sequence, keep, draws
        self.logits, self.is_chunked = logits, is_chunked
        self.streams: dict[str, Stream] = {}
        self.part = axis.index

    # -- stacks --------------------------------------------------------------------------------------------------------

    def enter(self, stack: str, blocks: list[nn.Module]) -> None:
        if self.by_sequence:
            self.streams[stack] = Stream(self.axis, blocks, self.draws, keep=self.keep)

    def leave(self, stack: str, blocks: list[nn.Module]) -> None:
        pass

    def norm(self, module: nn.Module) -> None:
        """Parameters that meet a part of the sequence on each rank have a part of their gradient there."""
        for attribute, parameter in module._parameters.items():
            if parameter is not None and self.by_sequence:
                self._whole(module, attribute)

    # -- groups --------------------------------------------------------------------------------------------------------

    def linear(self, item: Proved, model: nn.Module) -> None:
        group, stream = item.group, self._stream_of(item.group.rows[0])
        num_columns = sum(is_linear(model.get_submodule(name)) for name in group.columns)
        if stream is None:
            entrance = Entrance(lambda x: enter_whole(x, self.axis), num_columns, len(group.rows), self.draws)
        elif group.kind == "heads":
            self._enter_attention(item, model, stream)
            entrance = Entrance(lambda x: entered_as(x) or Entered(x), num_columns, len(group.rows))
        else:
            entrance = Entrance(stream.enter, num_columns, len(group.rows))
        for name in group.columns:
            self._column(model.get_submodule(name), group, name, entrance)
        for name in group.rows:
            self._row(model.get_submodule(name), group, entrance, stream)
        for name, part in group.parameters.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            if part is None:
                self._whole(module, attribute)
            else:
                self._cut(module, attribute, part[0], part[1], group)

    def _stream_of(self, name: str) -> Stream | None:
        return next((stream for stack, stream in self.streams.items() if not stack or name.startswith(f"{stack}.")), None)

    def _enter_attention(self, item: Proved, model: nn.Module, stream: Stream) -> None:
        """With the stream cut by sequence, an attention's module itself must see whole sequences: its code asks how long they are."""
        entry = item.entry
        if entry is None or entry.stream is None or _is_block(entry.module, self.streams):
            raise PlanError(
                f"sp cuts the sequence, and {item.group.rows[0]} belongs to an attention that is computed in the block's own forward",
                allowed="sp where each attention is a module of its own that takes in the stream",
                remedy="leave sp out",
            )
        if not self.keep and not entry.hands_on:
            raise _cannot_gather_again(entry.module, "makes something of the stream before its projections")
        model.get_submodule(entry.module).register_forward_pre_hook(
            AttentionEntry(entry, stream, self.axis), with_kwargs=True, prepend=True
        )

    def _column(self, module: nn.Module, group: Group, name: str, entrance: Entrance) -> None:
        split = group.columns[name]
        dim = 1 if isinstance(module, nn.Embedding) or is_transposed(module) else 0
        held_whole = not self._cut(module, "weight", dim, split, group)
        if isinstance(module, nn.Embedding):
            return
        if module.bias is not None:
            self._cut(module, "bias", 0, split, group)
        if not (self.keep or held_whole or is_plain(module)):
            raise _cannot_gather_again(name, "has a forward of its own")
        ranges = split.ranges(*self._atoms(group)) or ((0, 0),)
        if is_transposed(module):
            module.nf = num_features(ranges)  # type: ignore[assignment]
        module.forward = Column(module, entrance, ranges if held_whole else None)  # type: ignore[method-assign]

    def _row(self, module: nn.Module, group: Group, entrance: Entrance, stream: Stream | None) -> None:
        ranges = Split.even(group.atoms, group.width).ranges(*self._atoms(group)) or ((0, 0),)
        self.place(module, "weight", Placement(Layout.cut(module.weight.shape, 0 if is_transposed(module) else 1, *ranges)))
        if module.bias is not None and stream is not None:
            self._whole(module, "bias")
        leave = stream.scatter_sums if stream is not None else lambda x: comm.reduce_from(x, self.axis)
        module.forward = Row(module, leave, entrance)  # type: ignore[method-assign]

    def _whole(self, module: nn.Module, attribute: str) -> None:
        """Every rank has all of a parameter and does a part of the work with it."""
        self.place(module, attribute, Placement(Layout.whole(getattr(module, attribute).shape), sums=(self.axis,)))

    def _atoms(self, group: Group, index: int | None = None) -> tuple[int, int]:
        return group.allotted(self.axis.size, self.axis.index if index is None else index)

    def _cut(self, module: nn.Module, attribute: str, dim: int, split: Split, group: Group) -> bool:
        """Declares a parameter cut as its group's atoms are; returns False where it has to be held whole.

        Where a rank shares a part of what it needs with others and another part not, no box says so: every rank then holds all of
        it and uses its part.
        """
        parts = [split.ranges(*self._atoms(group, index)) for index in range(self.axis.size)]
        if any(split.is_shared(*self._atoms(group, index)) is None for index in range(self.axis.size)):
            self._whole(module, attribute)
            return False
        mine = parts[self.axis.index]
        sharing = [rank for rank, ranges in zip(self.axis.ranks, parts) if ranges == mine and mine]
        sums: tuple[Axis, ...] = ()
        if len(sharing) == self.axis.size:
            sums = (self.axis,)
        elif len(sharing) > 1:
            sums = (make_axis(f"{self.axis.name}:shared", sharing, self.axis.ranks[self.axis.index]),)
        layout = Layout.cut(getattr(module, attribute).shape, dim, *(mine or ((0, 0),)))
        self.place(module, attribute, Placement(layout, sums=sums))
        return True

    # -- vocabulary ----------------------------------------------------------------------------------------------------

    def embedding(self, module: nn.Embedding) -> None:
        size = module.weight.shape[0]
        low, high = split_range(size, self.axis.size, self.axis.index)
        self.place(module, "weight", Placement(Layout.cut(module.weight.shape, 0, (low, high))))
        padding = module.padding_idx
        module.padding_idx = padding - low if padding is not None and low <= padding < high else None  # type: ignore[assignment]
        module.forward = TokenEmbedding(module, self.axis, size, low, high)  # type: ignore[method-assign]

    def head(self, module: nn.Module) -> None:
        size = module.weight.shape[1 if is_transposed(module) else 0]
        low, high = split_range(size, self.axis.size, self.axis.index)
        self.place(module, "weight", Placement(Layout.cut(module.weight.shape, 1 if is_transposed(module) else 0, (low, high))))
        if module.bias is not None:
            self.place(module, "bias", Placement(Layout.cut(module.bias.shape, 0, (low, high))))
        if is_transposed(module):
            module.nf = high - low  # type: ignore[assignment]
        module.forward = Head(  # type: ignore[method-assign]
            module, self.logits, size, lambda entered: multiply(module, entered), lambda: weights_of(module), is_chunked=self.is_chunked
        )


def _cannot_gather_again(name: str, reason: str) -> PlanError:
    return PlanError(
        f"tp_keep = false gathers again what projections take in, and {name} {reason}",
        allowed="plain projections that take in the stream",
        remedy="leave tp_keep out, or recompute",
    )


def _is_block(name: str, stacks: Iterable[str]) -> bool:
    return any(name.rpartition(".")[0] == stack for stack in stacks)


class Entrance:
    """The way into a group and out of it: what several columns take in enters once, so that its gradients are summed once.

    Between the last column and the last row activations are split, and draws with them.
    """

    def __init__(self, enter: Callable[[torch.Tensor], Entered], num_columns: int, num_rows: int, draws: SplitDraws | None = None):
        self._enter, self._num_columns, self._num_rows, self._draws = enter, num_columns, num_rows, draws
        self._entered: list[tuple[weakref.ref, Entered]] = []
        self._columns = self._rows = 0

    def enter(self, x: torch.Tensor) -> Entered:
        """What a column takes in, ready for a part of the work."""
        for source, entered in self._entered:
            if source() is x:
                return entered
        entered = self._enter(x)
        self._entered.append((weakref.ref(x), entered))
        return entered

    def column_done(self, is_training: bool) -> None:
        self._columns += 1
        if self._draws is not None and is_training and self._columns % self._num_columns == 0:
            self._draws.begin()

    def row_begun(self) -> None:
        self._rows += 1
        self._entered.clear()
        if self._draws is not None and self._rows % self._num_rows == 0:
            self._draws.end()


class AttentionEntry:
    """Gathers the sequence before an attention's module runs; what comes from another stack is whole already."""

    def __init__(self, entry: Entry, stream: Stream, axis: Axis):
        self.entry, self.stream, self.axis = entry, stream, axis

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        arguments[self.entry.stream] = self.stream.enter(arguments[self.entry.stream]).marked()
        if self.entry.beside is not None:
            arguments[self.entry.beside] = enter_whole(arguments[self.entry.beside], self.axis).marked()
        return tuple(arguments[place] for place in range(len(args))), {key: arguments[key] for key in kwargs}


class Column:
    """A projection whose outputs are split; `used` are the output features to compute where its parameters are held whole."""

    def __init__(self, module: nn.Module, entrance: Entrance, used: Ranges | None):
        self.module, self.entrance, self.used = module, entrance, used

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module, entered = self.module, self.entrance.enter(x)
        self.entrance.column_done(module.training)
        if self.used is None:
            return multiply(module, entered)
        weight, bias = weights_of(module)
        return product(entered, self._part(weight), bias=None if bias is None else self._part(bias))

    def _part(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[start:stop] for start, stop in self.used or ()])


def is_plain(module: nn.Module) -> bool:
    """Whether a projection multiplies and adds, and does nothing else."""
    return type(module).forward is nn.Linear.forward or is_transposed(module)


def multiply(module: nn.Module, entered: Entered) -> torch.Tensor:
    """What a projection does with its input, whatever its forward was replaced by."""
    if is_plain(module):
        return product(entered, module.weight, bias=module.bias, transposed=is_transposed(module))
    return type(module).forward(module, entered.full)


def weights_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight by outputs and the bias of a projection."""
    return module.weight.T if is_transposed(module) else module.weight, module.bias


class Row:
    """A projection whose inputs are split: its product is a part of a sum, and the bias is added to the whole."""

    def __init__(self, module: nn.Module, leave: Callable[[torch.Tensor], torch.Tensor], entrance: Entrance):
        self.module, self.leave, self.entrance = module, leave, entrance

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self.module
        self.entrance.row_begun()
        total = self.leave(F.linear(x, module.weight.T if is_transposed(module) else module.weight))
        return total if module.bias is None else total + module.bias


class TokenEmbedding:
    """Looks up the tokens of this rank's part of the vocabulary, and sums over the ranks."""

    def __init__(self, module: nn.Embedding, axis: Axis, size: int, low: int, high: int):
        self.module, self.axis, self.size, self.low, self.high = module, axis, size, low, high

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        require_tokens(tokens, None, self.size)
        is_elsewhere = (tokens < self.low) | (tokens >= self.high)
        found = type(self.module).forward(self.module, (tokens - self.low).masked_fill(is_elsewhere, 0))
        return comm.reduce_from(found.masked_fill(is_elsewhere[..., None], 0), self.axis)
