"""SIGTERM, by which schedulers announce that a machine goes: a wish to stop, which ranks agree on at the end of a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 128 + signal.SIGTERM  # the exit code of what has ended because it was asked to

_asked = False


def asked() -> bool:
    """Whether SIGTERM has come to this rank while it was noticed. Others may not have got theirs yet."""
    return _asked


@contextmanager
def noticing() -> Iterator[None]:
    """Lets SIGTERM no longer end the process while inside, but be noted. For the main thread."""
    global _asked

    def note(number: int, frame: object) -> None:
        global _asked
        _asked = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _asked = False
