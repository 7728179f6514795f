"""Validation: bits per byte over held-out text, each token predicted exactly once, on many ranks or on one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text. Units: nats and bits of information."""

    nats: float
    tokens: int
    text_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer, so comparable between runs."""
        return self.nats / math.log(2) / self.text_bytes


def score(loss_of: Callable[[Any], tuple[float, int]], batches: Iterable[Any], text_bytes: int) -> Score:
    """Adds up (mean loss, number of predicted tokens) over all batches."""
    nats, tokens = 0.0, 0
    for batch in batches:
        mean, count = loss_of(batch)
        if count:
            nats, tokens = nats + float(mean) * int(count), tokens + int(count)
    return Score(nats, tokens, text_bytes)


def plain_loss(model: torch.nn.Module) -> Callable[[Any], tuple[float, int]]:
    """The loss of a batch without Phalanx: what a reloaded model is judged by."""

    @torch.no_grad()
    def loss_of(batch: Any) -> tuple[float, int]:
        return float(model(**batch).loss), int((batch["labels"][:, 1:] != -100).sum())

    return loss_of
