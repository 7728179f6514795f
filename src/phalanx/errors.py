"""The exceptions of Phalanx: each says what was found, what is allowed, and one thing that would work."""

from __future__ import annotations


class PhalanxError(Exception):
    """An error a person can act on.

    `found` is a full clause ("world 8 does not fit pp3"); `allowed` and `remedy` are optional and printed after it.
    """

    def __init__(self, found: str, *, allowed: str | None = None, remedy: str | None = None):
        self.found, self.allowed, self.remedy = found, allowed, remedy
        parts = [found.rstrip(".") + "."]
        if allowed:
            parts.append(f"Allowed: {allowed.rstrip('.')}.")
        if remedy:
            parts.append(f"Try: {remedy.rstrip('.')}.")
        super().__init__(" ".join(parts))

    def __reduce__(self):
        # Keyword-only arguments do not survive the default pickling, and errors travel between ranks.
        return _rebuild, (type(self), self.found, self.allowed, self.remedy)


def _rebuild(kind: type[PhalanxError], found: str, allowed: str | None, remedy: str | None) -> PhalanxError:
    return kind(found, allowed=allowed, remedy=remedy)


class ConfigError(PhalanxError):
    """A setting, a recipe key, a file or an argument is wrong."""


class PlanError(PhalanxError):
    """A plan cannot be read, contradicts itself, or does not fit the model or the world."""


class ShapeError(PhalanxError):
    """A tensor or a batch has a shape that cannot be used here."""


class CommError(PhalanxError):
    """Ranks disagree about a collective, or one of them has failed."""


class CheckpointError(PhalanxError):
    """A checkpoint is missing, incomplete, damaged, or belongs to something else."""


class DamageError(CheckpointError):
    """A checkpoint or one of its files is incomplete, cut short or not what was written: another one may be whole."""


class CapacityError(PhalanxError):
    """Something does not fit into the memory it was given."""
