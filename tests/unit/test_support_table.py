"""The support table is what the tests found, and nothing else."""

from types import SimpleNamespace

import pytest
from support_table import BEGIN, END, Outcome, SupportTable, render, strategies, write


def test_cells_count_what_passed_and_what_failed():
    outcomes = [Outcome("tiny-llama", "zero1", True), Outcome("tiny-llama", "zero1+acc3", True), Outcome("tiny-vit", "zero0", False)]
    assert render(outcomes).splitlines() == [
        "| model | `zero0` | `zero1` | `acc` |",
        "| --- | :-: | :-: | :-: |",
        "| tiny-llama |  | 2 ✓ | 1 ✓ |",
        "| tiny-vit | **1 of 1 ✗** |  |  |",
    ]


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        ("tp2+sp", {"zero0", "tp", "sp"}),
        ("zero3:2+tp8:2.5d2", {"zero3:n", "2.5d"}),
        ("zero1+tp4:2d+acc3", {"zero1", "2d", "acc"}),
        ("pp3+interleaved2+micro5+recompute=0.5", {"zero0", "pp", "interleaved", "recompute"}),
        ("ulysses2+ring4+bf16", {"zero0", "ulysses", "ring", "bf16"}),
        ("dp2+fsdp", {"fsdp"}),
    ],
)
def test_a_plan_counts_under_each_strategy_it_names(plan, columns):
    assert strategies(plan) == columns


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(path, "new")
    assert path.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_a_file_without_marks_is_left_alone(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("text")
    with pytest.raises(ValueError, match="lacks the marks"):
        write(path, "new")
    assert path.read_text() == "text"


def told(passed, when="call", skipped=False, cell=("tiny-llama", "zero1")):
    properties = [("cell", cell)] if cell else []
    return SimpleNamespace(passed=passed, failed=not passed and not skipped, skipped=skipped, when=when, user_properties=properties)


def test_each_test_counts_once_and_skipped_ones_do_not(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"{BEGIN}\n{END}\n")
    table = SupportTable(path)
    for report in (told(True), told(True, "setup"), told(False), told(False, "setup"), told(False, skipped=True), told(True, cell=None)):
        table.pytest_runtest_logreport(report)
    table.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(workerinput={})))
    assert path.read_text() == f"{BEGIN}\n{END}\n"  # another process gathers what the workers found
    table.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))
    assert "| tiny-llama | **2 of 3 ✗** |" in path.read_text()
