"""A small copy of a model to try things out on: the first layers of every stack, in float64, with weights that hide nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.anatomy.loss_source import is_pretrained
from phalanx.anatomy.stacks import layer_stacks

ROWS, LENGTH = 2, 12
Call = Callable[[nn.Module], Any]


class Unrunnable(Exception):
    """A model cannot be tried out: its inputs are not known, or its forward failed on them."""


@dataclass
class Specimen:
    """`model` in evaluation mode; `run()` is one forward; `kinds` maps each block of the original to the block that stands for it."""

    model: nn.Module
    call: Call
    kinds: dict[str, str] = field(default_factory=dict)

    def run(self) -> Any:
        """One forward; what it draws at random is the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # and no device's: those are not put back
            return self.call(self.model)

    def draws_in_training(self) -> bool:
        """Whether a forward in training draws at random; True where it cannot be tried out. What it counts stays changed."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            try:
                self.call(self.model.train())
            except Exception:  # a forward that wants more in training, as labels
                return True
            finally:
                self.model.eval()
            return not torch.equal(before, torch.get_rng_state())


def make_specimen(model: nn.Module, call: Call | None) -> Specimen:
    """The copy of `model`, which is left as it was; `call` runs a forward on the copy."""
    kept, kinds = _first_of_each_kind(model)
    with _cut_to(model, kept):
        small = copy.deepcopy(model, fresh_tensors(model)).eval()
    _without_dropout(small)
    _plain_kernels(small)
    return Specimen(small, call or guess_call(small), kinds)


def num_copied(model: nn.Module) -> int:
    """The elements of the parameters that a specimen of the model would have."""
    with _cut_to(model, _first_of_each_kind(model)[0]):
        return sum(parameter.numel() for parameter in model.parameters())


def fresh_tensors(model: nn.Module) -> dict[int, Any]:
    """What a deep copy is to put in the place of parameters and buffers: float64 on the processor, whatever the model has.

    Parameters get random values of a moderate size: weights of 0 or 1 would hide what depends on what. Buffers keep theirs where they
    have any.
    """
    generator = torch.Generator().manual_seed(0)
    fresh: dict[int, Any] = {}
    for parameter in model.parameters():
        value = torch.randn(tuple(parameter.shape), dtype=torch.float64, generator=generator)
        value = 1 + 0.3 * value if value.dim() < 2 else value * min(0.3, value.shape[-1] ** -0.5 if value.shape[-1] else 1)
        if parameter.is_floating_point():
            fresh[id(parameter)] = nn.Parameter(value)
        elif not parameter.is_complex():
            fresh[id(parameter)] = nn.Parameter(torch.zeros(tuple(parameter.shape), dtype=parameter.dtype), requires_grad=False)
    for buffer in model.buffers():
        fresh[id(buffer)] = _fresh_buffer(buffer, generator)
    return fresh


def _fresh_buffer(buffer: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if buffer.is_meta or isinstance(buffer, FakeTensor):
        if buffer.is_floating_point():
            return torch.rand(tuple(buffer.shape), dtype=torch.float64, generator=generator) + 0.5
        return torch.ones(tuple(buffer.shape), dtype=buffer.dtype)
    copied = buffer.detach().to("cpu", copy=True)
    return copied.double() if copied.is_floating_point() else copied


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of the model's layer stacks that hold projections inside; the model itself where there is no such stack."""
    found = [(name, block) for name, block in layer_stacks(model) if any(is_linear(part) for part in block.modules() if part is not block)]
    return found or [("", model)]


def stacks_of(model: nn.Module) -> list[tuple[str, list[tuple[str, nn.Module]]]]:
    """The blocks of `blocks_of` by stack, each with its name."""
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in blocks_of(model):
        found.setdefault(name.rpartition(".")[0], []).append((name, block))
    return list(found.items())


def _first_of_each_kind(model: nn.Module) -> tuple[set[str], dict[str, str]]:
    """The blocks to keep (of each stack its start, up to one block of every kind, at least two) and which stands for which."""
    first: dict[tuple, str] = {}
    kinds: dict[str, str] = {}
    of_stack: dict[str, list[str]] = {}
    for name, block in blocks_of(model):
        stack = name.rpartition(".")[0]
        of_stack.setdefault(stack, []).append(name)
        kinds[name] = first.setdefault((stack, *_kind(block)), name)
    kept = set()
    for names in of_stack.values():
        last = max(index for index, name in enumerate(names) if kinds[name] == name)
        kept.update(names[: max(last + 1, 2)])
    return kept, kinds


