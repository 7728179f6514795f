"""What is verified: a model, its criterion and its batches, from a built-in name, a directory, a file's function, or functions."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.data import num_rows, take_rows
from phalanx.errors import ConfigError
from phalanx.verify.batches import LENGTHS, make_batch
from phalanx.verify.tiny import build_from_directory, build_tiny


@dataclass(frozen=True)
class Program:
    """A single-device program: `batch(step)` is the global batch of a step; without a criterion the model's own loss counts."""

    model: nn.Module
    criterion: Callable[..., Any] | None
    batch: Callable[[int], Any]


class Source(Protocol):
    """Builds the same program in every process; equal sources build equal programs."""

    @property
    def name(self) -> str: ...

    def build(self) -> Program: ...


@dataclass(frozen=True)
class NamedModel:
    """A built-in tiny model, or a directory with a config.json, on ragged batches of `rows` rows."""

    name: str
    rows: int = len(LENGTHS)

    def build(self) -> Program:
        path = Path(self.name)
        model, kind = build_from_directory(path) if path.is_dir() else build_tiny(self.name)
        return Program(model, None, lambda step: make_batch(kind, model.config, step, self.rows))


@dataclass(frozen=True)
class FileFunction:
    """`module.py:function`, which returns `model`, `(model, batch)` or `(model, criterion, batch)`.

    `batch` is one batch, or a function of the step. Equal in two processes only if the file is.
    """

    path: str
    function: str
    rows: int | None = None

    @property
    def name(self) -> str:
        return f"{self.path}:{self.function}"

    def build(self) -> Program:
        function = getattr(load_file(Path(self.path)), self.function, None)
        if not callable(function) or not _takes_nothing(function):
            found = "has no function" if not callable(function) else "needs arguments for"
            raise ConfigError(f"{self.path} {found} '{self.function}'", allowed="a function without required arguments")
        return program_from(function(), self.name, self.rows)


@dataclass(frozen=True)
class Functions:
    """What `verify` was called with. Both functions run in every process."""

    model_fn: Callable[[], Any]
    batch_fn: Callable[..., Any]
    criterion: Callable[..., Any] | None = None
    rows: int | None = None

    @property
    def name(self) -> str:
        return getattr(self.model_fn, "__qualname__", type(self.model_fn).__name__)

    def build(self) -> Program:
        model = self.model_fn()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{self.name}() returned a {type(model).__name__}", allowed="a model, that is an nn.Module")
        return Program(model, self.criterion, _batches(self.batch_fn, self.rows))


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def find_source(name: str, rows: int | None = None) -> Source:
    """The source that a name on the command line means."""
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return FileFunction(str(Path(path).resolve()), function, rows)
    return NamedModel(name, len(LENGTHS) if rows is None else rows)


def program_from(result: Any, name: str, rows: int | None) -> Program:
    """The program in what a user's function returned."""
    parts = result if isinstance(result, tuple) else (result,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise ConfigError(f"{name} returned {_kinds(parts)}", allowed="a model, (model, batch) or (model, criterion, batch)")
    model, criterion = parts[0], parts[1] if len(parts) == 3 else None
    if len(parts) > 1:
        return Program(model, criterion, _batches(parts[-1], rows))
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ConfigError(
            f"{name} returned a {type(model).__name__} without a batch",
            allowed="a model alone only if it is a transformers model",
            remedy="return (model, batch), or (model, criterion, batch)",
        )
    from phalanx.verify.tiny import kind_of_class

    kind = kind_of_class(type(model).__name__, config)
    return Program(model, None, lambda step: make_batch(kind, config, step, len(LENGTHS) if rows is None else rows))


def load_file(path: Path) -> ModuleType:
    """The module in a Python file, loaded once in a process and registered, so that its classes can be pickled there.

    It finds the modules beside it, as under `python module.py`.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", allowed="module.py:function")
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = name if known is None else f"{name}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be loaded as a module", allowed="module.py:function")
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout rate of a model to 0: dropout modules, and numbers called dropout that modules keep for themselves."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def use_plain_experts(model: nn.Module) -> None:
    """Lets `transformers` loop over experts: its grouped product takes neither float64 nor narrow experts."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"


def _batches(batch: Any, rows: int | None) -> Callable[[int], Any]:
    """The batch of each step, cut to its first `rows` rows; a function is called with the step if it takes an argument."""
    takes_step = callable(batch) and bool(inspect.signature(batch).parameters)

    def at(step: int) -> Any:
        whole = batch if not callable(batch) else batch(step) if takes_step else batch()
        return whole if rows is None else take_rows(whole, 0, min(rows, num_rows(whole)))

    return at


def _kinds(parts: tuple) -> str:
    return "(" + ", ".join(type(part).__name__ for part in parts) + ")"
