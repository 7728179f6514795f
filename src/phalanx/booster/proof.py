"""Whether a mean times its count adds up over rows: tried out on the first batches, since a wrong count is silent.

A criterion with class weights, with its own ignored label, or that sums, is no mean over the labels that count; cutting its batch
would change the number. On the first batches the loss of all rows is compared with the losses of two parts of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from phalanx.anatomy import OwnLoss
from phalanx.errors import ConfigError

NUM_TRIALS = 3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}

Part = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class AdditivityProof:
    """Compares (mean, count) of all rows with those of two parts, until `NUM_TRIALS` batches have agreed.

    Cost: on the first batches two more evaluations on parts and one host read; none later.
    """

    def __init__(self, subject: str):
        self.subject, self.trials_left = subject, NUM_TRIALS

    @torch.no_grad()
    def try_out(self, mean: torch.Tensor, count: torch.Tensor, num_rows: int, part: Part) -> None:
        """`part(start, stop)` gives (mean, count) of these rows.

        Raises: ConfigError where the two parts do not add up to the whole.
        """
        if num_rows < 2:
            return
        self.trials_left -= 1
        whole, scale = float(mean) * float(count), abs(float(mean) * float(count))
        parts = 0.0
        for start, stop in ((0, num_rows // 2), (num_rows // 2, num_rows)):
            part_mean, part_count = part(start, stop)
            if float(part_count):  # a mean over nothing is not a number
                parts += float(part_mean) * float(part_count)
                scale += abs(float(part_mean) * float(part_count))
        if not abs(whole - parts) <= TOLERANCE.get(mean.dtype, 1e-3) * max(scale, 1e-30) and whole == whole:
            raise ConfigError(
                f"the loss of {self.subject} is not a mean over the {float(count):g} items counted: "
                f"{num_rows} rows give {whole:.6g} in one piece and {parts:.6g} in two",
                allowed="a criterion that returns (loss_sum, count), or Booster(count=...) that says what its mean is over",
                remedy="return (loss.sum(), number of items), with reduction='none' or 'sum' inside",
            )


def count_rule(criterion: Any, own: OwnLoss) -> OwnLoss:
    """How labels are counted for a criterion: as for the model, but with the label that the criterion itself ignores.

    Raises: ConfigError for a criterion that says of itself that it is no mean over labels.
    """
    reduction, weight = getattr(criterion, "reduction", "mean"), getattr(criterion, "weight", None)
    if isinstance(criterion, torch.nn.modules.loss._Loss) and (reduction != "mean" or weight is not None):
        what = f"reduction={reduction!r}" if reduction != "mean" else "weights"
        raise ConfigError(
            f"{type(criterion).__name__} with {what} is no mean over what it counts",
            allowed="a mean, a criterion that returns (loss_sum, count), or Booster(count=...)",
            remedy="lambda output, target: (criterion(output, target), count) with reduction='sum'",
        )
    ignored = getattr(criterion, "ignore_index", None)
    return replace(own, ignored=ignored) if isinstance(ignored, int) else own
