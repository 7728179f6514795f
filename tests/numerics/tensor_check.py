"""What a cell of tensor parallelism must show."""

from pathlib import Path
from typing import Any

from phalanx.verify import verify_named

USER_FILE = Path(__file__).with_name("tensor_programs.py")


def check(model: str, plan: str, world: int, **options: Any) -> None:
    """A tiny model, or a function of tensor_programs.py, under a plan gives the numbers of one process."""
    report = verify_named(model if model.startswith("tiny-") else f"{USER_FILE}:{model}", plan, world, **options)
    assert report.ok, str(report)
    assert report.worst_relative_error < 1e-9
