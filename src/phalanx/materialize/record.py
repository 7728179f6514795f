"""The context in which the construction of a model is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.errors import ConfigError
from phalanx.materialize.operations import Recording, Value, Window, name_of, value_of, window_on
from phalanx.materialize.replay import Replay

# In-place operations whose result does not depend on what the tensor held before.
_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("fill", "zero", "copy", "normal", "uniform", "random", "exponential", "log_normal", "cauchy", "geometric", "bernoulli")
)
_RESHAPES_STORAGE = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
# Indexing makes these on the device of a lazy tensor, which is truly meta; other calls with a meta device mean it.
_ONTO_DEVICE_OF_ANOTHER = frozenset({"aten::scalar_tensor", "aten::_to_copy"})
_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RANDOM_TAG = torch.Tag.nondeterministic_seeded


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Records the construction of modules without memory for their tensors.

    Parameters and buffers are meta tensors, whose `.device` inside says where they will be. `replay` or `materialize` gives them the values
    that construction under the same `torch.manual_seed` gives, bit for bit. What reads values (`.item()`, `.tolist()`) is
    computed, as long as they are not drawn at random. Change a lazy model only inside the context: outside, meta tensors forget.
    The generator is left at a state that depends on the seed and the draws, not at the one eager construction would leave.
    Raises: ConfigError for what cannot be replayed, naming the operation.
    """
    if Recorder.active is not None:
        raise ConfigError("lazy() inside lazy()", allowed="one context at a time", remedy="build both models in the outer one")
    recorder = Recorder(Recording())
    sample = nn.init._no_grad_trunc_normal_

    def trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # It draws until everything fits, so how often it draws depends on what it drew: one operation for a replay.
        return recorder.record_in_place(sample, tensor, args, kwargs)

    nn.init._no_grad_trunc_normal_ = trunc_normal_
    Recorder.active = recorder
    try:
        with recorder, _ReadsValues(recorder):
            yield
    finally:
        Recorder.active = None
        nn.init._no_grad_trunc_normal_ = sample


