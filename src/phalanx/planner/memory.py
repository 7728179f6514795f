"""The bytes that a plan keeps on every rank, in closed form: what the ledger of a run is held against.

State bytes per parameter on n data ranks, for an optimizer with two moments:

            fp32                                       bf16, fp16 (float32 master weights and gradients)
    zero0   16                                         18
    zero1   8 + 8/n                                    6 + 12/n
    zero2   4 + 12/n + one chunk's gradient            2 + 16/n + the same
    zero3   16/n + two gathered chunks, one gradient   18/n + the same
    with pp_keep all chunks of the rank's stages in their place: gathered under zero3, their gradients under zero2 and zero3

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5, with float32 gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from phalanx.errors import ConfigError, PlanError
from phalanx.plan import Plan

FULL_BYTES = 4  # of one element in float32: master weights, gradients and moments
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def predict(
    num_parameters: int,
    chunk_sizes: Sequence[int],
    plan: Plan,
    data_size: int,
    optimizer_moments: int = 2,
    *,
    kept_sizes: Sequence[int] = (),
    activation_bytes: int = 0,
) -> dict[str, int]:
    """The peak bytes of each class of memory on one rank, and their `total`.

    Shapes: `chunk_sizes` are the elements of each chunk in execution order, with their padding; `kept_sizes` those of the chunks that
    stay gathered under zero3. `num_parameters` counts the part of the model that one pipeline and tensor rank holds.
    Units: bytes.
    Raises: ConfigError where the chunks hold fewer elements than the model has, PlanError for a plan whose memory has no closed form.
    """
    if plan.precision not in COMPUTE_BYTES or plan.gemini or plan.offload:
        term = "gemini" if plan.gemini else "offload" if plan.offload else plan.precision
        raise PlanError(f"the memory of {term} has no closed form", allowed="zero0 to zero3, fsdp", remedy="zero3")
    sizes = [*chunk_sizes, *kept_sizes]
    if data_size < 1 or sum(sizes) < num_parameters:
        impossible = f"chunks of {sum(sizes)} elements for {num_parameters} parameters on {data_size} data ranks"
        raise ConfigError(impossible, allowed="chunks that hold every parameter, and 1 data rank or more")
    stage = 3 if plan.fsdp else plan.zero
    num_shards = (plan.zero_group or data_size) if stage else 1
    full, shard = sum(sizes), _shard_elements(sizes, num_shards)
    compute_bytes = COMPUTE_BYTES[plan.precision]
    # PyTorch's engine keeps the float32 shard alone and casts as it gathers.
    parameter_bytes = FULL_BYTES if plan.fsdp else compute_bytes
    master_bytes = FULL_BYTES if parameter_bytes < FULL_BYTES else 0
    held = _shard_elements(chunk_sizes, num_shards) + sum(kept_sizes) if stage == 3 else full
    gathered = sum(chunk_sizes) if plan.pp_keep else _largest_pair(chunk_sizes)
    unreduced = sum(sizes) if plan.pp_keep else max(sizes, default=0)
    found = {
        "parameter": held * parameter_bytes,
        "gradient": (shard if stage >= 2 else full) * FULL_BYTES,
        "optimizer": (shard if stage >= 1 else full) * (master_bytes + optimizer_moments * FULL_BYTES),
        "gathered_parameters": gathered * compute_bytes if num_shards > 1 and stage == 3 else 0,
        "gathered_gradient": unreduced * FULL_BYTES if num_shards > 1 and stage >= 2 else 0,
        "activation": activation_bytes,
    }
    return found | {"total": sum(found.values())}


def _shard_elements(sizes: Sequence[int], num_shards: int) -> int:
    """What one rank holds of chunks that are cut into equal shards, each padded to fit."""
    return sum(-(-size // num_shards) for size in sizes)


def scale_activations(measured_bytes: int, measured_rows: int, global_rows: int, plan: Plan, data_size: int) -> int:
    """The activation bytes of one pass of a plan, from what a pass of `measured_rows` rows was seen to hold.

    Rows are of equal length and recompute is the same in both; activations grow with the rows of the largest pass.
    """
    if measured_rows < 1:
        raise ConfigError(f"activations measured on {measured_rows} rows", allowed="1 row or more", remedy="one pass with a batch of 1")
    rows = math.ceil(math.ceil(global_rows / data_size) / (plan.acc * plan.num_micro))
    return math.ceil(measured_bytes * rows / measured_rows)


def _largest_pair(sizes: Sequence[int]) -> int:
    """The most that two consecutive chunks hold: the one that computes and the one that is fetched ahead."""
    return max((first + second for first, second in itertools.pairwise(sizes)), default=sum(sizes))
