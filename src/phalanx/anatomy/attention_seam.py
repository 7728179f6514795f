"""The seam through which the attention of any model is exchanged: the interfaces of `transformers`, and PyTorch's own function.

Inside `AttentionSeam.exchanged` every attention of the model arrives at one function as a `Call`; outside, the model is what it
was. No mask of all queries and keys is built: a stand-in of one element travels in its place and stands for what is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.loss_source import is_pretrained
from phalanx.anatomy.mask_source import Seen, read_mask
from phalanx.errors import PlanError

# What an attention may be given that changes its numbers and that no `Call` says.
BENDING = frozenset({"position_bias", "s_aux", "head_mask", "attention_bias", "alibi", "relative_position_bias", "score_mod"})


@dataclass(frozen=True, eq=False)
class Call:
    """One attention as the model asks for it.

    `name` is the module's; `seen` says which keys a query sees; scores are `scale` times the product, bent by `softcap` tanh.
    Shapes: q (B, H, S, D), k (B, G, T, D), v (B, G, T, E); the answer is (B, H, S, E).
    """

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: Seen
    scale: float
    softcap: float | None = None
    dropout: float = 0.0


Attention = Callable[[Call], torch.Tensor]


# What a mask without values stands for, by its storage, which is kept with it.
Told = dict[int, "tuple[torch.Tensor, Seen]"]


class AttentionSeam:
    """The attention of one model. Raises: PlanError inside `exchanged` for an attention that a `Call` cannot say, with its module."""

    def __init__(self, model: nn.Module):
        self.names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self.key = f"phalanx_{id(self)}"
        configs = {id(module.config): module.config for module in model.modules() if is_pretrained(module)}
        self.configs = list(configs.values())
        self.modules = {type(module).__module__ for module in model.modules()}
        self.attention: Attention | None = None
        self.told: Told = {}

    @contextmanager
    def exchanged(self, attention: Attention, told: Told | None = None) -> Iterator[None]:
        """Every attention of the model is `attention`'s inside, in forwards and in what a backward computes again.

        What masks stand for is known until it ends, or as long as the caller keeps `told`.
        """
        self.attention, self.told = attention, {} if told is None else told
        with ExitStack() as stack:
            stack.callback(setattr, self, "told", {})
            if self.configs:
                self._enter_transformers(stack)
            self._enter_functional(stack)
            yield

    def stand_in(self, seen: Seen, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """A mask of one element that the model may pass on and slice, and that stands for `seen`."""
        cell = torch.empty((), dtype=torch.bool, device=device)
        self.told[cell.untyped_storage()._cdata] = cell, seen
        return cell.expand(shape)

    # -- transformers --------------------------------------------------------------------------------------------------

    def _enter_transformers(self, stack: ExitStack) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        for registry, function in ((ALL_ATTENTION_FUNCTIONS, self._attend), (ALL_MASK_ATTENTION_FUNCTIONS, self._mask)):
            registry.register(self.key, function)
            stack.callback(registry._global_mapping.pop, self.key)
        for config in self.configs:
            stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation_internal)
            config._attn_implementation_internal = self.key

    def _mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable,
        device: Any,
        attention_mask: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        seen = replace(read_mask(mask_function), shown=None if attention_mask is None else attention_mask.bool())
        return self.stand_in(seen, (batch_size, 1, q_length, kv_length), device)

    def _attend(
        self,
        module: nn.Module,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: Any = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        name = self.names.get(id(module), type(module).__name__)
        bending = sorted(keyword for keyword in BENDING if rest.get(keyword) is not None)
        if rest.get("output_attentions"):
            bending.append("output_attentions")
        if bending:
            raise PlanError(
                f"the attention of {name} is asked for with {', '.join(bending)}",
                allowed="scores scaled, soft-capped and masked",
                remedy="a plan that does not cut the sequence",
            )
        is_causal = rest.get("is_causal")
        seen = self._seen(name, attention_mask, getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        assert self.attention is not None
        out = self.attention(Call(name, query, key, value, seen, scale, rest.get("softcap"), dropout))
        return out.transpose(1, 2).contiguous(), None

    def _seen(self, name: str, mask: Any, is_causal: bool) -> Seen:
        """What a mask that comes with a call stands for; without one, `is_causal` decides."""
        if mask is None:
            return Seen(after=0) if is_causal else Seen()
        if isinstance(mask, torch.Tensor) and (told := self.told.get(mask.untyped_storage()._cdata)):
            return told[1]
        if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool:
            return Seen(shown=mask[:, 0, 0])
        shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else ""
        raise PlanError(
            f"{name} calls attention with a mask{shape} that its forward made from its own part of the tokens",
            allowed="is_causal, masks of keys (rows, 1, 1, keys), the masks that transformers makes, or attention_mask in the batch",
            remedy="is_causal=True in place of a triangular mask",
        )

    # -- torch.nn.functional -------------------------------------------------------------------------------------------

    def _enter_functional(self, stack: ExitStack) -> None:
        """PyTorch's function, under every name by which the model's own files know it.

        Names are exchanged rather than calls watched, so that what a backward computes again, on whatever thread, is included.
        """
        original = torch.nn.functional.scaled_dot_product_attention
        places: list[tuple[Any, str]] = [(torch.nn.functional, "scaled_dot_product_attention")]
        for module in filter(None, map(sys.modules.get, sorted(self.modules))):
            places += [(module, name) for name, value in vars(module).items() if value is original]
        for owner, name in dict.fromkeys(places):
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, self._scaled_dot_product)

    def _scaled_dot_product(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        name = self._caller()
        if query.dim() != 4:
            raise PlanError(
                f"{name} calls scaled_dot_product_attention with {query.dim()} dimensions", allowed="(rows, heads, tokens, width)"
            )
        if query.shape[0] != key.shape[0] or (attn_mask is not None and is_causal):
            found = "both a mask and is_causal" if attn_mask is not None else f"{query.shape[0]} rows of queries and {key.shape[0]} of keys"
            raise PlanError(f"{name} calls scaled_dot_product_attention with {found}", allowed="one of the two, and as many rows of each")
        seen = self._seen(name, attn_mask, is_causal)
        assert self.attention is not None
        return self.attention(Call(name, query, key, value, seen, query.shape[-1] ** -0.5 if scale is None else scale, None, dropout_p))

    def _caller(self) -> str:
        """The name of the module whose forward is running: the nearest frame with a `self` of this model."""
        frame = sys._getframe(2)
        while frame is not None:
            name = self.names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back  # type: ignore[assignment]
        return "the model"