class Recorder(TorchDispatchMode):
    """Runs every operation on meta tensors and records those that make or change values."""

    active: Recorder | None = None

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.name in _ONTO_DEVICE_OF_ANOTHER and kwargs.get("device") == torch.device("meta"):
            kwargs = kwargs | {"device": torch.device("cpu")}
        with torch._C.DisableTorchFunction():
            if not self._is_ours(function, args, kwargs):
                return function(*args, **kwargs)
            if function._schema.name in _RESHAPES_STORAGE:
                raise _cannot_record(function._schema.name)
            if kwargs.get("generator") not in (None, torch.default_generator):
                raise _cannot_record(f"{function._schema.name} with a generator of its own")
            if _READ_TAGS & set(function.tags) and _RANDOM_TAG not in function.tags:
                return self.compute(function, args, kwargs)
            try:
                return self._record(function, args, kwargs)
            except NotImplementedError:
                if _RANDOM_TAG in function.tags or _written_arguments(function._schema):
                    raise _cannot_record(function._schema.name) from None
                return self.compute(function, args, kwargs)

    def _is_ours(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether to record: what makes a tensor from nothing, draws, or touches a lazy tensor; views need no record."""
        if _is_view(function._schema):
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        touches_lazy = any(value_of(tensor) is not None for tensor in tensors)
        if any(tensor.is_meta and value_of(tensor) is None for tensor in tensors):
            if touches_lazy:
                raise _cannot_record(f"{function._schema.name} of a meta tensor from elsewhere")
            return False
        is_random = _RANDOM_TAG in function.tags
        device = _device_of(args, kwargs).type
        if is_random and device not in ("cpu", "meta"):
            raise _cannot_record(f"{function._schema.name} on {device}")
        return touches_lazy or (device == "cpu" and (is_random or not tensors))

    def compute(self, function: Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Calls a function with the values that its lazy tensors have at this point.

        Raises: ConfigError where a value is drawn at random.
        """
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor) and value_of(leaf)}
        windows = {key: self._window(tensor) for key, tensor in tensors.items()}
        found: dict[Value, torch.UntypedStorage] = {}
        wanted = dict.fromkeys(window.value for window in windows.values())

        def known(leaf: Any) -> Any:
            return windows[id(leaf)].over(found[windows[id(leaf)].value]) if id(leaf) in windows else leaf

        with _disable_current_modes():
            Replay(self.recording.operations, wanted, found.__setitem__, reader=name_of(function)).run()
            return function(*tree_map(known, args), **tree_map(known, kwargs or {}))

    def record_in_place(self, function: Callable[..., Any], tensor: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """Records a random Python function that fills its tensor whatever it held."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if tensor.is_meta and value_of(tensor) is None:
                return tensor
            if kwargs.get("generator") not in (None, torch.default_generator):
                raise _cannot_record(f"{name_of(function)} with a generator of its own")
            window = self._adopt(tensor)
            self.recording.record(function, (window, *args), kwargs, is_random=True, writes=[window], overwrites=window.covers_value())
        return tensor

    def _record(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        schema, is_random = function._schema, _RANDOM_TAG in function.tags
        written = _written_tensors(schema, args, kwargs)
        writes = [self._adopt(tensor) for tensor in written]
        twins: dict[int, torch.Tensor] = {}
        meta_args, meta_kwargs = tree_map(lambda leaf: _on_meta(leaf, twins), (args, kwargs))
        if kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        result = function(*meta_args, **meta_kwargs)
        if any(w.value.num_bytes != t.untyped_storage().nbytes() for w, t in zip(writes, written)):
            raise _cannot_record(f"{schema.name} into an output of another size")
        originals = {id(twin): leaf for leaf, twin in _pairs((args, kwargs), (meta_args, meta_kwargs))}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and id(leaf) not in originals]
        device = _device_of(args, kwargs)
        creates = [self._attach(tensor, device) for tensor in made if value_of(tensor) is None]
        if creates or writes or is_random:
            described_args, described_kwargs = tree_map(self._describe, (args, kwargs))
            overwrites = schema.name in _OVERWRITES and len(writes) == 1 and writes[0].covers_value()
            self.recording.record(
                function,
                described_args,
                described_kwargs,
                is_random=is_random,
                creates=creates,
                writes=writes,
                overwrites=overwrites and [leaf for leaf in tree_leaves(described_args) if isinstance(leaf, Window)].count(writes[0]) == 1,
            )
        return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)

    def _attach(self, tensor: torch.Tensor, device: torch.device) -> Value:
        storage = tensor.untyped_storage()
        value = Value(self.recording, storage.nbytes(), device)
        storage.phalanx_value = value  # type: ignore[attr-defined]
        return value

    def _adopt(self, tensor: torch.Tensor) -> Window:
        """The window of a tensor that an operation writes; a real one becomes a value that starts as a copy of it."""
        if value_of(tensor) is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()
            self.recording.record(torch.clone, (flat,), {}, creates=[self._attach(tensor, tensor.device)])
        return self._window(tensor)

    def _window(self, tensor: torch.Tensor) -> Window:
        value = value_of(tensor)
        if value is None or value.recording is not self.recording:
            raise ConfigError(
                "a tensor of one lazy() context is used in another", allowed="one context for a model", remedy="build and change it in one"
            )
        return window_on(tensor, value)

    def _describe(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone() if value_of(leaf) is None else self._window(leaf)


class _ReadsValues(TorchFunctionMode):
    """Answers what a lazy tensor is asked outside of operations: its values, and on which device it will be."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        value = value_of(args[0]) if function in _READERS or function in _DEVICE_ANSWERS else None
        if value is None:
            return function(*args, **kwargs)
        return self.recorder.compute(function, args, kwargs) if function in _READERS else _DEVICE_ANSWERS[function](value)


_READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_DEVICE_ANSWERS: dict[Any, Callable[[Value], Any]] = {
    torch.Tensor.device.__get__: lambda value: value.device,
    torch.Tensor.is_meta.__get__: lambda value: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda value: value.device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda value: value.device.type == "cuda",  # type: ignore[attr-defined]
}


def _device_of(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Where the result of a call will be: as asked, else with its first lazy tensor, else with its first tensor."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = [value.device for value in map(value_of, tensors) if value is not None] + [tensor.device for tensor in tensors]
    return devices[0] if devices else torch.device("cpu")


def _is_view(schema: Any) -> bool:
    aliases = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _written_arguments(schema: Any) -> list[Any]:
    return [argument for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]


def _written_tensors(schema: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    leaves = tree_leaves([given.get(argument.name) for argument in _written_arguments(schema)])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _on_meta(leaf: Any, twins: dict[int, torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
        return leaf
    if id(leaf) not in twins:
        twins[id(leaf)] = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return twins[id(leaf)]


def _pairs(originals: Any, twins: Any) -> Iterable[tuple[Any, Any]]:
    pairs = zip(tree_leaves(originals), tree_leaves(twins))
    return [(leaf, twin) for leaf, twin in pairs if isinstance(leaf, torch.Tensor)]


def _cannot_record(what: str) -> ConfigError:
    return ConfigError(f"{what} cannot be recorded under lazy()", remedy="do this part before the context, or build without lazy()")
