"""The support table is what the tests found, and nothing else."""

import pytest
from support_table import BEGIN, END, Outcome, render, write


def test_cells_count_what_passed_and_what_failed():
    outcomes = [Outcome("tiny-llama", "zero1", True), Outcome("tiny-llama", "zero1+acc3", True), Outcome("tiny-vit", "zero0", False)]
    assert render(outcomes).splitlines() == [
        "| model | `zero0` | `zero1` |",
        "| --- | :-: | :-: |",
        "| tiny-llama |  | 2 ✓ |",
        "| tiny-vit | **1 of 1 ✗** |  |",
    ]


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
