"""Which of a chunk's three parts are cut over the data axis: ZeRO 0 to 3 are four rows of one table.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """For each part of the state, whether a rank keeps only its shard of it between uses."""

    parameter: bool
    gradient: bool
    optimizer: bool


ZERO = {
    0: Policy(parameter=False, gradient=False, optimizer=False),
    1: Policy(parameter=False, gradient=False, optimizer=True),
    2: Policy(parameter=False, gradient=True, optimizer=True),
    3: Policy(parameter=True, gradient=True, optimizer=True),
}
