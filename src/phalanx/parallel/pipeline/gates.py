"""Gates on the blocks of an untouched model: its own forward runs, passes over the blocks of other stages, and is left after the last.

Blocks before the stage return poison in the shapes that real ones would return; the first block of the stage takes what was
received; the block after its last one does not run but ends the forward with the arguments it was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.pipeline.cut import Poison
from phalanx.parallel.pipeline.handed import Handed, Substitution, by_shape, hand_over, with_tensors


class Handover(Exception):
    """Carries what the next stage needs out of a forward."""

    def __init__(self, handed: Handed):
        super().__init__("the forward is over for this stage")
        self.handed = handed


@dataclass
class Visit:
    """One run of the forward for one stage: its blocks `first` to `last`, and what was received (nothing for the first stage)."""

    stage: int
    first: int
    last: int
    received: Handed | None = None
    chosen: frozenset[int] | None = None  # which arguments are handed on; None: this visit finds out, and looks for poison
    outputs: dict[str, Any] = field(default_factory=dict)
    reached: int = -1
    found: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.substitution = Substitution(self.received) if self.received is not None else None
        self.outputs = dict(self.received.header.outputs) if self.received is not None else {}


class Gates:
    """The gates of one model; without a visit under way it cannot run, since no rank holds all of it."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], poison: Poison):
        self.blocks, self.poison = blocks, poison
        self.stacks = [f"{name.rpartition('.')[0]}:{type(block).__name__}" for name, block in blocks]
        self.visit: Visit | None = None
        self.are_open = False  # while this rank holds the whole model
        self.taint: _Taint | None = None
        self.at_leave: list[Callable[[], None]] = []  # what ends whatever layers have begun, when a forward is left
        for index, (_, block) in enumerate(blocks):
            _put_gate(block, index, self)

    @contextmanager
    def visiting(self, visit: Visit, parameters: Callable[[], Iterator[nn.Parameter]]) -> Iterator[None]:
        """Runs a forward inside for one stage; it ends with a Handover unless the stage is the last one."""
        self.visit = visit
        if visit.chosen is None:
            self.taint = _Taint([*parameters(), *(visit.received.tensors if visit.received else [])])
        try:
            if self.taint is not None:
                with self.taint:
                    yield
            else:
                yield
        finally:
            self.visit = self.taint = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The model runs inside as if there were no gates."""
        self.are_open = True
        try:
            yield
        finally:
            self.are_open = False

    def require_closed(self) -> None:
        if self.are_open:
            raise ConfigError(
                "a step was taken inside booster.gathered(), where every rank holds the whole model",
                allowed="training outside of it",
                remedy="leave the block before booster.step",
            )

    def __call__(self, index: int, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.are_open:
            return run(*args, **kwargs)
        visit = self.visit
        if visit is None:
            raise ConfigError(
                "this model is cut into the stages of a pipeline, and was called by itself",
                allowed="booster.step, booster.forward_backward and booster.evaluate; calls and generation inside booster.gathered()",
                remedy="booster.evaluate(batch)",
            )
        self._keep_order(visit, index)
        if index < visit.first:
            return self._pass_over(visit, index)
        if index > visit.last:
            if visit.substitution is not None:
                args, kwargs = visit.substitution.after(args, kwargs)
            handed = hand_over(args, kwargs, visit.outputs, self._is_chosen)
            visit.found = handed.header.places
            for end in self.at_leave:
                end()
            raise Handover(handed)
        if visit.substitution is not None:
            replace = visit.substitution.at_entry if index == visit.first else visit.substitution.after
            args, kwargs = replace(args, kwargs)
            if visit.chosen is None:
                self._look_for_poison(index, args, kwargs)
        output = run(*args, **kwargs)
        visit.outputs[self.stacks[index]] = by_shape(output)
        if self.taint is not None:  # whatever a layer returns, later stages cannot make it themselves
            self.taint.add(output)
        return output

    def _keep_order(self, visit: Visit, index: int) -> None:
        if index != visit.reached + 1:
            after = f"after {self.blocks[visit.reached][0]}" if visit.reached >= 0 else "first"
            raise PlanError(
                f"the layer {self.blocks[index][0]} runs {after}, which is not the order in which the model lists its layers",
                allowed="layers that run once each, one after another, in every forward (no layer drop)",
                remedy="zero3 in place of the pipeline",
            )
        visit.reached = index

    def _pass_over(self, visit: Visit, index: int) -> Any:
        output = visit.outputs.get(self.stacks[index])
        if output is None:
            raise PlanError(
                f"the layers of {self.stacks[index].partition(':')[0]} are of several kinds whose outputs are not known to later stages",
                allowed="stacks of layers of one class",
                remedy="zero3 in place of the pipeline",
            )
        return with_tensors(output, self.poison.like)

    def _is_chosen(self, place: int, tensor: torch.Tensor) -> bool:
        """Whether an argument depends on what the stages so far hold, and so must be handed on."""
        chosen = self.visit.chosen  # type: ignore[union-attr]
        if chosen is not None:
            return place in chosen or tensor.requires_grad  # a forward that took another way than the one that was followed
        return tensor.requires_grad or (self.taint is not None and self.taint.has(tensor))

    def _look_for_poison(self, index: int, args: tuple, kwargs: dict[str, Any]) -> None:
        received = {id(tensor) for tensor in self.visit.received.tensors}  # type: ignore[union-attr]
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and id(leaf) not in received and bool(leaf.isnan().any()):
                raise PlanError(
                    f"the layer {self.blocks[index][0]} is called with a tensor of shape {tuple(leaf.shape)} that was computed between "
                    "layers from what another stage holds",
                    allowed="layers that are called with what layers, or modules before the first one, hand on unchanged",
                    remedy="zero3 in place of the pipeline",
                )


def _put_gate(block: nn.Module, index: int, gates: Gates) -> None:
    """Makes calls of the block go through its gate, before any hook runs: the block gets a class of its own, below its class."""
    kind = type(block)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return gates(index, lambda *inner, **named: kind.__call__(self, *inner, **named), args, kwargs)

    block.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


class _Taint(TorchFunctionMode):
    """Follows what is computed from given tensors, also where no gradient flows (frozen, detached, without gradients)."""

    def __init__(self, sources: Sequence[torch.Tensor]):
        super().__init__()
        self._kept = {id(tensor): tensor for tensor in sources}

    def add(self, value: Any) -> None:
        self._kept.update((id(leaf), leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._kept

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if getattr(function, "__name__", "") in FACTORIES:
            return result
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(id(leaf) in self._kept for leaf in leaves):
            # What is changed in place is the first argument; `out` is what is returned.
            changed = leaves[:1] if getattr(function, "__name__", "").endswith("_") or function is torch.Tensor.__setitem__ else []
            for tensor in [*tree_leaves(result), *changed]:
                if isinstance(tensor, torch.Tensor):
                    self._kept[id(tensor)] = tensor
        return result


# These take from a tensor its shape, dtype and device alone.
FACTORIES = frozenset(
    {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like"}
    | {"__get__", "size", "dim", "numel", "device", "dtype", "shape", "type", "is_floating_point", "new"}
)
