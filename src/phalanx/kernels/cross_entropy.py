"""Summed cross entropy over the last dimension, without a full-precision or a second copy of the logits.

Shape suffixes: R rows of one chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from phalanx.errors import ConfigError, ShapeError

# Bytes of float logits handled at once: a chunk stays in a core's own cache; accelerators want few, large launches.
CPU_CHUNK_BYTES = 512 * 1024
DEVICE_CHUNK_BYTES = 64 * 1024 * 1024
# Float logits up to this size stay in the caches whatever is done with them, and fewer calls win.
SMALL_BYTES = 4 * 1024 * 1024


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of all labels that are not `ignore_index`, and how many there are.

    Half logits are computed in float32 and give a float32 loss; float32 and float64 keep their dtype.
    Shapes: logits (..., V), of any strides; labels (...).
    Cost: one chunk in float32 beside the logits; the backward adds the gradient in the dtype of the logits.
    Grad: to the logits, once; a second differentiation is refused where the fused form ran (use `reference`).
    Raises: ShapeError where the shapes do not fit; ConfigError for labels that are not integers.
    """
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}",
            allowed="one label for every row of logits",
            remedy=f"labels of shape {tuple(logits.shape[:-1])}",
        )
    if labels.is_floating_point():
        raise ConfigError(
            f"labels are {labels.dtype}", allowed="indices", remedy="torch.nn.functional.cross_entropy for class probabilities"
        )
    return choice(logits)(logits, labels, ignore_index)


def choice(logits: torch.Tensor) -> Any:
    """The form to use for these logits: `reference` for small ones and under a compiler, which fuses it itself, else `fused`."""
    small = logits.numel() * _compute_dtype(logits).itemsize <= SMALL_BYTES
    return reference if small or torch.compiler.is_compiling() else fused


def reference(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in plain torch."""
    rows_NV = logits.reshape(-1, logits.shape[-1]).to(_compute_dtype(logits))
    return F.cross_entropy(rows_NV, labels.reshape(-1).long(), ignore_index=ignore_index, reduction="sum"), (labels != ignore_index).sum()


def fused(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in chunks of rows, each read once in the forward and once in the backward."""
    counted = labels != ignore_index
    return _CrossEntropySum.apply(logits, labels.long(), counted), counted.sum()


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """The loss of a causal language model, called as `transformers` calls its own.

    Labels are shifted by one unless `shift_labels` are given; the mean is over `num_items_in_batch`, else over the labels counted.
    """
    if shift_labels is None:
        shift_labels = next_tokens(labels, ignore_index)
    if logits.shape[-1] != vocab_size or logits.shape[:-1] != shift_labels.shape:
        logits, shift_labels = logits.reshape(-1, vocab_size), shift_labels.reshape(-1)
    return mean_over(*cross_entropy_sum(logits, shift_labels.to(logits.device), ignore_index), num_items_in_batch)


def next_tokens(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """For each token the label of the one after it; the last one has none."""
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def mean_over(loss_sum: torch.Tensor, count: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor:
    """The sum divided by a number of items, by its own count where none is given."""
    items = count if num_items is None else num_items
    return loss_sum / (items.to(loss_sum.device) if isinstance(items, torch.Tensor) else items)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        labels = labels.masked_fill(~counted, 0)
        ctx.save_for_backward(logits, labels, counted)
        dtype = _compute_dtype(logits)
        gathered = torch.empty(labels.shape, dtype=dtype, device=logits.device)
        buffer_RV = _chunk_buffer(logits)
        for logits_RV, labels_R, gathered_R in _row_chunks(logits, labels, gathered):
            scores_RV = buffer_RV[: len(logits_RV)]
            torch.log_softmax(_in_dtype(logits_RV, scores_RV), -1, out=scores_RV)
            torch.gather(scores_RV, 1, labels_R.unsqueeze(1), out=gathered_R.unsqueeze(1))
        # Masked, not multiplied: an ignored row may hold anything.
        return -gathered.masked_fill_(~counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "the fused cross entropy was asked for a second derivative (create_graph=True)",
                allowed="one differentiation",
                remedy="kernels.cross_entropy.reference, or torch.nn.functional.cross_entropy, as the criterion",
            )
        logits, labels, counted = ctx.saved_tensors
        scale = grad.to(_compute_dtype(logits)).expand(labels.shape).masked_fill(~counted, 0)
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        in_place = logits.dtype == _compute_dtype(logits)
        buffer_RV = None if in_place else _chunk_buffer(logits)
        for logits_RV, labels_R, scale_R, result_RV in _row_chunks(logits, labels, scale, result):
            grad_RV = result_RV if buffer_RV is None else buffer_RV[: len(logits_RV)]
            torch.softmax(_in_dtype(logits_RV, grad_RV), -1, out=grad_RV)
            scale_R1 = scale_R.unsqueeze(1)
            grad_RV.mul_(scale_R1).scatter_add_(1, labels_R.unsqueeze(1), -scale_R1)
            if not in_place:
                result_RV.copy_(grad_RV)
        return result, None, None


def _compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype


def _in_dtype(logits_RV: torch.Tensor, buffer_RV: torch.Tensor) -> torch.Tensor:
    return logits_RV if logits_RV.dtype == buffer_RV.dtype else buffer_RV.copy_(logits_RV)


def _chunk_rows(logits: torch.Tensor) -> int:
    num_bytes = CPU_CHUNK_BYTES if logits.device.type == "cpu" else DEVICE_CHUNK_BYTES
    return max(1, num_bytes // max(1, logits.shape[-1] * _compute_dtype(logits).itemsize))


def _chunk_buffer(logits: torch.Tensor) -> torch.Tensor:
    num_rows = min(_chunk_rows(logits), max(1, logits[..., 0].numel()))
    return torch.empty(num_rows, logits.shape[-1], dtype=_compute_dtype(logits), device=logits.device)


def _row_chunks(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same rows of all tensors; `others` are contiguous and have the leading dimensions of the logits."""
    if logits.dim() > 2 and not logits.is_contiguous():
        for parts in zip(logits.unbind(), *(other.unbind() for other in others)):
            yield from _row_chunks(*parts)
        return
    size, leading = _chunk_rows(logits), logits.dim() - 1
    tensors = (logits, *others)
    rows = [t.view(-1, *t.shape[leading:]) if leading != 1 else t for t in tensors]
    for start in range(0, len(rows[0]), size):
        yield tuple(t[start : start + size] for t in rows)
