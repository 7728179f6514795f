"""Activations that are computed again in the backward instead of being kept: all of them, in some layers, or the cheap ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.errors import ConfigError
from phalanx.parallel.kept import Notes, is_inside_kept

# What "selective" keeps: operations that cost much time for each byte of their result. Batched products are left out, since
# outside fused attention they make the score matrices, which are larger than all else in the layer.
KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_addmm_activation",
        "aten::linear",
        "aten::convolution",
        "aten::_grouped_mm",
        "phalanx::rows_times",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    }
)
CACHE_NAMES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache", "cache_params"})


def apply(blocks: Sequence[nn.Module], mode: str | float) -> None:
    """Makes the blocks recompute in training: "full", "selective", or a fraction of them, evenly spread and in full.

    The block's `forward` is wrapped, not its call, so module hooks run once. Dropout draws the same numbers again. Without
    gradients and in eval mode a block runs as it is. A second call replaces what the first one set.

    Raises: ConfigError for another mode.
    """
    fraction = {"full": 1.0, "selective": 1.0}.get(mode, mode) if isinstance(mode, str) else float(mode)
    if isinstance(fraction, str) or not 0 <= fraction <= 1:
        raise ConfigError(f"recompute mode {mode!r} is unknown", allowed="full, selective, a fraction from 0 to 1", remedy="full")
    remove(blocks)
    for block, chosen in zip(blocks, spread(len(blocks), fraction)):
        if chosen:
            block.forward = RecomputedForward(block, selective=mode == "selective")


def recomputes(block: nn.Module) -> bool:
    """Whether `apply` has chosen this block."""
    return isinstance(block.__dict__.get("forward"), RecomputedForward)


def remove(blocks: Sequence[nn.Module]) -> None:
    """Undoes `apply`."""
    for block in filter(recomputes, blocks):
        wrapper = block.__dict__.pop("forward")
        if wrapper.instance_forward is not None:
            block.forward = wrapper.instance_forward


def spread(num_blocks: int, fraction: float) -> list[bool]:
    """Which of the blocks recompute: the nearest whole number of them, at least one if any, at even distances."""
    count = max(round(fraction * num_blocks), fraction > 0)
    return [(index + 1) * count // num_blocks > index * count // num_blocks for index in range(num_blocks)]


class RecomputedForward:
    """Stands in a block's `forward` attribute; an object and not a closure, so that a deep copy of the block has its own."""

    def __init__(self, block: nn.Module, *, selective: bool):
        self.block, self.selective = block, selective
        self.instance_forward = block.__dict__.get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.instance_forward or partial(type(self.block).forward, self.block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        if not (self.block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        args, kwargs = self._without_cache(forward, args, kwargs)
        # Every tensor travels as a positional argument: for those alone torch keeps the device's random state, and notices
        # a change in place before the second forward.
        leaves, structure = tree_flatten((args, kwargs))
        return checkpoint(
            partial(_call, forward, structure),
            *leaves,
            use_reentrant=False,
            **_traced(self.selective) if torch.compiler.is_compiling() else {"context_fn": partial(_contexts, self.selective)},
        )

    def _without_cache(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments without key-value caches, which the second forward would fill twice."""
        names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        args = tuple(self._cleared(name, value) for name, value in zip(names + [""] * len(args), args))
        return args, {name: self._cleared(name, value) for name, value in kwargs.items()}

    def _cleared(self, name: str, value: Any) -> Any:
        if name == "use_cache":
            return False
        if value is None or not (name in CACHE_NAMES or _is_cache(value)):
            return value
        if _cached_tokens(value, self.block):
            raise ConfigError(
                f"a filled key-value cache reached a {type(self.block).__name__} that recomputes in training",
                allowed="an empty cache or none",
                remedy="no recompute for training on top of past keys and values",
            )
        return None


def _call(forward: Callable[..., Any], structure: TreeSpec, *leaves: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, structure)
    return forward(*args, **kwargs)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _cached_tokens(value: Any, block: nn.Module) -> bool:
    """Whether the cache holds something for this block, before the block has run."""
    if not _is_cache(value):
        return bool(value) if isinstance(value, (tuple, list)) else hasattr(value, "__len__") and len(value) > 0
    indices = (getattr(module, "layer_idx", None) for module in block.modules())
    return bool(value.get_seq_length(next((index for index in indices if isinstance(index, int)), 0)))


def _contexts(selective: bool) -> tuple[AbstractContextManager, AbstractContextManager]:
    """What surrounds the first and the second forward."""
    notes = Notes()
    around = create_selective_checkpoint_contexts(_policy) if selective else (nullcontext(), nullcontext())
    return _Both(notes.writing, around[0]), _Both(notes.reading, around[1])


def _traced(selective: bool) -> dict[str, Any]:
    """The same for a compiler, which decides itself what runs again and knows selective contexts alone."""
    return {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}


class _Both(ExitStack):
    """A note of what is kept and a context of torch, entered as one, and again for another backward through the same graph."""

    def __init__(self, noting: Callable[[], AbstractContextManager], other: AbstractContextManager):
        super().__init__()
        self.noting, self.other = noting, other

    def __enter__(self) -> Any:
        self.enter_context(self.noting())
        self.enter_context(self.other)
        return self


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = operation._schema
    if is_inside_kept() or schema.name not in KEPT or _has_dropout(schema, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _has_dropout(schema: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    # An operation that is kept does not run again, so one that draws would leave later dropouts of the block other numbers.
    given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    return bool(given.get("dropout_p"))
