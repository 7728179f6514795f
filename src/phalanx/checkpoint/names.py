"""Names in messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SHOWN = 5


def with_nearest(names: Sequence[str], others: Sequence[str]) -> str:
    """The first few names, each with the nearest of the others."""
    shown = []
    for name in names[:SHOWN]:
        near = difflib.get_close_matches(name, others, n=1)
        shown.append(f"{name} (nearest: {near[0]})" if near else name)
    return ", ".join(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
