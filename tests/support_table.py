"""The support table of README.md, written from what the parity tests found: `pytest --support-table=README.md`.

Every test in tests/numerics whose parameters name a `model` and a `plan` counts in that row, under each strategy that the plan names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- support table: begin (written by make test-all) -->", "<!-- support table: end -->"


@dataclass(frozen=True)
class Outcome:
    """What one test said about a model under a plan."""

    model: str
    plan: str
    passed: bool


# The strategies, in the order of their columns; a plan's term that is none of them (a size, a number of micro-batches) has no column.
STRATEGIES = (
    *("zero0", "zero1", "zero2", "zero3", "zero3:n", "fsdp", "gemini", "bf16", "fp16", "acc", "recompute", "selective"),
    *("tp", "sp", "2d", "2.5d", "3d", "cp", "ulysses", "ring", "ep"),
    *("pp", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev", "auto-schedule"),
)


def strategies(plan: str) -> set[str]:
    """The columns in which a plan counts; without a term of its own the state is that of zero0."""
    terms = [re.sub(r"^zero3:\d+$", "zero3:n", term.partition("=")[0]) for term in plan.split("+")]
    found = {_strategy(term) for term in terms} & set(STRATEGIES)
    return found if any(name.startswith(("zero", "fsdp", "gemini")) for name in found) else {*found, "zero0"}


def _strategy(term: str) -> str:
    if term in STRATEGIES:
        return term
    name, _, kind = term.partition(":")
    return re.sub(r"d\d+$", "d", kind) if kind else name.rstrip("0123456789")


def render(outcomes: Iterable[Outcome]) -> str:
    """A Markdown table: models down, strategies across; a cell holds how many tests passed, or how many of them failed."""
    cells: dict[tuple[str, str], list[bool]] = {}
    for outcome in outcomes:
        for strategy in strategies(outcome.plan):
            cells.setdefault((outcome.model, strategy), []).append(outcome.passed)
    models = sorted({model for model, _ in cells})
    columns = [strategy for strategy in STRATEGIES if any(found == strategy for _, found in cells)]
    lines = [f"| model | {' | '.join(f'`{column}`' for column in columns)} |", f"| --- |{' :-: |' * len(columns)}"]
    lines += [f"| {model} | {' | '.join(_cell(cells.get((model, column))) for column in columns)} |" for model in models]
    return "\n".join(lines)


def _cell(results: list[bool] | None) -> str:
    if not results:
        return ""
    return f"{len(results)} ✓" if all(results) else f"**{results.count(False)} of {len(results)} ✗**"


def write(path: Path, table: str, begin: str = BEGIN, end: str = END) -> None:
    """Replaces what stands between the two marks of a file."""
    text = path.read_text(encoding="utf-8")
    before, mark, rest = text.partition(begin)
    _, closing, after = rest.partition(end)
    if not mark or not closing:
        raise ValueError(f"{path} lacks the marks {begin} and {end}")
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


class SupportTable:
    """A pytest plugin that gathers outcomes and writes the table when all tests have run, wherever they ran."""

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: list[Outcome] = []

    def pytest_itemcollected(self, item) -> None:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "numerics" in item.path.parts and {"model", "plan"} <= set(parameters):
            item.user_properties.append(("cell", (str(parameters["model"]), str(parameters["plan"]))))

    def pytest_runtest_logreport(self, report) -> None:
        cell = dict(report.user_properties).get("cell")
        if cell is not None and not report.skipped and (report.when == "call" or report.failed):
            self._outcomes.append(Outcome(*cell, report.passed))

    def pytest_sessionfinish(self, session) -> None:
        if self._outcomes and not hasattr(session.config, "workerinput"):  # one process of several sees all reports
            write(self._path, render(self._outcomes))
