"""The reading of a model as text: its modules as a tree, layers that are alike once, and what stays whole and why."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from phalanx.anatomy.reading import Anatomy
from phalanx.anatomy.specimen import stacks_of
from phalanx.anatomy.split import Split

Line = tuple[str, str]


def tree(model: nn.Module, anatomy: Anatomy) -> list[Line]:
    """Lines of (indented name, what it is), for the modules that have a role and those above them."""
    what = _descriptions(anatomy)
    lines: list[Line] = [(type(model).__name__, f"{anatomy.num_layers} layers")]
    ranges = _alike(model, anatomy)
    shown = {prefix for name in what for prefix in _prefixes(name)}
    for name, _ in model.named_modules(remove_duplicate=False):
        block = next((block for block in ranges if name == block or name.startswith(f"{block}.")), None)
        if name in shown and (block is None or ranges[block]):
            label = ranges.get(name, name.rpartition(".")[2])
            lines.append(("  " * (name.count(".") + 1) + label, what.get(name, "")))
    return lines


def whole(anatomy: Anatomy) -> list[Line]:
    """What stays whole and why; names that differ in numbers only come once."""
    found: dict[str, str] = {}
    for name, reason in anatomy.whole.items():
        found[re.sub(r"\b\d+\b", "*", name)] = re.sub(r"\.\d+\.", ".*.", reason)
    return list(found.items())


def _descriptions(anatomy: Anatomy) -> dict[str, str]:
    found = dict.fromkeys(anatomy.vocabulary, "by vocabulary")
    for item in anatomy.seams:
        group = item.group
        if group.kind == "heads":
            shared = "" if group.span == 1 else f", {group.kv_atoms} for keys and values"
            found.setdefault(item.local.home, f"{group.atoms} heads of {group.width}{shared}")
        for name, split in group.columns.items():
            found[name] = f"column: {_split(split, group.kind)}"
        found |= dict.fromkeys(group.rows, f"row: {group.atoms} x {group.width}" if group.kind == "heads" else f"row: {group.atoms}")
    return found


def _split(split: Split, kind: str) -> str:
    """The blocks of a projection's outputs: "8 x 4", "8 x 4 + 4 x 4 + 4 x 4"."""
    parts = [f"{blocks.count} x {blocks.width}" if kind == "heads" or blocks.width > 1 else str(blocks.count) for blocks in split.blocks]
    return " + ".join(parts if len(parts) < 5 else [*parts[:2], "...", parts[-1]])


def _alike(model: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """For each block the label of the run of equal layers that it begins, or nothing where it goes on with one."""
    labels: dict[str, str] = {}
    roles = anatomy.roles
    for _, blocks in stacks_of(model):
        runs: list[list[str]] = []
        for name, _ in blocks:
            if runs and name and _roles_in(roles, runs[-1][0]) == _roles_in(roles, name):
                runs[-1].append(name)
            elif name:
                runs.append([name])
        for run in runs:
            first, last = run[0].rpartition(".")[2], run[-1].rpartition(".")[2]
            labels |= dict.fromkeys(run, "") | {run[0]: first if len(run) == 1 else f"{first} to {last}"}
    return labels


def _roles_in(roles: dict[str, str], block: str) -> dict[str, str]:
    return {name.removeprefix(block): role for name, role in roles.items() if name.startswith(f"{block}.")}


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))
