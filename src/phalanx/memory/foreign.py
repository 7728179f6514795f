"""Finds parameters that are read outside of the module they belong to, while a model runs for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from phalanx.anatomy.parameter_reads import ParameterReads
from phalanx.memory.chunk import Chunk, Slot


class ForeignReads(ParameterReads):
    """Calls `found(chunk, slot)` before an operation reads a parameter whose chunk is not gathered.

    A head that multiplies with an embedding's weight is the usual case.
    """

    def __init__(self, chunks: Iterable[Chunk], found: Callable[[Chunk, Slot], None]):
        home = {id(slot.parameter): (chunk, slot) for chunk in chunks for slot in chunk.slots}

        def look(parameter: nn.Parameter) -> None:
            chunk, slot = home.get(id(parameter), (None, None))
            if chunk is not None and slot is not None and not chunk.is_gathered:
                found(chunk, slot)

        super().__init__(look)
