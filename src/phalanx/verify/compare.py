"""Compares two traces number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.verify.trace import Trace

QUANTITIES = ("loss", "gradient", "norm", "weights")


@dataclass(frozen=True)
class Difference:
    """How far one number or tensor is off; `step` counts from 1 and is None for the state after all steps."""

    quantity: str
    name: str
    step: int | None
    error: float
    detail: str = ""

    def __str__(self) -> str:
        what = {"gradient": f"gradient of {self.name}", "weights": f"weight {self.name}"}.get(self.quantity, self.quantity)
        when = "after the last step" if self.step is None else f"step {self.step}"
        return f"{what} ({when}){': ' + self.detail if self.detail else ''}"


def compare(expected: Trace, found: Trace, floor: float = 1e-6) -> list[Difference]:
    """Every compared number, in execution order: gradients by step and forward order, each step's loss and norm, the weights.

    A tensor's error is its largest difference over the larger of its largest magnitude and `floor` times the largest in the
    model. A step's gradients come before its loss, because they name the place where the two runs part.
    """
    differences = []
    for step in range(len(expected.losses)):
        gradients = found.gradients[step] if step < len(found.gradients) else {}
        differences += _tensors("gradient", step + 1, expected.gradients[step], gradients, expected.order, floor)
        differences.append(_number("loss", step + 1, expected.losses, found.losses))
        differences.append(_number("norm", step + 1, expected.norms, found.norms))
    differences += _tensors("weights", None, expected.weights, found.weights, expected.order, floor)
    return differences


def worst_of(differences: Sequence[Difference]) -> dict[str, float]:
    """The largest error of each quantity."""
    return {name: max((d.error for d in differences if d.quantity == name), default=0.0) for name in QUANTITIES}


def unequal_replicas(ranks: Sequence[Trace]) -> str | None:
    """The first number that two ranks do not hold bit for bit alike, or None."""
    for name, value in ranks[0].digests.items():
        for rank, trace in enumerate(ranks):
            if trace.digests.get(name) != value:
                return f"{name} differs between rank 0 and rank {rank}"
    return None


def unequal_start(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first weight of which two runs did not start from the same bits, or None."""
    return next((name for name, value in expected.items() if found.get(name) != value), None)


def _number(quantity: str, step: int, expected: list[float], found: list[float]) -> Difference:
    if len(found) < step:
        return Difference(quantity, quantity, step, math.inf, "missing")
    error = abs(found[step - 1] - expected[step - 1]) / max(abs(expected[step - 1]), 1e-300)
    return Difference(quantity, quantity, step, error if math.isfinite(error) else math.inf)


def _tensors(
    quantity: str,
    step: int | None,
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    order: Sequence[str],
    floor: float,
) -> Iterator[Difference]:
    """Tensors in execution order, then the rest; a gradient that one side lacks is 0 there, as an unused parameter's is."""
    largest = max((_magnitude(tensor) for tensor in expected.values()), default=0.0)
    names = dict.fromkeys(name for name in order if name in expected or name in found) | dict.fromkeys([*expected, *found])
    for name in names:
        left, right = expected.get(name), found.get(name)
        if quantity == "gradient":
            left = torch.zeros_like(right) if left is None and right is not None else left
            right = torch.zeros_like(left) if right is None and left is not None else right
        elif left is None:
            continue  # a name that the single-device program does not save
        yield Difference(quantity, name, step, *_error(left, right, floor * largest))


def _error(expected: torch.Tensor, found: torch.Tensor | None, least: float) -> tuple[float, str]:
    if found is None:
        return math.inf, "missing"
    if expected.shape != found.shape:
        return math.inf, f"shape {tuple(found.shape)} where {tuple(expected.shape)} is right"
    if expected.numel() == 0:
        return 0.0, ""
    if expected.dtype == torch.bool or not expected.is_floating_point():
        return (0.0, "") if torch.equal(expected, found) else (math.inf, "integers differ")
    off = float((found.double() - expected.double()).abs().max())
    if not math.isfinite(off):
        return math.inf, "not finite"
    return off / max(_magnitude(expected), least, 1e-300), ""


def _magnitude(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() and tensor.is_floating_point() else 0.0
