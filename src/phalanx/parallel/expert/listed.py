"""The experts of a person's own block, whose forward calls them one by one: all calls of one forward become one exchange.

The block's own forward runs twice, and is never looked into. In the first run each expert notes the tokens that it is called with.
These go to the ranks that hold the experts, which compute, and send the results back. In the second run, which draws the same random
numbers, each expert answers with its result. The gradient is whole: tokens get theirs through the first run's graph, weights through
the second's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from phalanx.cluster import device as devices
from phalanx.cluster.mesh import Axis
from phalanx.cluster.random import SameDraws
from phalanx.errors import ConfigError, ShapeError
from phalanx.parallel.expert.exchange import dispatch, rank_along
from phalanx.parallel.expert.homes import Homes
from phalanx.parallel.expert.load import Load


class ListedForward:
    """What takes the place of a block's forward.

    Cost: the block's own work beside the experts (its router) is done twice.
    Raises: ConfigError for a block that does with experts what cannot be spread.
    """

    def __init__(self, own_forward: Callable[..., Any], attribute: str, homes: Homes, axes: Sequence[Axis], load: Load):
        self.own_forward, self.attribute, self.homes, self.axes, self.load = own_forward, attribute, homes, tuple(axes), load
        self.has_all = False

    def __call__(self, block: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if self.has_all:
            return self.own_forward(*arguments, **keywords)
        tokens = next((value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)), None)
        if tokens is None:
            raise ConfigError(f"{type(block).__name__} was called without a tensor", allowed="tokens as the first tensor")
        experts = getattr(block, self.attribute)
        notes, draws = Notes(type(block).__name__), SameDraws(devices.get(tokens.device.type))
        with _undone(block, experts, tokens), self.load.share.repeating(), self._standing_in(block, experts, notes.take_note):
            self.own_forward(*arguments, **keywords)
        answers = self._answer(experts, notes, tokens)
        with draws.again(), self._standing_in(block, experts, answers.next):
            output = self.own_forward(*arguments, **keywords)
        answers.require_all_taken()
        return _anchored(output, answers.all_rows)

    @contextmanager
    def _standing_in(self, block: nn.Module, experts: nn.ModuleList, answer: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
        block._modules[self.attribute] = nn.ModuleList(StandIn(number, answer) for number in range(len(experts)))
        try:
            yield
        finally:
            block._modules[self.attribute] = experts

    def _answer(self, experts: nn.ModuleList, notes: Notes, tokens: torch.Tensor) -> Answers:
        """Sends all noted tokens to their experts; each call is a choice of its own, already made, so its weight is 1."""
        calls = notes.calls
        x = torch.cat([x for _, x in calls]) if calls else tokens.reshape(-1, tokens.shape[-1])[:0]
        chosen = torch.cat([torch.full((len(x), 1), number, device=tokens.device) for number, x in calls] or [x.new_zeros(0, 1).long()])
        if experts.training:
            self.load.count(chosen)
        own = self.homes.held[rank_along(self.axes)]
        sent = dispatch(x, chosen, torch.ones_like(chosen, dtype=x.dtype), self.homes, self.axes, self.load.name)
        came = sent.rows.take(sent.x)
        parts = [experts[number](rows) for number, rows in zip(own, came.split(sent.sizes), strict=True) if len(rows)]
        y = torch.cat(parts) if parts else came
        if y.shape != came.shape:
            found = f"an expert of {notes.block} makes {tuple(y.shape)} of {tuple(came.shape)}"
            raise ShapeError(found, allowed="experts that keep the width of a token", remedy="leave ep out")
        return Answers(notes, sent.combine(sent.rows.add_up(y, sent.weights)))


class StandIn(nn.Module):
    """Takes an expert's place in its list for one run of the block's forward."""

    def __init__(self, number: int, answer: Callable[[int, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.number, self.answer = number, answer

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if len(arguments) != 1 or keywords or not isinstance(arguments[0], torch.Tensor) or arguments[0].dim() != 2:
            raise ConfigError(
                "an expert was called with something other than one tensor of tokens",
                allowed="experts that are called as expert(x) with x [tokens, width]",
                remedy="leave ep out",
            )
        return self.answer(self.number, arguments[0])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise ConfigError(
                f"a block reads '{name}' of its experts, which may live on another rank",
                allowed="blocks that only call their experts",
                remedy=f"a forward of the expert that uses '{name}' itself",
            ) from None


class Notes:
    """The calls of experts in one forward: (expert, tokens), in order."""

    def __init__(self, block: str):
        self.block = block
        self.calls: list[tuple[int, torch.Tensor]] = []

    def take_note(self, number: int, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((number, x))
        return torch.zeros_like(x)


class Answers:
    """What experts made of the noted calls, given out in the same order.

    Raises: ConfigError where a block's second forward calls its experts otherwise than its first.
    """

    def __init__(self, notes: Notes, rows: torch.Tensor):
        self.notes, self.all_rows, self.taken = notes, rows, 0
        self.parts = rows.split([len(x) for _, x in notes.calls]) if notes.calls else ()

    def next(self, number: int, x: torch.Tensor) -> torch.Tensor:
        at, self.taken = self.taken, self.taken + 1
        if at >= len(self.parts) or self.notes.calls[at][0] != number or self.notes.calls[at][1].shape != x.shape:
            raise self._unequal()
        return self.parts[at]

    def require_all_taken(self) -> None:
        if self.taken != len(self.parts):
            raise self._unequal()

    def _unequal(self) -> ConfigError:
        return ConfigError(
            f"{self.notes.block} calls its experts otherwise when its forward runs again",
            allowed="blocks in which which expert gets which tokens does not follow from what experts answer",
            remedy="leave ep out",
        )


# What every module has, and a forward of a person's own does not touch.
_COMMON = frozenset(vars(nn.Module()))


@contextmanager
def _undone(block: nn.Module, experts: nn.ModuleList, tokens: torch.Tensor) -> Iterator[None]:
    """Runs a forward without a trace: what it notes in its modules, in buffers, lists, sums or whatever else, is afterwards as before.

    Raises: ConfigError for what cannot be undone.
    """
    held = {id(module) for module in experts.modules()}
    outside = [module for module in block.modules() if id(module) not in held]
    scopes = [(scope, _own(scope)) for module in outside for scope in (module._buffers, vars(module))]
    contents = [_Content(value) for _, values in scopes for value in values.values() if isinstance(value, torch.Tensor | list | dict | set)]
    version = _version(tokens)
    yield
    for scope, values in scopes:
        for name in [name for name in _own(scope) if name not in values]:
            del scope[name]
        scope.update(values)
    for content in contents:
        content.put_back()
    if _version(tokens) != version:
        raise ConfigError(f"{type(block).__name__} changes its input in place", allowed="a forward that leaves its input as it is")


def _own(scope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scope.items() if name not in _COMMON}


class _Content:
    """What a tensor or a collection holds now. A tensor that nobody changes is left alone: a graph may need it as it is."""

    def __init__(self, value: torch.Tensor | list | dict | set):
        self.value = value
        self.before: Any = value.detach().clone() if isinstance(value, torch.Tensor) else copy(value)
        self.version = _version(value) if isinstance(value, torch.Tensor) else 0

    @torch.no_grad()
    def put_back(self) -> None:
        value = self.value
        if isinstance(value, torch.Tensor):
            if torch.is_inference_mode_enabled() or _version(value) != self.version:
                value.copy_(self.before)
        elif isinstance(value, list):
            value[:] = self.before
        else:
            value.clear()
            value.update(self.before)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version


def _anchored(output: Any, rows: torch.Tensor) -> Any:
    """Ties an exchange to the output, so that every rank takes part in its backward, also one whose tokens chose no expert."""
    if isinstance(output, torch.Tensor):
        return _Anchor.apply(output, rows)
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        return type(output)((_Anchor.apply(output[0], rows), *output[1:]))
    raise ConfigError(f"a block with experts returns a {type(output).__name__}", allowed="a tensor, or a tuple that begins with one")


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.like = rows.shape, rows.dtype, rows.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        return grad, torch.zeros((), dtype=dtype, device=device).expand(shape)
