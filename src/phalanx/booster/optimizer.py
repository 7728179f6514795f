"""The optimizer and the scheduler that a person gets back: theirs, working on this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from phalanx.errors import ConfigError
from phalanx.memory import StateEngine


class BoostedOptimizer(Optimizer):
    """The person's optimizer with its parameters replaced by shards; groups, state and settings are its own.

    `step` is the distributed step: gradients are summed, normalised, clipped and checked before it.
    """

    def __init__(self, inner: Optimizer, step: Callable[[], Any], clear: Callable[[], None]):
        # No super().__init__(): this object shares the groups of `inner` rather than building its own.
        self.inner, self._step, self._clear = inner, step, clear
        self.defaults = inner.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One optimizer step with the gradients of every backward since the last; returns its `Result`."""
        if closure is not None:
            raise ConfigError("optimizer.step got a closure", allowed="gradients from booster.backward", remedy="optimizer.step()")
        return self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients since the last step."""
        self._clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "a parameter group was added after boost",
            allowed="groups that exist before boost; frozen parameters may be in them",
            remedy="give the optimizer every parameter that is to learn at some time, and unfreeze it then",
        )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, of this rank's shards."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"BoostedOptimizer({self.inner!r})"


class BoostedScheduler:
    """The person's scheduler; it advances once per optimizer step that was not skipped, whatever the number of ranks.

    `booster.step` advances it by itself. In a hand-written loop `step()` after `optimizer.step()` does.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self.is_driven_by_metric = isinstance(inner, ReduceLROnPlateau)
        self._advanced_by_booster = False
        self._last_step_skipped = False

    def after_step(self, skipped: bool, advance: bool) -> None:
        """Called after every optimizer step; `advance` where booster.step owns the loop."""
        self.inner.optimizer._opt_called = True  # what PyTorch looks for before it warns of a schedule that runs ahead of the optimizer
        self._last_step_skipped = skipped
        self._advanced_by_booster = advance and not self.is_driven_by_metric
        if self._advanced_by_booster and not skipped:
            self.inner.step()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the schedule, unless the optimizer step before it was skipped."""
        if self._advanced_by_booster:
            raise ConfigError(
                "lr_scheduler.step() was called after booster.step, which has advanced it already",
                allowed="one advance per optimizer step",
                remedy="leave lr_scheduler.step() out",
            )
        if not self._last_step_skipped or self.is_driven_by_metric:
            self.inner.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Turns the fused kernel on where the optimizer has one for this device and the person chose none.

    Cost: a third of the time of the default loop on a processor; the same update to rounding.
    """
    if not getattr(type(optimizer), "__module__", "").startswith("torch.optim"):
        return
    if any(group.get("momentum") for group in optimizer.param_groups):
        return  # the fused form of momentum cannot start for a parameter that joins later, as an unfrozen one does
    for group in optimizer.param_groups:
        chosen = group.get("fused", False) is not None or group.get("foreach") is not None
        plain = all(parameter.is_floating_point() for parameter in group["params"])
        if "fused" in group and not chosen and plain and not group.get("differentiable") and not isinstance(group.get("lr"), torch.Tensor):
            group["fused"] = True


def step_scaled(optimizer: Optimizer, factor: float) -> None:
    """One step of the optimizer with every gradient multiplied by `factor`.

    Cost: nothing beside the step where all kernels are fused and gradients are float32; else one pass over the gradients.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if gradients and fused and all(gradient.dtype == torch.float32 for gradient in gradients):
        # The fused kernels divide by the scale of mixed precision on their way; it is a float32 number, too coarse for float64.
        optimizer.grad_scale = torch.full((), 1.0 / factor, device=gradients[0].device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]
        return
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    optimizer.step()


def move_to_shards(optimizer: Optimizer, engine: StateEngine, names_of: Mapping[int, str]) -> list[list[str]]:
    """Replaces every parameter in the optimizer's groups by what this rank updates of it; returns the names in each group.

    `names_of` are the names of all parameters of the person's model by identity, also of those that other ranks hold. State that
    the optimizer already has goes along.
    Raises: ConfigError for a parameter that the model does not have.
    """
    home = {slot.identity: (chunk, slot) for chunk, slot in engine.slots}
    names: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        names.append([])
        shards = []
        for parameter in group["params"]:
            if id(parameter) not in names_of:
                raise ConfigError(
                    f"group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does not have",
                    allowed="parameters of the boosted model",
                    remedy="build the optimizer from model.parameters() of this very model",
                )
            names[-1].append(names_of[id(parameter)])
            state = optimizer.state.pop(parameter, None)
            if id(parameter) not in home:
                continue
            chunk, slot = home[id(parameter)]
            if slot.shard is None:
                continue
            shards.append(slot.shard)
            if state:
                optimizer.state[slot.shard] = {key: _cut(value, chunk, slot) for key, value in state.items()}
        group["params"] = shards
    return names


def _cut(value: Any, chunk: Any, slot: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != slot.logical_shape:
        return value
    return chunk.cut(slot, value).to(slot.shard.device, copy=True)
