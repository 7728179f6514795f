"""The interface of every kind of tensor parallelism: what becomes of the modules of a model that was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from phalanx.anatomy import Proved
from phalanx.cluster.placement import Placement

Place = Callable[[nn.Module, str, Placement], None]


class Kind(Protocol):
    """Declares where a module's parameters lie, and swaps what its forward does around the local product.

    Modules stay the objects they were. `enter` is called for every stack before its projections, `leave` after all else.
    """

    def enter(self, stack: str, blocks: list[nn.Module]) -> None:
        """The layer stack of this name, before its projections."""

    def linear(self, item: Proved, model: nn.Module) -> None:
        """The projections of one group: columns, whose outputs belong to its atoms, then rows, whose outputs are sums over them."""

    def norm(self, module: nn.Module) -> None:
        """A module inside of the blocks that no group has taken, as norms are: its parameters stay whole."""

    def embedding(self, module: nn.Embedding) -> None:
        """The token embedding, by rows of the vocabulary."""

    def head(self, module: nn.Module) -> None:
        """The projection to logits, by rows of the vocabulary."""

    def leave(self, stack: str, blocks: list[nn.Module]) -> None:
        """The layer stack of this name, after its projections."""
