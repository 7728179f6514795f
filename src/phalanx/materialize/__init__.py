"""Building a model without its memory: construction is recorded on meta tensors, and replayed later tensor by tensor.

A recording is a list of operations on *values*. A value stands for one storage; tensors of the program are windows on it,
so views need no record, and a parameter that is rewrapped, detached or moved by `.data` stays the same value. A replay runs
what the wanted values need: random operations in the order of construction, the others as late as possible before the value
that needs them is complete and as early as possible after.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from phalanx.errors import ConfigError
from phalanx.materialize.operations import Recording, Value, Window, value_of, window_on
from phalanx.materialize.record import lazy
from phalanx.materialize.replay import Replay

__all__ = ["is_lazy", "lazy", "materialize", "replay"]

Receive = Callable[[str, torch.Tensor], None]


def is_lazy(model: nn.Module) -> bool:
    """Whether any parameter or buffer of the model is still a record."""
    return any(value_of(tensor) is not None for _, tensor in _tensors(model))


def replay(source: nn.Module | Iterable[tuple[str, torch.Tensor]], receive: Receive) -> None:
    """Calls `receive(name, tensor)` once for each parameter and buffer of a model, or each of given ones, with its full final value.

    Tied tensors come once, under their first name. The order is the same on every rank, and not that of the model. The model
    itself is left as it is; the tensor may be kept. The random generator is left alone.
    Cost: the tensors that one value needs at a time, mostly that value alone.
    Raises: ConfigError for a meta tensor that was not recorded.
    """
    wanted: dict[Recording, dict[Value, list[tuple[str, Window]]]] = {}
    for name, tensor in _tensors(source) if isinstance(source, nn.Module) else source:
        value = value_of(tensor)
        if value is not None:
            wanted.setdefault(value.recording, {}).setdefault(value, []).append((name, window_on(tensor, value)))
        elif tensor.is_meta:
            raise ConfigError(
                f"'{name}' is a meta tensor that lazy() has not recorded",
                allowed="models that are built and changed inside lazy()",
                remedy="move the change (a cast, a new layer, a resize) into the context",
            )
        else:
            receive(name, tensor.detach())
    for recording, values in wanted.items():

        def deliver(value: Value, storage: torch.UntypedStorage, values: dict = values) -> None:
            for name, window in values[value]:
                receive(name, window.over(storage))

        Replay(recording.operations, values, deliver).run()


def materialize(model: nn.Module) -> nn.Module:
    """Gives a lazy model its values in place; parameters stay the same objects, except where something refers to them weakly."""
    tensors = dict(_tensors(model))

    def put(name: str, value: torch.Tensor) -> None:
        tensor = tensors[name]
        if value_of(tensor) is None:
            return
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
        if weakref.getweakrefcount(tensor):
            _put_in_owners(model, tensor, value)
        else:
            torch.utils.swap_tensors(tensor, value)

    replay(model, put)
    return model


def _put_in_owners(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is old:
                setattr(module, name, new)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
