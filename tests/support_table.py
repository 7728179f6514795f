"""The support table of README.md, written from what the parity tests found: `pytest --support-table=README.md`.

Every test in tests/numerics whose parameters name a `model` and a `plan` fills the cell of that row and column.
"""

from __future__ import annotations

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


def render(outcomes: Iterable[Outcome]) -> str:
    """A Markdown table: models down, plans across; a cell holds how many tests passed, or how many of them failed.

    A plan's cell has its tests with accumulation too, so that a column stands for a strategy.
    """
    cells: dict[tuple[str, str], list[bool]] = {}
    for outcome in outcomes:
        plan = "+".join(term for term in outcome.plan.split("+") if not term.startswith("acc"))
        cells.setdefault((outcome.model, plan), []).append(outcome.passed)
    models = sorted({model for model, _ in cells})
    plans = sorted({plan for _, plan in cells})
    lines = [f"| model | {' | '.join(f'`{plan}`' for plan in plans)} |", f"| --- |{' :-: |' * len(plans)}"]
    lines += [f"| {model} | {' | '.join(_cell(cells.get((model, plan))) for plan in plans)} |" for model in models]
    return "\n".join(lines)


def _cell(results: list[bool] | None) -> str:
    if not results:
        return ""
    return f"{len(results)} ✓" if all(results) else f"**{results.count(False)} of {len(results)} ✗**"


def write(path: Path, table: str) -> None:
    """Replaces what stands between the two marks of a file."""
    text = path.read_text(encoding="utf-8")
    before, mark, rest = text.partition(BEGIN)
    _, closing, after = rest.partition(END)
    if not mark or not closing:
        raise ValueError(f"{path} lacks the marks {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


class SupportTable:
    """A pytest plugin that gathers outcomes and writes the table when all tests have run."""

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: list[Outcome] = []

    def pytest_runtest_makereport(self, item, call) -> None:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "numerics" not in item.path.parts or not {"model", "plan"} <= set(parameters):
            return
        skipped = call.excinfo is not None and call.excinfo.typename == "Skipped"
        if not skipped and (call.when == "call" or call.excinfo is not None):
            self._outcomes.append(Outcome(str(parameters["model"]), str(parameters["plan"]), call.excinfo is None))

    def pytest_sessionfinish(self) -> None:
        if self._outcomes:
            write(self._path, render(self._outcomes))
