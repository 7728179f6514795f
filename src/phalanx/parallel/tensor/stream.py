"""The residual stream of one stack, cut by sequence from its first block to its last (Megatron's sequence parallelism).

Shapes: activations (rows, sequence, features), or (rows * sequence, features) where a block flattens them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.cluster.random import SplitDraws
from phalanx.errors import ShapeError
from phalanx.layout import split_sizes
from phalanx.parallel.tensor.entered import Entered, enter
from phalanx.parallel.tensor.sequence import scatter_sums

_CUT = "_phalanx_sequence_cut"


class Stream:
    """Cuts the stream of `blocks` over `axis`. How long the parts are travels with the activations, so that a block that is computed
    again finds what it had.
    """

    def __init__(self, axis: Axis, blocks: list[nn.Module], draws: SplitDraws | None = None, *, keep: bool = True):
        self.axis, self.draws, self.keep = axis, draws, keep
        self.num_rows = 0
        self.sizes: list[int] = []
        blocks[0].register_forward_pre_hook(self._begin, with_kwargs=True)
        blocks[-1].register_forward_hook(self._end)
        for block in blocks:
            block.register_forward_pre_hook(self._begin_draws)
            block.forward = StreamedForward(block, self)  # type: ignore[method-assign]

    def _begin(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        x, put = _first(args, kwargs)
        if x.dim() != 3:
            raise ShapeError(
                f"the first argument of {type(block).__name__} has shape {tuple(x.shape)}",
                allowed="(rows, sequence, features)",
                remedy="leave sp out",
            )
        sizes = split_sizes(x.shape[1], self.axis.size)
        part = comm.scatter_to(x, self.axis, 1, sizes)
        setattr(part, _CUT, (x.shape[0], sizes))
        return put(part)

    def _begin_draws(self, block: nn.Module, args: tuple) -> None:
        """At every block, since the first one that runs here may be any: draws that have begun go on."""
        if self.draws is not None and block.training:
            self.draws.begin()

    def _end(self, block: nn.Module, args: tuple, output: Any) -> Any:
        """Joins what the last block gives out: all of it, or the first of several."""
        if self.draws is not None:
            self.draws.end()
        return _with_first(output, comm.gather_from(_first_of(output), self.axis, 1, self.sizes))

    def enter(self, x: torch.Tensor) -> Entered:
        """The whole sequence, for a part of the work on each rank."""
        by_row = self._by_row(x, self.sizes[self.axis.index])
        entered = enter(by_row, self.axis, self.sizes, dim=1, keep=self.keep)
        return entered if by_row is x else replace(entered, full=entered.full.flatten(0, 1))

    def scatter_sums(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence, summed over the ranks."""
        by_row = self._by_row(x, sum(self.sizes))
        part = scatter_sums(by_row, self.axis, 1, self.sizes)
        return part if by_row is x else part.flatten(0, 1)

    def _by_row(self, x: torch.Tensor, length: int) -> torch.Tensor:
        if x.dim() == 3 and x.shape[:2] == (self.num_rows, length):
            return x
        if x.dim() == 2 and x.shape[0] == self.num_rows * length:
            return x.view(self.num_rows, length, x.shape[1])
        raise ShapeError(
            f"a projection met activations of shape {tuple(x.shape)}",
            allowed=f"({self.num_rows}, {length}, features) in the stream that sp has cut",
            remedy="leave sp out",
        )


class StreamedForward:
    """Stands in a block's `forward` attribute: learns from what comes in how the sequence is cut, and marks what goes out."""

    def __init__(self, block: nn.Module, stream: Stream):
        self.block, self.stream = block, stream

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return partial(type(self.block).forward, self.block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cut = getattr(_first(args, kwargs)[0], _CUT, None)
        if cut is None:
            raise ShapeError(
                f"a {type(self.block).__name__} took in activations that no block before it has given out",
                allowed="blocks that hand each other the stream as it is",
                remedy="leave sp out",
            )
        self.stream.num_rows, self.stream.sizes = cut
        output = self.__wrapped__(*args, **kwargs)
        setattr(_first_of(output), _CUT, cut)
        return output


def _first(args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[tuple, dict[str, Any]]]]:
    """The first argument, and a function that puts another one in its place."""
    if args:
        return args[0], lambda value: ((value, *args[1:]), kwargs)
    key = next(iter(kwargs))
    return kwargs[key], lambda value: (args, {**kwargs, key: value})


def _first_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def _with_first(output: Any, first: torch.Tensor) -> Any:
    return type(output)((first, *output[1:])) if isinstance(output, (tuple, list)) else first
