"""What routers chose in one run, given to another: which of two nearly equal scores is larger is rounding's word, not a plan's.

Legend: T tokens, H hidden, E scores, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from phalanx.anatomy.expert_lists import expert_lists
from phalanx.anatomy.experts_seam import StackedExperts, stacked_experts

# Two choices are nearly equal where what they score together differs by at most this part of the spread of a token's scores.
NEARLY = 1 / 8

Chosen = Sequence[torch.Tensor]  # values and indices, as `topk` returns them
Take = Callable[[torch.Tensor, Chosen], Chosen]


def mixture_blocks(model: nn.Module) -> list[str]:
    """The names of the blocks that hold a router and experts; to be read before a plan divides them."""
    found = [*stacked_experts(model), *expert_lists(model)]
    blocks = {id(each.parent if isinstance(each, StackedExperts) else each.block) for each in found}
    return [name for name, module in model.named_modules() if id(module) in blocks]


@dataclass
class Seen:
    """The tokens that came to a block in one forward, and what each of its `topk` chose for them. Shapes: [T, H], each [T, ...]."""

    tokens: torch.Tensor
    chosen: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Choices:
    """The choices of all blocks of a model, by block and step."""

    seen: dict[tuple[str, int], list[Seen]] = field(default_factory=dict)
    step: int = 0

    @contextmanager
    def recorded(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Notes what training forwards inside choose."""

        def note(name: str, x_TH: torch.Tensor) -> Take:
            seen = Seen(x_TH.cpu())
            self.seen.setdefault((name, self.step), []).append(seen)

            def take(scores: torch.Tensor, own: Chosen) -> Chosen:
                seen.chosen.append(own[1].reshape(len(x_TH), -1).cpu())
                return own

            return take

        with _watched(model, blocks, note):
            yield

    @contextmanager
    def followed(self, model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
        """Training forwards inside choose the same, wherever that is nearly as good as what they would choose themselves."""

        def follow(name: str, x_TH: torch.Tensor) -> Take:
            calls = count()
            return lambda scores, own: _nearly(scores, own, self._known(name, x_TH, next(calls)).view_as(own[1]))

        with _watched(model, blocks, follow):
            yield

    def _known(self, name: str, x_TH: torch.Tensor, call: int) -> torch.Tensor:
        """What was chosen for the tokens most like these: rounding moves a token little beside its distance to others."""
        seen = self.seen[name, self.step]
        tokens = torch.cat([each.tokens for each in seen]).to(x_TH.device, torch.float64)
        chosen = torch.cat([each.chosen[call % len(each.chosen)] for each in seen]).to(x_TH.device)
        return chosen[torch.cdist(x_TH.double(), tokens).argmin(1)]


def _nearly(scores_TE: torch.Tensor, own: Chosen, known_TK: torch.Tensor) -> Chosen:
    """The known choices where they score nearly what the own ones do, else the own."""
    values = scores_TE.detach()
    hidden = ~values.isfinite()
    spread = values.masked_fill(hidden, -torch.inf).amax(-1) - values.masked_fill(hidden, torch.inf).amin(-1)
    lost = own[0].detach().sum(-1) - values.gather(-1, known_TK).sum(-1)
    chosen = torch.where((lost <= NEARLY * spread).unsqueeze(-1), known_TK, own[1])
    return torch.return_types.topk((scores_TE.gather(-1, chosen), chosen))


@contextmanager
def _watched(model: nn.Module, blocks: Sequence[str], begin: Callable[[str, torch.Tensor], Take]) -> Iterator[None]:
    """Every training forward of a block gives what its `topk` return to the function that `begin` makes of its tokens."""
    with ExitStack() as stack:
        for name in blocks:
            block, modes = model.get_submodule(name), []

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name, modes: list[_TopK] = modes) -> None:
                if module.training:
                    x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).detach()
                    x_TH = x.reshape(-1, x.shape[-1])
                    modes.append(_TopK(begin(name, x_TH), len(x_TH)))
                    modes[-1].__enter__()

            def after(module: nn.Module, args: Any, output: Any, modes: list[_TopK] = modes) -> None:
                if modes:
                    modes.pop().__exit__(None, None, None)

            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after, always_call=True).remove)
        yield


class _TopK(TorchFunctionMode):
    """Gives what `topk` returns for `num_tokens` tokens, over the last dimension, to `take`."""

    def __init__(self, take: Take, num_tokens: int):
        super().__init__()
        self.take, self.num_tokens = take, num_tokens

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk) or not self._is_of_tokens(args[0], result):
            return result
        with torch._C.DisableTorchFunction():
            return self.take(args[0], result)

    def _is_of_tokens(self, scores: torch.Tensor, chosen: Chosen) -> bool:
        rows = scores.shape[:-1]
        return self.num_tokens > 0 and rows == chosen[1].shape[:-1] and rows.numel() % self.num_tokens == 0
