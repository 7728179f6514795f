"""Parts of a model whose state is gathered, let go and reduced when a table says so, not when their layers run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from phalanx.memory.chunk import Chunk
from phalanx.memory.reduction import GradientReducer
from phalanx.memory.stream import ParameterStream


class Parts:
    """The chunks of each part by name; a chunk may belong to several.

    Cost: between `unshard` and `reshard` a part's parameters in full, in compute dtype; until `reduce` its local gradients in full.
    """

    def __init__(
        self, names: Mapping[Hashable, Collection[str]], chunks: Sequence[Chunk], stream: ParameterStream | None, reducer: GradientReducer
    ):
        self.names, self.chunks, self.stream, self.reducer = names, chunks, stream, reducer
        self._complete: set[Hashable] = set()

    def unshard(self, part: Hashable) -> None:
        """Begins to gather a part's parameters, which stay until `reshard`; whoever needs one waits for it.

        Cost: (n-1)/n of their bytes, once.
        """
        if self.stream is not None:
            self.stream.keep(part, self._chunks_where(lambda parts: part in parts))

    def reshard(self, part: Hashable) -> None:
        """Lets a part's parameters go, but for those that another part still keeps."""
        if self.stream is not None:
            self.stream.give_up(part)

    def reduce(self, part: Hashable) -> None:
        """Begins to sum the gradients of a part over ranks; a chunk of several parts waits for the last of them."""
        if part in self._complete:  # a further pass before the optimizer's step
            self._complete.clear()
        self._complete.add(part)
        self.reducer.reduce(self._chunks_where(lambda parts: part in parts and parts <= self._complete))

    def _chunks_where(self, is_meant: Callable[[set[Hashable]], bool]) -> list[Chunk]:
        """The chunks of which the set of parts they belong to is meant."""
        return [chunk for chunk in self.chunks if is_meant({part for part, names in self.names.items() if chunk.name in names})]
