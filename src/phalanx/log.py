"""The rank-aware logger for people, and the event sink for programs (pictures, exporters, dashboards)."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Scalar = float | int | str | bool | None


class _RankFormatter(logging.Formatter):
    """Plain text from rank 0 of a job or from a lone process; other ranks say who they are."""

    rank, world_size = 0, 1

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return f"[rank {self.rank}] {text}" if self.world_size > 1 and (self.rank or record.levelno >= logging.WARNING) else text


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is now, so that captured and redirected output is found."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def get_logger() -> logging.Logger:
    """The logger of Phalanx: information from rank 0 only, warnings and errors from every rank, all on stderr."""
    logger = logging.getLogger("phalanx")
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(_RankFormatter())
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
    return logger


def set_rank(rank: int, world_size: int) -> None:
    """Tells the logger which rank speaks; from then on ranks other than 0 keep information to themselves."""
    logger = get_logger()
    _RankFormatter.rank, _RankFormatter.world_size = rank, world_size
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of `events.jsonl`. `time` is in seconds since 1970."""

    time: float
    run: str
    rank: int
    step: int | None
    kind: str
    name: str
    value: Scalar
    attrs: dict[str, Any] = field(default_factory=dict)


class Events:
    """The event sink of one process; without `open` every event is dropped at no cost."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._run, self._rank = "", 0

    def open(self, path: str | os.PathLike[str], run: str, rank: int) -> None:
        """Appends from now on to `path`, which several ranks and a resumed run may share."""
        self.close()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._run, self._rank = run, rank

    def emit(self, kind: str, name: str, value: Scalar = None, step: int | None = None, **attrs: Any) -> None:
        """Writes one event; it is on its way to the disk when this returns."""
        if self._descriptor is None:
            return
        record = {"time": time.time(), "run": self._run, "rank": self._rank, "step": step}
        record |= {"kind": kind, "name": name, "value": _finite(value), "attrs": _finite(attrs)}
        # One write call per line on a descriptor that appends: lines of several processes never mix.
        os.write(self._descriptor, (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Ends writing; `open` may be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


events = Events()


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Yields the events of a file in order; a last line that a killed process left unfinished is passed over."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                yield Event(**record)
            except (json.JSONDecodeError, TypeError):
                continue


def _finite(value: Any) -> Any:
    """JSON has no word for inf and nan; they are written as the strings that `float` reads."""
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, str | int | bool | None):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)
