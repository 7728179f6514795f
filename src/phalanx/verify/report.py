"""What `verify` answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.verify.compare import Difference, worst_of
from phalanx.verify.trace import Share


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One plan against one process in one precision.

    `worst` and `tolerance` have, for each quantity, the largest relative error and what is allowed. `first_difference` is the first
    number in execution order above it, `replicas` the first that two ranks did not hold bit for bit alike. `shares` tells of each
    rank which part of the parameters it computes with and updates: numbers are equal under a plan that does nothing, too.
    """

    precision: str
    tolerance: dict[str, float]
    ok: bool
    worst_relative_error: float
    first_difference: str | None
    worst: dict[str, float]
    replicas: str | None = None
    shares: tuple[Share, ...] = ()

    @classmethod
    def of(
        cls,
        differences: Sequence[Difference],
        *,
        precision: str,
        tolerance: dict[str, float],
        replicas: str | None = None,
        shares: Sequence[Share] = (),
    ) -> Comparison:
        """Sums up all compared numbers."""
        worst = worst_of(differences)
        first = next((d for d in differences if not d.error <= tolerance[d.quantity]), None)
        return cls(
            precision=precision,
            tolerance=tolerance,
            ok=first is None and replicas is None,
            worst_relative_error=max(worst.values()),
            first_difference=str(first) if first is not None else replicas,
            worst=worst,
            replicas=replicas,
            shares=tuple(shares),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one verification.

    `comparisons` holds the machinery's in float64, and, for a plan with a precision term, a second one against one process in
    that precision. The fields beside it are those of the first that failed, or of the first.
    """

    model: str
    plan: str
    world: int
    steps: int
    seconds: float
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        return all(comparison.ok for comparison in self.comparisons)

    @property
    def worst_relative_error(self) -> float:
        return self._leading.worst_relative_error

    @property
    def first_difference(self) -> str | None:
        return self._leading.first_difference

    @property
    def _leading(self) -> Comparison:
        return next((comparison for comparison in self.comparisons if not comparison.ok), self.comparisons[0])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values; an error that is not a finite number is None."""
        fields = ("ok", "worst_relative_error", "first_difference", "model", "plan", "world", "steps", "seconds")
        values = {name: getattr(self, name) for name in fields}
        values["comparisons"] = [asdict(comparison) for comparison in self.comparisons]
        return _finite(values)

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        verdict = "equal to one process" if self.ok else "NOT equal to one process"
        lines = [f"{self.model}, {self.plan} on {self.world} ranks, {self.steps} steps: {verdict} ({self.seconds:.1f} s)"]
        for comparison in self.comparisons:
            lines.append(f"  in {comparison.precision}, worst relative errors and what is allowed")
            lines += [f"    {name:9} {error:.1e}  {comparison.tolerance[name]:.0e}" for name, error in comparison.worst.items()]
            lines.append(f"    replicas  {comparison.replicas or 'bit-equal'}")
            if comparison.shares:
                computes, updates = (_range([getattr(share, name) for share in comparison.shares]) for name in ("computes", "updates"))
                lines.append(f"    a rank computes with {computes} of the parameters and updates {updates}")
            if comparison.first_difference:
                lines.append(f"    first difference: {comparison.first_difference}")
        return "\n".join(lines)


def _range(parts: Sequence[float]) -> str:
    least, most = (f"{100 * part:.3g}" for part in (min(parts), max(parts)))
    return f"{least} %" if least == most else f"{least} to {most} %"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
