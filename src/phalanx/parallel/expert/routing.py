"""What a person may add to the routing of a mixture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Additions to a model's own routing; by default none.

    `z` and `sequence` weigh the z-loss and the balance loss of each row, per layer: sums over tokens, divided like all losses by the
    count of the step. `bias_rate` moves the routers' correction biases after each step towards even loads, without a loss.
    `capacity` bounds what an expert takes to that many times its even share of the choices of one rank and pass; what exceeds it is
    dropped, and numbers then depend on the cut of the batch. `loads` places the experts of each named layer by their loads.
    Raises: ConfigError for values below 0, and for loads that are no numbers from 0.
    Source (bias_rate): Wang et al. 2024, Auxiliary-loss-free load balancing strategy for mixture-of-experts, algorithm 1.
    """

    z: float = 0.0
    sequence: float = 0.0
    bias_rate: float = 0.0
    capacity: float | None = None
    loads: Mapping[str, Sequence[float]] | None = None

    def __post_init__(self) -> None:
        for name in ("z", "sequence", "bias_rate"):
            if not _is_finite_from_0(getattr(self, name)):
                raise ConfigError(f"Routing({name}={getattr(self, name)})", allowed="a number from 0", remedy=f"{name}=0.001")
        if self.capacity is not None and not (_is_finite_from_0(self.capacity) and self.capacity):
            raise ConfigError(
                f"Routing(capacity={self.capacity})", allowed="a number above 0, or None to drop nothing", remedy="capacity=1.25"
            )
        for name, loads in (self.loads or {}).items():
            if wrong := [load for load in loads if not _is_finite_from_0(load)]:
                raise ConfigError(f"a load of {wrong[0]} in {name}", allowed="numbers from 0", remedy="loads of booster.expert_loads()")


def _is_finite_from_0(value: float) -> bool:
    return 0 <= value < math.inf
