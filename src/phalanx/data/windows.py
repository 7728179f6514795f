"""Fixed-length windows over one long token array, for language modelling."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from phalanx.data.packing import IGNORED
from phalanx.errors import ConfigError


class TokenWindows(Dataset):
    """Windows of `length` tokens over a 1-D array, such that one epoch predicts each token but the first exactly once.

    `tokens` is a tensor, an array or a `numpy.memmap`; it is read window by window and never copied as a whole. Labels are not
    shifted (the model shifts them), so neighbouring windows share one token: the last of one is the first context of
    the next. The last window ends at the last token; what it repeats has label -100. With `shifted=True`, for a criterion
    that does not shift, the labels are the next tokens and windows share none.

    Shapes: an item is a dict of input_ids and labels, (length,) each, int64.
    Raises: ConfigError where the array is not 1-D, not of integers, or shorter than one window.
    """

    def __init__(self, tokens: torch.Tensor | numpy.ndarray, length: int, *, shifted: bool = False):
        if tokens.ndim != 1 or not _is_integer(tokens):
            raise ConfigError(
                f"tokens of shape {tuple(tokens.shape)} and type {tokens.dtype} are no sequence of token ids",
                allowed="a 1-D tensor or array of integers",
            )
        if length < 1 + (not shifted):
            raise ConfigError(f"windows of {length} tokens have nothing to predict", allowed=f"a length of at least {1 + (not shifted)}")
        # A window predicts `stride` tokens from `length` tokens of context.
        self._tokens, self._length, self._shifted = tokens, length, shifted
        self._stride = length if shifted else length - 1
        if len(tokens) < self._stride + 1:
            raise ConfigError(
                f"{len(tokens)} tokens do not fill a window of {length}, which takes {self._stride + 1}",
                remedy=f"length={max(1, len(tokens) - shifted)}" if len(tokens) > 1 else "a longer text",
            )

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._stride)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        wanted = index * self._stride
        start = min(wanted, len(self._tokens) - self._stride - 1)
        repeated = wanted - start
        tokens = self._int64(self._tokens[start : start + self._stride + 1])
        labels = tokens.clone()
        # Up to here the windows before have predicted; position 0 has no context to be predicted from.
        labels[: repeated + 1] = IGNORED
        if self._shifted:
            return {"input_ids": tokens[:-1], "labels": labels[1:]}
        return {"input_ids": tokens, "labels": labels}

    def _int64(self, piece: Any) -> torch.Tensor:
        if isinstance(piece, torch.Tensor):
            return piece.to(torch.int64)
        return torch.from_numpy(piece.astype(numpy.int64))


def _is_integer(tokens: torch.Tensor | numpy.ndarray) -> bool:
    if isinstance(tokens, torch.Tensor):
        return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return bool(numpy.issubdtype(tokens.dtype, numpy.integer))
