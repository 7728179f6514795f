"""The table of docs/checkpoints.md, written from what the tests found: `pytest --load-table=docs/checkpoints.md`.

A test that loads what other plans saved records "loads": the plan that loads, and for each plan that saved what was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support_table import write

MARKS = "<!-- load table: begin (written by make test-all) -->", "<!-- load table: end -->"


def render(loads: Mapping[str, Mapping[str, str]]) -> str:
    """A Markdown table: plans that saved across, plans that loaded down; what is wrong stands below."""
    sources = list(dict.fromkeys(source for faults in loads.values() for source in faults))
    lines = [f"| loaded under | {' | '.join(f'`{source}`' for source in sources)} |", f"| --- |{' :-: |' * len(sources)}"]
    for name, faults in loads.items():
        cells = ["" if source not in faults else "✗" if faults[source] else "✓" for source in sources]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    wrong = [f"- `{name}` from `{source}`: {fault}" for name, faults in loads.items() for source, fault in faults.items() if fault]
    return "\n".join(lines + (["", *wrong] if wrong else []))


class LoadTable:
    """A pytest plugin that gathers what was recorded and writes the table when all tests have run, wherever they ran."""

    def __init__(self, path: Path):
        self._path = path
        self._loads: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report) -> None:
        recorded = dict(report.user_properties).get("loads")
        if recorded is not None and report.when == "call":
            self._loads[recorded[0]] = recorded[1]

    def pytest_sessionfinish(self, session) -> None:
        if self._loads and not hasattr(session.config, "workerinput"):  # one process of several sees all reports
            write(self._path, render(self._loads), *MARKS)
