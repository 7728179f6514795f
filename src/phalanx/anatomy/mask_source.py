"""Reads which keys a mask function of `transformers` lets a query see; nothing is evaluated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.errors import PlanError


@dataclass(frozen=True, eq=False)
class Seen:
    """A query sees `before` places back and `after` places ahead (None: all; 0 ahead is causal), as far as nothing else hides them.

    `by_document`: it sees no other document of its row. `by_padding`: it sees nothing where the batch's attention mask is 0.
    `dense` is a mask for whole rows that the program itself gave: true where a key is seen, or added to the scores. `shown` says
    which of the keys at hand are seen, by all queries alike; `by_padding` comes before it where the batch has an attention mask.
    Shapes: `dense` (B or 1, heads or 1, whole row, whole row), `shown` (B, keys at hand).
    """

    before: int | None = None
    after: int | None = None
    by_document: bool = False
    by_padding: bool = False
    dense: torch.Tensor | None = None
    shown: torch.Tensor | None = None


def read_mask(function: Callable) -> Seen:
    """What a mask function lets a query see.

    Padding and documents are read by others from whole rows: of the function, made for a part of them, only the limits count.
    Raises: PlanError for a function that says more than limits.
    """
    limits = _limits(function)
    before = [value for kind, value in limits if kind == "before"]
    after = [value for kind, value in limits if kind == "after"]
    # Bidirectional masks of transformers do not know documents; causal ones do, where there is no padding mask.
    nearest, farthest = min(before, default=None), min(after, default=None)
    return Seen(before=nearest, after=farthest, by_document=("after", 0) in limits, by_padding=True)


def takes_cache(model: nn.Module) -> bool:
    """Whether a model keeps keys and values unless it is told not to; with them `transformers` sees no borders of documents."""
    if not hasattr(getattr(model, "config", None), "use_cache"):
        return False
    accepted = inspect.signature(model.forward).parameters
    return "use_cache" in accepted or any(item.kind is inspect.Parameter.VAR_KEYWORD for item in accepted.values())


def _limits(function: Callable) -> set[tuple[str, int]]:
    name, held = function.__qualname__.split(".")[0], _held(function)
    if getattr(function, "__module__", "") == "transformers.masking_utils":
        if name == "causal_mask_function":
            return {("after", 0)}
        if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
            return set()
        if name == "sliding_window_overlay":
            return {("before", held["sliding_window"] - 1)}
        if name == "sliding_window_bidirectional_overlay":
            return {("before", held["sliding_window"]), ("after", held["sliding_window"])}
        if name == "remap_positions_for_packed_sequence":
            return _limits(held["mask_function"])
        if name == "and_masks":
            return {limit for inner in held["mask_functions"] for limit in _limits(inner)}
    raise PlanError(
        f"the model makes its mask by {function.__qualname__}",
        allowed="causal and bidirectional masks, sliding windows, padding and documents",
        remedy="a plan that does not cut the sequence",
    )


def _held(function: Callable) -> dict[str, Any]:
    """What a function holds of the place it was made in, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
