"""What a run costs and how it goes: loss, throughput and time, measured without stopping the steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from phalanx.log import events


class Meter:
    """Collects the results of steps and reads them when a line is due, so that a step need not wait for its numbers.

    Validation and saving are not training: the clock stands while the meter is paused.
    """

    def __init__(self) -> None:
        self._started = self._reported = time.perf_counter()
        self._idle_s = self._idle_reported_s = 0.0
        self._waiting: list[tuple[int, Any]] = []
        self._tokens = 0

    def add(self, step: int, result: Any) -> None:
        """Takes the result of a step as it is."""
        self._waiting.append((step, result))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as training."""
        begun = time.perf_counter()
        yield
        self._idle_s += time.perf_counter() - begun

    def report(self) -> str:
        """Reads all results that wait, emits their events, and says in one line how the run goes."""
        tokens = sum(self._emit(step, result) for step, result in self._waiting)
        now = time.perf_counter()
        spent = now - self._reported - (self._idle_s - self._idle_reported_s)
        self._reported, self._idle_reported_s = now, self._idle_s
        self._tokens += tokens
        step, last = self._waiting[-1]
        self._waiting.clear()
        rate = tokens / spent if spent > 0 else 0.0
        events.emit("train", "tokens_per_s", rate, step=step)
        skipped = f"  skipped {last.skipped_total}" if last.skipped_total else ""
        return f"loss {float(last.loss):.4f}  norm {float(last.grad_norm):.3f}  lr {_rate(last):.2e}  {rate:,.0f} tokens/s{skipped}"

    def summary(self) -> dict[str, float]:
        """Units: seconds of training alone; tokens that were predicted, on all ranks together."""
        seconds = self._reported - self._started - self._idle_reported_s
        return {"train_s": seconds, "tokens": self._tokens, "tokens_per_s": self._tokens / seconds if seconds > 0 else 0.0}

    def _emit(self, step: int, result: Any) -> int:
        events.emit("train", "loss", result.loss, step=step, skipped=bool(result.skipped))
        events.emit("train", "grad_norm", result.grad_norm, step=step)
        events.emit("train", "lr", _rate(result), step=step)
        return int(result.tokens)


def _rate(result: Any) -> float:
    """The learning rate of the first parameter group."""
    return float(result.lr[0] if isinstance(result.lr, list | tuple) else result.lr)
