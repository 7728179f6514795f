"""How commands answer: tables for people, one JSON object for programs, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

DONE, FAILED, WRONG_USE, INTERRUPTED, STOPPED = 0, 1, 2, 130, 143


def print_json(values: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(values, ensure_ascii=False, default=str))


def print_rows(rows: Sequence[Sequence[object]]) -> None:
    """Rows as aligned columns; the last column is not padded."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]) - 1)] if texts else []
    for row in texts:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip())


def show_bytes(count: float | None) -> str:
    """A byte count for people: 12.3 MB."""
    if count is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
