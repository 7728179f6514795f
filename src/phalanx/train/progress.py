"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere, nothing from ranks other than 0.

The live line is on stdout, which ranks share with their launcher; what stays is on stderr.
"""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Shows the progress of `total` steps; `visible` is false on every rank but one."""

    def __init__(self, total: int, visible: bool):
        self._total, self._visible = total, visible
        self._live: Progress | None = None
        if visible and sys.stdout.isatty():
            columns = (BarColumn(), TextColumn("step {task.completed:.0f}/{task.total:.0f}  {task.description}"), TimeRemainingColumn())
            self._live = Progress(*columns, console=Console(), transient=True)
            self._task = self._live.add_task("", total=total)

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def step(self, step: int, text: str | None = None) -> None:
        """Says that `step` steps are done; `text` is given where there is something new to say."""
        if self._live:
            self._live.update(self._task, completed=step, **({"description": text} if text else {}))
        elif text:
            self.say(f"step {step:>{len(str(self._total))}}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        elif self._visible:
            print(text, file=sys.stderr, flush=True)
