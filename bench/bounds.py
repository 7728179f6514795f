"""Closed forms that the measured bytes are held against: the ring bound of the traffic, and state bytes per parameter.

Source: ring all-reduce sends 2 (n - 1) / n of a tensor per rank, a reduce-scatter or an all-gather half of that.
"""

from __future__ import annotations


def wire_bytes_per_rank(stage: int, world: int, parameters: int, parameter_bytes: int, gradient_bytes: int) -> float:
    """Least bytes that one rank sends in a step; zero3 gathers parameters for the forward and again for the backward pass."""
    part = (world - 1) / world * parameters
    if stage == 0:
        return 2 * part * gradient_bytes
    gathers = 2 if stage == 3 else 1
    return part * (gradient_bytes + gathers * parameter_bytes)


def state_bytes(stage: int, world: int, parameters: dict[str, int], half: bool) -> float:
    """Parameters, gradients and Adam's moments of one rank; in bf16 also fp32 master weights, with fp32 gradients.

    `parameters` counts those of the `model`, of a `layer` and of the largest `edge` (embedding or head).
    """
    total = parameters["model"]
    chunk = max(parameters["layer"], parameters["edge"])
    compute = 2 if half else 4
    weights_and_moments = 14 if half else 12  # 4 + 4 + 4, and 2 for the copy in compute dtype
    if stage == 0:
        return total * (weights_and_moments + 4)
    if stage == 1:
        return total * ((6 + 12 / world) if half else (8 + 8 / world))
    if stage == 2:
        return total * ((2 + 16 / world) if half else (4 + 12 / world)) + 4 * chunk
    return total * (weights_and_moments + 4) / world + chunk * (2 * compute + 4)
