"""What `phalanx plan --memory` prints: where each chunk of a model lives, when it moves, and what a step then moves and waits for."""

from __future__ import annotations

from typing import Any

from phalanx.cli.output import print_rows, show_bytes
from phalanx.errors import ConfigError


def plan_memory(plan: Any, model: str) -> dict[str, Any]:
    """The memory plan of one rank's first step under AdamW, found by a dry run: nothing is trained.

    Events are numbered through a step; `begun` are those before which the fetch for the one in `fetched` begins.
    """
    import torch

    from phalanx.booster import Booster
    from phalanx.verify.program import find_source

    if not plan.gemini:
        raise ConfigError(f"the plan {plan} has no tiers", allowed="a plan with gemini", remedy=f"phalanx plan gemini --memory {model}")
    program = find_source(model).build()
    booster = Booster(plan)
    learning = [parameter for parameter in program.model.parameters() if parameter.requires_grad]
    booster.boost(program.model, torch.optim.AdamW(learning), program.criterion)
    training = booster.trainings[0]
    training.plan_moves(program.batch(0))
    tiers = training.engine.tiers
    if tiers.plan is None:
        raise ConfigError(f"the order of a pass of {model} cannot be found without running it", allowed="forwards that read no numbers")
    chunks = []
    for chunk, home in zip(tiers.chunks, tiers.plan.homes, strict=True):
        parts = {"parameter": home.parameter, "gradient": home.gradient, "optimizer": home.optimizer}
        chunks.append({"name": chunk.name, "bytes": chunk.sizes().shard, **parts, **tiers.plan.moves_of(chunk.number)})
    return {
        "chunks": chunks,
        "events": len(tiers.plan.record.events) * tiers.plan.passes,
        "moved_bytes": {f"{tier} {way}": count for (tier, way), count in tiers.plan.moved.items()},
        "stall_s": tiers.plan.stall_s,
        "smallest_device_bytes": tiers.plan.smallest,
        "held_bytes": {tier: budget.used for tier, budget in tiers.budgets().items()},
    }


def print_memory(memory: dict[str, Any]) -> None:
    """The same as lines for people."""
    rows: list[tuple[str, ...]] = [("chunk", "bytes", "parameter", "gradient", "optimizer", "fetched at", "stays after")]
    for chunk in memory["chunks"]:
        homes = (chunk["parameter"], chunk["gradient"], chunk["optimizer"])
        rows.append((chunk["name"], show_bytes(chunk["bytes"]), *homes, _numbers(chunk["fetched"]), _numbers(chunk["stays"])))
    moved = ", ".join(f"{link} {show_bytes(count)}" for link, count in memory["moved_bytes"].items() if count) or "nothing"
    held = ", ".join(f"{tier} {show_bytes(count)}" for tier, count in memory["held_bytes"].items())
    totals = [("moved in a step", moved), ("waits at most", f"{memory['stall_s']:.6f} s"), ("held between steps", held)]
    totals.append(("smallest device budget", show_bytes(memory["smallest_device_bytes"])))
    print_rows(rows)
    print_rows(totals)


def _numbers(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) or "-"
