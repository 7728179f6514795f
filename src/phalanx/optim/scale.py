"""The dynamic loss scale of half-precision gradients: one number, the same on every rank.

Source: Micikevicius et al., "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.errors import ConfigError


@dataclass(kw_only=True)
class LossScale:
    """Grows while gradients are finite, falls back when they are not, down to `minimum`. A constant scale has growth and backoff 1."""

    value: float = 1.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    minimum: float = 2.0**-24
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.value <= 0 or self.minimum <= 0 or self.growth < 1 or not 0 < self.backoff <= 1 or self.growth_interval < 1:
            settings = f"value={self.value} minimum={self.minimum} growth={self.growth} backoff={self.backoff}"
            raise ConfigError(
                f"loss scale settings {settings} interval={self.growth_interval}",
                allowed="value > 0, minimum > 0, growth >= 1, 0 < backoff <= 1, growth_interval >= 1",
                remedy="value=65536, growth=2, backoff=0.5, growth_interval=2000",
            )

    @classmethod
    def constant(cls) -> LossScale:
        return cls(value=1.0, growth=1.0, backoff=1.0)

    def fit(self, count: float) -> None:
        """Settings are meant for the gradient of a mean; what is differentiated is a sum over `count` terms, as much larger."""
        divisor = 2.0 ** math.ceil(math.log2(max(count, 1.0)))  # a power of two, so that scaling rounds nothing
        self.value, self.minimum = self.value / divisor, self.minimum / divisor

    def update(self, finite: bool) -> None:
        """After a step in which the gradients of all ranks were finite, or not."""
        if not finite:
            self.value, self.good_steps = max(self.value * self.backoff, min(self.minimum, self.value)), 0
            return
        self.good_steps += 1
        if self.good_steps % self.growth_interval == 0:
            self.value, self.good_steps = self.value * self.growth, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "minimum": self.minimum, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.minimum, self.good_steps = float(state["value"]), float(state["minimum"]), int(state["good_steps"])
