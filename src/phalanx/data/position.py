"""A place in the data that means the same under any plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """What was handed out so far in this epoch, over all ranks together; `seed` and `epoch` fix the order it is a place in."""

    seed: int
    epoch: int = 0
    batches: int = 0
    samples: int = 0
