"""Which elements of one layout are which of another, as arrays: the arithmetic behind loading any plan from any plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from phalanx.layout import Layout


def table(layout: Layout) -> np.ndarray:
    """The maximal pieces of a run that are contiguous in both orders: (local offset, logical offset, length), ascending in both.

    Shapes: (spans, 3) int64; one span per range of the innermost dimension that is cut, for each of its rows in the run.
    """
    inner, stride = len(layout.shape), 1
    while inner and layout.box_shape[inner - 1] == layout.shape[inner - 1]:
        inner -= 1
        stride *= layout.shape[inner]
    ranges = np.array(layout.box[inner - 1] if inner else ((0, 1),), dtype=np.int64) * stride
    outer = max(inner - 1, 0)
    sizes = ranges[:, 1] - ranges[:, 0]
    length = int(sizes.sum())
    start, stop = layout.run
    if start >= stop or not length:
        return np.zeros((0, 3), dtype=np.int64)
    rows = np.arange(start // length, -(-stop // length), dtype=np.int64)
    local = (rows[:, None] * length + (np.cumsum(sizes) - sizes)).reshape(-1)
    logical = (_row_starts(layout, rows, outer)[:, None] + ranges[:, 0]).reshape(-1)
    first = np.maximum(local, start)
    last = np.minimum(local + np.tile(sizes, len(rows)), stop)
    return np.stack([first - start, logical + first - local, last - first], axis=1)[first < last]


def _row_starts(layout: Layout, rows: np.ndarray, outer: int) -> np.ndarray:
    """The logical offsets at which rows begin, numbered over the first `outer` dimensions of the box."""
    logical = np.zeros_like(rows)
    for dim in reversed(range(outer)):
        places = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in layout.box[dim]])
        rows, at = np.divmod(rows, len(places))
        logical += places[at] * math.prod(layout.shape[dim + 1 :])
    return logical


def bounds(layout: Layout) -> tuple[int, int]:
    """The logical offsets of the first and the last element of a run; (0, -1) if it is empty."""
    if not layout.num_elements:
        return 0, -1
    ends = []
    for position in (layout.run[0], layout.run[1] - 1):
        offset, stride = 0, 1
        for ranges, extent, size in zip(reversed(layout.box), reversed(layout.box_shape), reversed(layout.shape)):
            position, at = divmod(position, extent)
            offset += _place(ranges, at) * stride
            stride *= size
        ends.append(offset)
    return ends[0], ends[1]


def _place(ranges: tuple[tuple[int, int], ...], at: int) -> int:
    """The index that stands at place `at` of the ranges."""
    for start, stop in ranges:
        if at < stop - start:
            return start + at
        at -= stop - start
    raise IndexError(at)


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
