"""Which terms of the plan grammar have a strategy behind them; landing a strategy is one line here."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.errors import PlanError
from phalanx.plan.fields import PlanFields
from phalanx.plan.text import terms

LANDED = frozenset(
    {
        "dp",
        "acc",
        "cp",
        "ulysses",
        "ring",
        "ep",
        "zero",
        "zero:group",
        "fsdp",
        "gemini",
        "bf16",
        "fp16",
        "recompute",
        "pp",
        "micro",
        "gpipe",
        "zb-h1",
        "zbv",
        "dualpipev",
        "auto-schedule",
        "interleaved",
        "tp",
        "sp",
        "tp:2d",
        "tp:2.5d",
        "tp:3d",
    }
)

# What would work until the term has landed; a schedule or micro-batches fall away with the pipeline.
INSTEAD = {
    "tp": "zero3, which divides the parameters as well",
    "pp": "zero3, which divides the parameters as well",
    "offload": "zero3",
    "fp8": "bf16",
}

# Beside which the order of a step, or what it holds, is not known before it runs.
WITHOUT_TIERS = {
    "pp": "what a stage is handed shows only as the stages before it run",
    "ep": "how many tokens come to the experts of a rank shows only as they are routed",
}


def not_landed(plan: PlanFields) -> Iterator[PlanError]:
    """Yields one error for each term of the plan whose strategy is still missing."""
    for strategy, term in terms(plan):
        if strategy not in LANDED:
            remedy = INSTEAD.get(strategy.split(":")[0], f"leave {term} out")
            yield PlanError(f"{term} has not landed", remedy=remedy)
    for name, why in WITHOUT_TIERS.items() if plan.gemini else ():
        if (size := getattr(plan, name)) > 1:
            yield PlanError(
                f"gemini with {name}{size}: {why}, so no budget could be promised",
                allowed="gemini over data ranks, with tp and cp",
                remedy=f"zero3+{name}{size}",
            )
