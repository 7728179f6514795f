"""The file form of a plan: TOML with the plan's fields as keys, and a table for what the text form cannot say.

zero = 3
precision = "bf16"

[gemini]
device = "30GB"
host = "60GB"
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import PlanError
from phalanx.plan.fields import Budgets, PlanFields
from phalanx.plan.text import nearest, overruled

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_PLAN_KEYS = [field.name for field in dataclasses.fields(PlanFields) if field.name != "budgets"]
_BUDGET_KEYS = [field.name for field in dataclasses.fields(Budgets)]


def parse_bytes(value: object) -> int:
    """The number of bytes in `30GB` (1000s), `30GiB` (1024s) or a plain number."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", value.strip() if isinstance(value, str) else str(value))
    unit = match and _UNITS.get(match[2].upper())
    size = round(float(match[1]) * unit) if match and unit else 0
    if size < 1 or isinstance(value, bool):
        raise PlanError(f"{value!r} is no amount of memory", allowed="a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB", remedy="30GB")
    return int(match[1]) if match and unit == 1 and match[1].isdigit() else size


def read_file(path: str | Path) -> dict[str, Any]:
    """The table that a plan file holds.

    Raises: PlanError where the file is missing or is no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise PlanError(f"the plan file {path} cannot be read: {problem.strerror}", remedy="the path of an existing file") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise PlanError(f"the plan file {path} is no TOML: {problem}", remedy="zero = 1") from problem


def read_table(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[PlanError]]:
    """The fields that a table sets, and everything in it that a plan does not have."""
    fields: dict[str, Any] = {}
    problems: list[PlanError] = []
    for key, value in table.items():
        if key == "gemini" and isinstance(value, Mapping):
            fields["gemini"] = True
            problems += _read_budgets(value, fields)
        elif key in _PLAN_KEYS:
            fields[key] = value
        else:
            problems.append(unknown_key(key, _PLAN_KEYS, "a plan"))
    return fields, problems + list(overruled(fields))


def _read_budgets(table: Mapping[str, Any], fields: dict[str, Any]) -> list[PlanError]:
    problems = [unknown_key(key, _BUDGET_KEYS, "gemini") for key in table if key not in _BUDGET_KEYS]
    values: dict[str, Any] = {key: value for key, value in table.items() if key in _BUDGET_KEYS}
    try:
        for tier in ("device", "host", "disk"):
            if tier in values:
                values[tier] = parse_bytes(values[tier])
        fields["budgets"] = Budgets(**values)
    except PlanError as problem:
        problems.append(problem)
    return problems


def unknown_key(key: str, known: list[str], owner: str) -> PlanError:
    """The error for a key that `owner` does not have, with the nearest that it has."""
    return PlanError(f"{owner} has no key {key!r}", allowed=", ".join(known), remedy=nearest(key, known) or "leave it out")


def print_table(plan: PlanFields) -> str:
    """The TOML of a plan: the keys that differ from their default, in the order of the fields."""
    lines: list[str] = []
    for field in dataclasses.fields(PlanFields):
        value = getattr(plan, field.name)
        if value == field.default or field.name == "budgets" or (field.name == "gemini" and plan.budgets):
            continue
        lines.append(f"{field.name} = {_toml(value)}")
    if plan.budgets is not None:
        lines += ["", "[gemini]"]
        lines += [f"{name} = {_toml(value)}" for name, value in vars(plan.budgets).items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    # TOML's basic strings, numbers and booleans are those of JSON, and so is their escaping but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
