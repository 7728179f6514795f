"""The one owner of normalisation: from a model and rows to a sum of losses and the count it is to be divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode

from phalanx.anatomy import own_loss
from phalanx.booster.proof import AdditivityProof, count_rule
from phalanx.data import num_rows, take_rows
from phalanx.errors import ConfigError
from phalanx.memory.stream import tensors_in
from phalanx.parallel.expert.share import PassShare

Forward = Callable[[nn.Module, Any], Any]
Count = Callable[[Any], Any]


class Objective:
    """Computes (sum of losses, count) of some rows, so that sums over any cut of a batch give the same quotient.

    With a criterion: it is called with the model's output and the batch, and returns (loss_sum, count), or a mean whose count is
    `count(batch)`. Without: the model's own `.loss` is used. `count` overrules what a mean is taken to be over. Models and criteria run
    inside of `reading()`.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable | None,
        forward: Forward | None,
        count: Count | None,
        *,
        is_cut: bool = True,
        share: PassShare | None = None,
    ):
        self.share = share or PassShare()
        self.criterion, self.forward, self.custom_count = criterion, forward, count
        self.own, self.is_cut = own_loss(model), is_cut
        if criterion is not None and is_cut and count is None:
            self.own = count_rule(criterion, self.own)
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext
        self.proof = AdditivityProof(getattr(criterion, "__name__", type(criterion).__name__)) if is_cut and criterion is not None else None

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (loss_sum, count) as scalars; loss_sum has at least float32 and is 0 with gradient 0 where count is 0."""
        with self.reading():
            loss, count = self._with_criterion(model, batch) if self.criterion else self._with_own_loss(model, batch)
        _require_scalar(loss)
        if loss.dtype in (torch.bfloat16, torch.float16):
            loss = loss.float()
        return loss, torch.as_tensor(count, device=loss.device).double()

    def without_proof(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, on rows that are not to be taken for one of the first batches."""
        proof, self.proof = self.proof, None
        try:
            with self.share.repeating():
                return self(model, batch)
        finally:
            self.proof = proof

    def _with_criterion(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        assert self.criterion is not None
        output = self.forward(model, batch) if self.forward else _call(model, batch, withhold_labels=True)
        loss = self.criterion(output, batch if rows_are_target(batch) else batch[-1])
        if isinstance(loss, tuple):
            return loss
        count = self._count(batch)
        self._prove(loss, count, output, batch)
        _silence_without_count(output, count)
        return _sum_of_mean(loss, count), count

    def _prove(self, loss: torch.Tensor, count: torch.Tensor, output: Any, batch: Any) -> None:
        """Tries out on the first batches that the criterion's mean adds up over rows."""
        if self.proof is None or self.proof.trials_left == 0 or detect_fake_mode(loss) is not None:
            return
        criterion, total = self.criterion, num_rows(batch)
        assert criterion is not None

        def part(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows = take_rows(batch, start, stop, total)
            return criterion(take_rows(output, start, stop, total), rows if rows_are_target(rows) else rows[-1]), self._count(rows)

        _require_scalar(loss)
        self.proof.try_out(loss, count, total, part)

    def _with_own_loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        count = self._count(batch)
        if self.forward is not None:
            return _sum_of_mean(_loss_of(self.forward(model, batch)), count), count
        keywords = self.own.kwargs(batch) if isinstance(batch, Mapping) else {}
        self.share.count = count if keywords else 1.0
        output = _call(model, {**batch, **keywords} if keywords else batch, withhold_labels=False)
        loss = _loss_of(output)
        if keywords:
            return loss, count
        _silence_without_count([tensor for tensor in tensors_in(output) if tensor is not loss], count)
        return _sum_of_mean(loss, count), count

    def _count(self, batch: Any) -> torch.Tensor:
        if self.custom_count is not None:
            return torch.as_tensor(self.custom_count(batch))
        if self.own.rule == "unknown" and not self.is_cut:  # one piece needs no weights
            return torch.tensor(num_rows(batch))
        return self.own.count(batch)


def rows_are_target(batch: Any) -> bool:
    """Whether a criterion gets the whole batch; of a tuple it gets the last item."""
    return isinstance(batch, Mapping) or not isinstance(batch, (tuple, list))


def _call(model: nn.Module, batch: Any, *, withhold_labels: bool) -> Any:
    if isinstance(batch, Mapping):
        return model(**{key: value for key, value in batch.items() if not (withhold_labels and key == "labels")})
    if isinstance(batch, (tuple, list)):
        return model(*batch[:-1]) if withhold_labels else model(*batch)
    return model(batch)


def _loss_of(output: Any) -> torch.Tensor:
    """The loss within a model's output."""
    if isinstance(output, torch.Tensor) and output.dim() == 0:
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(
            f"the model's output ({type(output).__name__}) has no loss",
            allowed="a criterion, a model whose output has `.loss` (labels in the batch), or one that returns a scalar",
            remedy="booster.boost(model, optimizer, criterion)",
        )
    return loss


def _require_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        found = f"the loss is a {type(loss).__name__}" + (f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else "")
        raise ConfigError(found, allowed="a scalar tensor, or (loss_sum, count)", remedy="loss.sum() together with its count")


def _silence_without_count(output: Any, count: torch.Tensor) -> None:
    """Gives the output gradient 0 where the mean is over nothing: a mean written by hand is then 0 / 0, and 0 times its slope is NaN.

    Cost: on a processor none where something counts; on a device one pass over the output's gradient, and no host read.
    """
    if detect_fake_mode(count) is not None or (count.device.type == "cpu" and count > 0):
        return
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            is_counted = count.to(tensor.device) > 0
            tensor.register_hook(lambda gradient, keep=is_counted: torch.where(keep, gradient, torch.zeros_like(gradient)))


def _sum_of_mean(loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The sum behind a mean; 0 with gradient 0 where the mean is over nothing."""
    _require_scalar(loss)
    if loss.dtype in (torch.bfloat16, torch.float16):
        loss = loss.float()
    count = count.to(loss.device)
    return torch.where(count > 0, loss * count, torch.zeros_like(loss))
