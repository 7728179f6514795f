"""The learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(total_steps: int, warmup_steps: int, final_fraction: float) -> Callable[[int], float]:
    """The factor of the learning rate at each step, for `LambdaLR`: up in a line, then down half a cosine wave to `final_fraction`.

    Step 0 already learns: the line starts at 1 / (warmup_steps + 1).
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