def _kind(block: nn.Module) -> tuple:
    """Blocks of one kind have the same modules and parameters of the same shapes."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters(remove_duplicate=False))


@contextmanager
def _cut_to(model: nn.Module, kept: set[str]) -> Iterator[None]:
    """The model without the blocks that are not kept; they come back at the end."""
    dropped: dict[str, set[str]] = {}
    for name, _ in blocks_of(model):
        stack, _, key = name.rpartition(".")
        if name and name not in kept:
            dropped.setdefault(stack, set()).add(key)
    before = [(model.get_submodule(stack), keys) for stack, keys in dropped.items()]
    whole = [(container, container._modules) for container, _ in before]
    try:
        for container, keys in before:
            container._modules = {key: child for key, child in container._modules.items() if key not in keys}
        yield
    finally:
        for container, children in whole:
            container._modules = children


def is_linear(module: nn.Module) -> bool:
    """Projections with a weight of two dimensions: `nn.Linear`, and the `Conv1D` of `transformers`, told by name."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight has its inputs in the first dimension."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _plain_kernels(model: nn.Module) -> None:
    """Half-precision kernels cannot run in float64."""
    for config in {
        id(config): config for module in model.modules() if hasattr(config := getattr(module, "config", None), "to_dict")
    }.values():
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
        if "flash" in str(getattr(config, "_attn_implementation", "")):
            config._attn_implementation = "sdpa"


# -- what to call it with ------------------------------------------------------------------------------------------------


def guess_call(model: nn.Module) -> Call:
    """A forward on inputs made up from the config, or from the first embedding; raises Unrunnable where neither tells."""
    inputs = _inputs_for(model)
    if inputs is None:
        raise Unrunnable("its inputs cannot be guessed")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float64)
    if isinstance(inputs, dict):
        inputs = {key: value.to(dtype) if _is_floating(value) else value for key, value in inputs.items()}
    return lambda copy_of_model: copy_of_model(**inputs) if isinstance(inputs, dict) else copy_of_model(inputs)


def call_with(batch: Any, forward: Callable[[nn.Module, Any], Any] | None) -> Call:
    """A forward on the few rows of a batch that a person has given."""
    batch = _doubled(batch)
    if forward is not None:
        return lambda model: forward(model, batch)
    if isinstance(batch, Mapping):
        labels_are_asked_for = lambda model: "labels" in _parameters(model)  # noqa: E731
        return lambda model: model(**{key: value for key, value in batch.items() if key != "labels" or labels_are_asked_for(model)})
    if isinstance(batch, (tuple, list)):
        return lambda model: model(*(batch[:-1] if len(batch) > 1 else batch))
    return lambda model: model(batch)


def _doubled(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        generator = torch.Generator().manual_seed(3)
        kind = torch.float64 if value.is_floating_point() else value.dtype
        return (
            torch.randn(tuple(value.shape), generator=generator).to(kind) if kind.is_floating_point else torch.ones(value.shape, dtype=kind)
        )
    if isinstance(value, torch.Tensor):
        value = value.cpu()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _doubled(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_doubled(item) for item in value)
    return value


def _inputs_for(model: nn.Module) -> Any:
    tokens = _tokens(model)
    config = getattr(model, "config", None)
    if config is not None and (is_pretrained(model) or any(is_pretrained(module) for module in model.modules())):
        return _inputs_from_config(model, config, tokens)
    required = [item for item in _parameters(model).values() if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
    return tokens if len(required) == 1 and tokens is not None else None


def _inputs_from_config(model: nn.Module, config: Any, tokens: torch.Tensor | None) -> dict[str, Any] | None:
    accepted = _parameters(model)
    generator = torch.Generator().manual_seed(2)
    inputs: dict[str, Any] = {}
    if "pixel_values" in accepted and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (ROWS, config.num_channels, height, width)
        inputs["pixel_values"] = torch.randn(shape, dtype=torch.float64, generator=generator)
    elif "input_features" in accepted:
        shape = (ROWS, config.num_mel_bins, 2 * config.max_source_positions)
        inputs["input_features"] = torch.randn(shape, dtype=torch.float64, generator=generator)
    elif tokens is None:
        return None
    else:
        inputs["input_ids"] = tokens
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.flip(0)[:, : LENGTH - 1] if tokens is not None else None
    if "use_cache" in accepted or any(item.kind is item.VAR_KEYWORD for item in accepted.values()):
        inputs["use_cache"] = False
    return {key: value for key, value in inputs.items() if key in accepted or "kwargs" in accepted}


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _tokens(model: nn.Module) -> torch.Tensor | None:
    own = getattr(model, "get_input_embeddings", None)
    try:
        embedding = own() if own is not None else None
    except (NotImplementedError, AttributeError):
        embedding = None
    if not isinstance(embedding, nn.Embedding):
        embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        return None
    generator = torch.Generator().manual_seed(1)
    return torch.randint(min(3, embedding.num_embeddings - 1), embedding.num_embeddings, (ROWS, LENGTH), generator=generator)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)
