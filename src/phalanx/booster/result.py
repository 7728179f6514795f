"""What a step tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Result:
    """The numbers of one step, equal on every rank.

    `loss` is the sum of losses over the global count, the number that was differentiated. `grad_norm` is the global norm *before*
    clipping, `clip_factor` what the gradients were multiplied with. `tokens` is the global count (labels, or rows).
    `skipped` steps had a gradient that was not finite, or nothing to count; they changed nothing. `stop_asked`: a rank has got
    SIGTERM inside `booster.noticing_sigterm()`, so it is time to save and to leave.
    """

    loss: float
    tokens: int
    grad_norm: float | None = None
    clip_factor: float | None = None
    skipped: bool = False
    skipped_total: int = 0
    lr: float | None = None
    loss_scale: float | None = None
    stop_asked: bool = False
