"""How a model that returns its own `.loss` counts: over what its mean is taken, read from its loss function and its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.loss_seam import original_loss
from phalanx.anatomy.loss_source import LossSource, find_speaker, is_pretrained
from phalanx.errors import ConfigError, ShapeError

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """How one model's own loss is counted.

    `rule` is one of "labels" (a mean over labels that are not ignored), "rows" (over rows), "answers" (start and end positions of
    spans) or "unknown". `shifts_labels`: the first label of each row has no prediction. `masks_labels`: labels whose attention
    mask is 0 do not count. `takes_num_items`: `num_items_in_batch` reaches the loss, which then is a sum over that number.
    """

    model: str
    rule: str
    shifts_labels: bool = False
    masks_labels: bool = False
    takes_num_items: bool = False
    ignored: int = IGNORED

    def count(self, batch: Any) -> torch.Tensor:
        """The number of items over which the model's loss for `batch` is a mean, as an int64 scalar on the batch's device.

        Raises: ConfigError where it is not known; ShapeError where the loss is a sum of two means over different counts.
        """
        if self.rule == "unknown":
            raise ConfigError(
                f"how {self.model} counts in its own loss is not known",
                allowed="a criterion, or Booster(count=...), which maps a batch to the number of items its loss is a mean over",
                remedy="boost(model, optimizer, criterion) with a criterion that returns (loss_sum, count)",
            )
        if self.rule == "answers":
            return _count_answers(batch)
        labels = _labels(batch, self.shifts_labels)
        if self.rule == "rows" or labels is None or labels.is_floating_point():
            return _count_rows(batch)
        pre_shifted = isinstance(batch, Mapping) and batch.get("shift_labels") is labels
        mask = _attention_mask(batch, labels) if self.masks_labels else None
        if self.shifts_labels and not pre_shifted:
            labels, mask = labels[..., 1:], None if mask is None else mask[..., 1:]
        counted = labels != self.ignored
        return (counted if mask is None else counted & (mask != 0)).sum()

    def kwargs(self, batch: Any) -> dict[str, torch.Tensor]:
        """The keywords to add to the model's call so that its loss is the sum itself; empty where it takes none."""
        return {"num_items_in_batch": torch.ones((), dtype=torch.int64, device=_device(batch))} if self.takes_num_items else {}


def own_loss(model: nn.Module) -> OwnLoss:
    """Reads how the model's own `.loss` is counted; wrappers around one `transformers` model are looked through."""
    speaker, source = find_speaker(model)
    name = type(speaker).__name__
    if source.calls_seam:
        return _from_seam(speaker, source)
    if is_pretrained(speaker):
        return _from_source(speaker, source)
    rule = "labels" if source.is_plain_mean and not _holds_bent_loss(speaker) else "unknown"
    return OwnLoss(model=name, rule=rule, shifts_labels=source.shifts_labels, masks_labels=source.masks_labels)


def _holds_bent_loss(model: nn.Module) -> bool:
    """Whether a loss that is a module of the model is other than a mean over labels that are not -100."""
    losses = [child for child in model.modules() if isinstance(child, nn.modules.loss._Loss)]
    return any(
        loss.reduction != "mean" or getattr(loss, "weight", None) is not None or getattr(loss, "ignore_index", IGNORED) != IGNORED
        for loss in losses
    )


def _from_seam(model: nn.Module, source: LossSource) -> OwnLoss:
    """For forwards that call `self.loss_function`: the function decides."""
    name = type(model).__name__
    function = getattr(original_loss(getattr(model, "loss_function", None)), "__name__", "")
    takes = source.passes_keywords and getattr(model, "accepts_loss_kwargs", True) is not False
    plain = not source.written and len(source.labels) <= 1 + source.pre_shifted + ("shift_labels" in source.labels)
    if function == "ForCausalLMLoss" and plain:
        return OwnLoss(model=name, rule="labels", shifts_labels=not source.pre_shifted, takes_num_items=takes)
    if function in ("ForMaskedLMLoss", "ForTokenClassification") and plain:
        return OwnLoss(model=name, rule="labels", takes_num_items=takes)
    if function == "ForSequenceClassificationLoss":
        # num_items_in_batch is used for single labels only and the other two kinds take plain means: the mean serves all three.
        return _classification(model)
    if function == "ForQuestionAnsweringLoss":
        return OwnLoss(model=name, rule="answers", takes_num_items=takes)
    if function == "ForSemanticSegmentationLoss":
        return OwnLoss(model=name, rule="labels", ignored=model.config.semantic_loss_ignore_index)
    return OwnLoss(model=name, rule="unknown")


def _from_source(model: nn.Module, source: LossSource) -> OwnLoss:
    """For forwards that write their loss out: cross-entropy means over labels, the classification trio, spans."""
    name = type(model).__name__
    entropy = source.written <= {"CrossEntropyLoss", "cross_entropy"} and bool(source.written)
    if "start_positions" in source.labels and entropy:
        return OwnLoss(model=name, rule="answers")
    if "MSELoss" in source.written and "Classification" in name:
        return _classification(model)
    if not entropy or len(source.labels) != 1:
        return OwnLoss(model=name, rule="unknown")
    ignored = model.config.semantic_loss_ignore_index if source.segmentation else IGNORED
    return OwnLoss(model=name, rule="labels", shifts_labels=source.shifts_labels, masks_labels=source.masks_labels, ignored=ignored)


def _classification(model: nn.Module) -> OwnLoss:
    """Regression and multi-label losses are means over rows, single labels over the labels that are not ignored."""
    problem, num_labels = model.config.problem_type, model.config.num_labels
    name = type(model).__name__
    if problem in ("regression", "multi_label_classification") or (problem is None and num_labels == 1):
        return OwnLoss(model=name, rule="rows")
    return OwnLoss(model=name, rule="labels")


def _labels(batch: Any, shifts: bool) -> torch.Tensor | None:
    """The labels of a batch: `labels` of a mapping (or labels that are already shifted), the last item of a tuple."""
    if isinstance(batch, Mapping):
        return batch["shift_labels"] if shifts and batch.get("shift_labels") is not None else batch.get("labels")
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], torch.Tensor):
        return batch[-1]
    return None


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]


def _device(batch: Any) -> torch.device:
    tensors = _tensors(batch)
    return tensors[0].device if tensors else torch.device("cpu")


def _count_rows(batch: Any) -> torch.Tensor:
    tensors = _tensors(batch)
    if not tensors:
        raise ShapeError("the batch holds no tensor, so its rows cannot be counted", remedy="Booster(count=...)")
    return torch.tensor(tensors[0].shape[0], device=tensors[0].device)


def _attention_mask(batch: Any, labels: torch.Tensor) -> torch.Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if mask is not None and mask.shape == labels.shape else None


def _count_answers(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rows whose span lies inside the input. The loss halves the sum of two means, so both must count the same rows."""
    length = batch["input_ids"].shape[1]
    starts, ends = batch["start_positions"].view(-1) < length, batch["end_positions"].view(-1) < length
    if bool((starts != ends).any()):
        raise ShapeError(
            "an answer starts inside the input and ends behind it, so the loss is a sum of two means over different counts",
            allowed="start_positions and end_positions both inside the input, or both outside",
            remedy="set both positions of a cut answer to the input's length",
        )
    return starts.sum()
