"""A recipe: everything a training run is made of, read from TOML into frozen dataclasses, with overrides from the command line."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where the run lives and on what it runs. `processes` counts local ranks and is ignored under an outer launcher.

    `layer_costs` is the folder of an earlier run under `pp`, whose recorded step says what layers cost.
    """

    folder: str
    plan: str = "zero0"
    processes: int = 1
    seed: int = 1
    layer_costs: str = ""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The text: UTF-8 files, relative to the recipe; the last `held_out` of each is kept for validation."""

    files: tuple[str, ...]
    held_out: float = 0.05
    vocabulary: int = 2048


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model of `transformers` by its type, and the fields of its config."""

    type: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The global batch of one optimizer step: `rows` windows of `tokens` tokens, whatever the number of ranks."""

    rows: int = 16
    tokens: int = 128


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with a linear warm-up and a cosine down to `final_fraction` of the learning rate."""

    learning_rate: float = 1e-3
    final_fraction: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """What is added to the routing of a mixture, as `phalanx.Routing` has it; capacity 0 drops nothing."""

    z: float = 0.0
    sequence: float = 0.0
    bias_rate: float = 0.0
    capacity: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How long to train, and every how many steps what is done; 0 means only at the end.

    Of the checkpoints that were saved on the way there stay the `keep_last` newest (0: all) and those of each `keep_every` steps.
    """

    total: int = 100
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0
    keep_last: int = 0
    keep_every: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """The text that the trained model writes at the end."""

    prompt: str = "The"
    tokens: int = 100
    temperature: float = 0.8


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run. `source` is the folder that relative paths in it start from."""

    name: str
    run: RunSettings
    text: TextSettings
    model: ModelSettings = ModelSettings()
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    routing: RoutingSettings = RoutingSettings()
    steps: StepSettings = StepSettings()
    sample: SampleSettings = SampleSettings()
    source: str = "."

    def text_paths(self) -> list[Path]:
        return [Path(self.source) / name for name in self.text.files]

    def folder(self) -> Path:
        """The run's folder, relative to where the command was called, not to the recipe: runs gather where one works."""
        return Path(self.run.folder)


# What each number may be: checked after reading, so that one message names every offence.
_RANGES: dict[str, tuple[float, float]] = {
    "run.processes": (1, 4096),
    "text.held_out": (0.0, 0.5),
    "text.vocabulary": (258, 1 << 20),
    "batch.rows": (1, 1 << 20),
    "batch.tokens": (2, 1 << 20),
    "optimizer.learning_rate": (0.0, 100.0),
    "optimizer.final_fraction": (0.0, 1.0),
    "optimizer.warmup_steps": (0, 1 << 40),
    "optimizer.weight_decay": (0.0, 100.0),
    "optimizer.beta1": (0.0, 1.0),
    "optimizer.beta2": (0.0, 1.0),
    "optimizer.clip_norm": (0.0, 1e30),
    "routing.z": (0.0, 100.0),
    "routing.sequence": (0.0, 100.0),
    "routing.bias_rate": (0.0, 1.0),
    "routing.capacity": (0.0, 1e6),
    "steps.total": (1, 1 << 40),
    "steps.log_every": (1, 1 << 40),
    "steps.evaluate_every": (0, 1 << 40),
    "steps.save_every": (0, 1 << 40),
    "steps.keep_last": (0, 1 << 40),
    "steps.keep_every": (0, 1 << 40),
    "sample.tokens": (0, 1 << 20),
    "sample.temperature": (0.0, 100.0),
}


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Reads a recipe file and applies overrides of the form `a.b=c`, each value written as in TOML (a bare word is a string).

    Raises: ConfigError for a missing or unreadable file, an unknown or missing key, a wrong type or a value out of range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the recipe {path} does not exist", remedy="recipes/demo.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}", allowed="a TOML file in UTF-8") from None
    for override in overrides:
        _override(table, override)
    if "source" in table:
        raise ConfigError("the recipe has an unknown key 'source'")
    recipe = _build(Recipe, table | {"source": str(path.parent)}, "")
    _check_ranges(recipe)
    return recipe


def recipe_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested plain values, fit for JSON."""
    return dataclasses.asdict(recipe)


def recipe_from_table(table: Mapping[str, Any]) -> Recipe:
    """The inverse of `recipe_table`."""
    return _build(Recipe, table, "")


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"the override {override!r} has no value", allowed="a.b=c", remedy="--steps.total=10")
    *outer, last = key.split(".")
    for part in outer:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"the override {override!r} goes into {part!r}, which is a value and not a table")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[last] = text


def _build(kind: type, table: Any, where: str) -> Any:
    """Fills a dataclass from a table; nested dataclasses from nested tables."""
    place = f"[{where}]" if where else "the recipe"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place} is {table!r}", allowed="a table")
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    public = [name for name in fields if name != "source"]
    for key in table:
        if key not in fields:
            nearest = difflib.get_close_matches(key, public, n=1, cutoff=0.5)
            raise ConfigError(f"{place} has an unknown key {key!r}", allowed=", ".join(public), remedy=nearest[0] if nearest else None)
    hints = typing.get_type_hints(kind)
    values = {key: _value(hints[key], entry, f"{where}.{key}" if where else key) for key, entry in table.items()}
    absent = [name for name, entry in fields.items() if name not in values and _required(entry)]
    if absent:
        raise ConfigError(f"{place} lacks {', '.join(absent)}")
    return kind(**values)


def _required(entry: dataclasses.Field) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    """Checks one value against its type; whole numbers are taken for floats, nothing else is converted."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    origin = typing.get_origin(hint) or hint
    if origin is tuple and isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)) and origin is not tuple:
        return value
    word = {tuple: "a list of strings", dict: "a table", int: "a whole number", float: "a number", str: "a string"}[origin]
    raise ConfigError(f"{where} is {value!r}", allowed=word)


def _check_ranges(recipe: Recipe) -> None:
    faults = []
    for where, (low, high) in _RANGES.items():
        section, name = where.split(".")
        value = getattr(getattr(recipe, section), name)
        if not low <= value <= high:
            faults.append(f"{where} is {value}, not within {low} to {high}")
    if recipe.steps.keep_every and not recipe.steps.keep_last:
        faults.append("steps.keep_every is set and steps.keep_last is 0, which keeps every checkpoint (try steps.keep_last=1)")
    if not recipe.text.files:
        faults.append("text.files is empty")
    if faults:
        raise ConfigError("; ".join(faults))
