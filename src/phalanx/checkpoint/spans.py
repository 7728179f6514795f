"""Which elements of one layout are which of another, as arrays: the arithmetic behind loading any plan from any plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from phalanx.layout import Layout


def table(layout: Layout) -> np.ndarray:
    """The rows of `Layout.spans` (local offset, logical offset, length) as one array, in ascending order of both offsets.

    Shapes: (spans, 3) int64.
    """
    inner, length = len(layout.shape), 1
    while inner and layout.box_shape[inner - 1] == layout.shape[inner - 1]:
        inner -= 1
        length *= layout.shape[inner]
    if inner:
        inner -= 1
        length *= layout.box_shape[inner]
    start, stop = layout.run
    if start >= stop or not length:
        return np.zeros((0, 3), dtype=np.int64)
    rows = np.arange(start // length, -(-stop // length), dtype=np.int64)
    logical = np.zeros_like(rows)
    left = rows
    for dim in reversed(range(inner)):
        left, at = np.divmod(left, layout.box_shape[dim])
        logical += (layout.box[dim][0] + at) * math.prod(layout.shape[dim + 1 :])
    if inner < len(layout.shape):
        logical += layout.box[inner][0] * math.prod(layout.shape[inner + 1 :])
    first = np.maximum(rows * length, start)
    last = np.minimum((rows + 1) * length, stop)
    return np.stack([first - start, logical + first - rows * length, last - first], axis=1)


def bounds(layout: Layout) -> tuple[int, int]:
    """The logical offsets of the first and the last element of a run; (0, -1) if it is empty."""
    if not layout.num_elements:
        return 0, -1
    ends = []
    for position in (layout.run[0], layout.run[1] - 1):
        offset, stride = 0, 1
        for (start, stop), size in zip(reversed(layout.box), reversed(layout.shape)):
            position, at = divmod(position, stop - start)
            offset += (start + at) * stride
            stride *= size
        ends.append(offset)
    return ends[0], ends[1]


def overlap(wanted: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """What two tables have in common: rows (offset in the wanted run, offset in the saved run, length), ascending.

    Shapes: (n, 3), (m, 3) -> (at most n + m, 3).
    """
    low = np.searchsorted(saved[:, 1] + saved[:, 2], wanted[:, 1], side="right")
    high = np.searchsorted(saved[:, 1], wanted[:, 1] + wanted[:, 2], side="left")
    counts = np.maximum(high - low, 0)
    of_wanted = np.repeat(np.arange(len(wanted)), counts)
    of_saved = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[of_wanted]
    mine, theirs = wanted[of_wanted], saved[of_saved]
    first = np.maximum(mine[:, 1], theirs[:, 1])
    last = np.minimum(mine[:, 1] + mine[:, 2], theirs[:, 1] + theirs[:, 2])
    return np.stack([mine[:, 0] + first - mine[:, 1], theirs[:, 0] + first - theirs[:, 1], last - first], axis=1)


def tiles(starts: np.ndarray, lengths: np.ndarray, total: int) -> bool:
    """Whether ranges, in any order, cover the elements 0 to `total` each exactly once."""
    order = np.argsort(starts, kind="stable")
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths[order])])
    return bool(ends[-1] == total and (starts[order] == ends[:-1]).all())


def cut(spans: np.ndarray, window: int) -> Iterator[np.ndarray]:
    """Yields the rows of `overlap` in groups that each lie in one window of `window` saved elements, cutting rows at its edges."""
    if not len(spans):
        return
    end = int(spans[-1, 1] + spans[-1, 2])
    starts = np.arange(int(spans[0, 1]) // window * window, end, window)
    windows = np.stack([starts, starts, np.full_like(starts, window)], axis=1)
    by_saved = overlap(spans[:, [0, 1, 2]], windows)
    edges = np.searchsorted(by_saved[:, 1], starts)
    for group in np.split(by_saved, edges[1:]):
        if len(group):
            yield group


def strided(spans: np.ndarray) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Yields (first row, count, step between rows) so that a column slice is one strided copy and not one copy per row."""
    steps = np.diff(spans, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    start, count = 0, len(spans)
    while start < count:
        if start == count - 1 or steps[start, 2]:
            stop = start
        else:
            following = np.searchsorted(changes, start, side="right")
            stop = int(changes[following]) if following < len(changes) else count - 1
        yield spans[start], stop - start + 1, steps[start] if stop > start else np.zeros(3, dtype=np.int64)
        start = stop + 1
