"""Which keys each query sees, said by places and documents, and cut into pieces of which few need a mask.

A mask of all queries and all keys is never built: a piece that is not seen is left out, one that is seen in full or under the
diagonal needs none, and the rest is cut into tiles of at most `MASK_ELEMENTS`.

Shapes: B rows, S queries, T keys of a block; places are numbers in the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._guards import detect_fake_mode

Range = tuple[int, int]

MASK_ELEMENTS = 2**21
# Shorter tiles than this spend more on calls than they save on pairs that are not seen.
SHORTEST_TILE = 64
LONGEST_TILE = 1024


@dataclass(frozen=True)
class Sight:
    """How far a query sees: `before` places back and `after` places ahead, each None where there is no limit; 0 ahead is causal."""

    before: int | None = None
    after: int | None = None

    @property
    def is_unlimited(self) -> bool:
        return self.before is None and self.after is None

    def judge(self, nearest: int, farthest: int) -> bool | None:
        """Whether keys at distances `nearest` to `farthest` (key place less query place) are all seen; None where some are."""
        before, after = self.before, self.after
        if (before is not None and farthest < -before) or (after is not None and nearest > after):
            return False
        return True if (before is None or nearest >= -before) and (after is None or farthest <= after) else None


@dataclass(frozen=True, eq=False)
class Tokens:
    """Where the tokens of a block lie: their places in ascending ranges, and per row their documents and whether they are hidden.

    Tokens see tokens of the same document; hidden ones are seen by none. `reach` holds for every place of the whole row the first
    and one past the last place that any row's token there may see, on the host; it only saves work.
    Shapes: `documents`, `hidden` (B, n); `reach` (length of the row, 2).
    """

    ranges: tuple[Range, ...]
    documents: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    reach: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_limited(self) -> bool:
        """Whether `reach` can be read; in a run without data it has no numbers."""
        return self.reach is not None and detect_fake_mode(self.reach) is None

    def places(self, device: torch.device) -> torch.Tensor:
        parts = [torch.arange(start, stop, device=device) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take(self, part: slice) -> Tokens:
        """The tokens at the numbers `part` of this block."""
        ranges, number = [], 0
        for start, stop in self.ranges:
            low, high = max(start, start + part.start - number), min(stop, start + part.stop - number)
            if low < high:
                ranges.append((low, high))
            number += stop - start
        documents = None if self.documents is None else self.documents[:, part]
        return Tokens(tuple(ranges), documents, None if self.hidden is None else self.hidden[:, part], self.reach)

    def numbers_within(self, low: int, high: int) -> slice:
        """The numbers in this block of the tokens whose places are in the half-open range."""
        first = sum(max(0, min(stop, low) - start) for start, stop in self.ranges)
        last = sum(max(0, min(stop, high) - start) for start, stop in self.ranges)
        return slice(first, max(first, last))


@dataclass(frozen=True)
class Piece:
    """Queries and keys of a block, by number, and how they see each other: "all", "causal" (under the diagonal) or "masked"."""

    queries: slice
    keys: slice
    kind: str


def pieces(sight: Sight, queries: Tokens, keys: Tokens, *, num_rows: int, masked: bool = False) -> list[Piece]:
    """What of a block is to be computed, in ascending order of queries; `masked`: a mask comes on top, whatever is seen."""
    if not queries.length or not keys.length:
        return []
    documents = [] if masked or num_rows > 1 or keys.hidden is not None else _documents(queries)
    if documents:
        return [piece for document in documents for piece in _of_document(sight, queries, keys, document)]
    if masked or queries.documents is not None or keys.hidden is not None:
        return list(_tiles(sight, queries, keys, slice(0, queries.length), num_rows))
    if sight == Sight(after=0) and queries.ranges == keys.ranges:
        return [Piece(slice(0, queries.length), slice(0, keys.length), "causal")]
    found: list[Piece] = []
    for part, (start, stop) in _numbered(queries.ranges):
        for piece in _of_range(sight, queries, keys, part, (start, stop), num_rows):
            found = _joined(found, piece)
    return found


def mask(sight: Sight, queries: Tokens, keys: Tokens, device: torch.device) -> torch.Tensor | None:
    """True where a key is seen, or None where all are. Shapes: (B or 1, 1, S, T)."""
    seen = None
    if not sight.is_unlimited:
        distances = keys.places(device)[None, :] - queries.places(device)[:, None]
        if sight.after is not None:
            seen = distances <= sight.after
        if sight.before is not None:
            seen = _and(seen, distances >= -sight.before)
        assert seen is not None
        seen = seen[None]
    if queries.documents is not None and keys.documents is not None:
        seen = _and(seen, queries.documents[:, :, None] == keys.documents[:, None, :])
    if keys.hidden is not None:
        seen = _and(seen, ~keys.hidden[:, None, :])
    return None if seen is None else seen.expand(-1, queries.length, -1)[:, None]


def _and(left: torch.Tensor | None, right: torch.Tensor) -> torch.Tensor:
    return right if left is None else left & right


def _numbered(ranges: Sequence[Range]) -> Iterator[tuple[slice, Range]]:
    number = 0
    for start, stop in ranges:
        yield slice(number, number + stop - start), (start, stop)
        number += stop - start


def _of_range(sight: Sight, queries: Tokens, keys: Tokens, part: slice, places: Range, num_rows: int) -> Iterator[Piece]:
    """The pieces of one range of queries; where a limit cuts through other than along a diagonal, tiles."""
    start, stop = places
    whole: list[Piece] = []
    for numbers, (low, high) in _numbered(keys.ranges):
        seen = sight.judge(low - (stop - 1), high - 1 - start)
        is_diagonal = (low, high) == (start, stop) and sight.after == 0 and (sight.before is None or sight.before >= stop - start - 1)
        if seen is None and not is_diagonal:
            yield from _tiles(sight, queries, keys, part, num_rows)
            return
        if seen or is_diagonal:
            whole.append(Piece(part, numbers, "causal" if is_diagonal else "all"))
    yield from whole


def _documents(tokens: Tokens) -> list[Range]:
    """The places of the documents that a single row's tokens belong to; none where they are not known, or too short to go one by one."""
    if tokens.documents is None or not tokens.is_limited:
        return []
    assert tokens.reach is not None
    reach = torch.cat([tokens.reach[start:stop] for start, stop in tokens.ranges])
    begins = torch.ones(len(reach), dtype=torch.bool)
    begins[1:] = reach[1:, 0] != reach[:-1, 0]
    documents = [(first, last) for first, last in reach[begins].tolist()]
    return documents if len(documents) * SHORTEST_TILE <= max(tokens.length, SHORTEST_TILE) else []


def _of_document(sight: Sight, queries: Tokens, keys: Tokens, document: Range) -> Iterator[Piece]:
    """What is to be computed between the tokens of one document, where no other document has to be masked."""
    asking, asked = queries.numbers_within(*document), keys.numbers_within(*document)
    inner = (Tokens(tokens.take(part).ranges) for tokens, part in ((queries, asking), (keys, asked)))
    for piece in pieces(sight, *inner, num_rows=1):
        rows, columns = piece.queries, piece.keys
        yield Piece(
            slice(rows.start + asking.start, rows.stop + asking.start),
            slice(columns.start + asked.start, columns.stop + asked.start),
            piece.kind,
        )


def _joined(found: list[Piece], piece: Piece) -> list[Piece]:
    """The pieces with one more; two that are seen in full and lie side by side become one."""
    last = found[-1] if found else None
    if last is None or last.kind != "all" or piece.kind != "all":
        return [*found, piece]
    if last.queries == piece.queries and last.keys.stop == piece.keys.start:
        return [*found[:-1], Piece(piece.queries, slice(last.keys.start, piece.keys.stop), "all")]
    if last.keys == piece.keys and last.queries.stop == piece.queries.start:
        return [*found[:-1], Piece(slice(last.queries.start, piece.queries.stop), piece.keys, "all")]
    return [*found, piece]


def _tiles(sight: Sight, queries: Tokens, keys: Tokens, part: slice, num_rows: int) -> Iterator[Piece]:
    """Tiles of queries, each with the keys between the first and the last that it may see."""
    size = min(LONGEST_TILE, max(SHORTEST_TILE, MASK_ELEMENTS // max(1, num_rows * keys.length)))
    for numbers, (start, _) in _numbered(queries.ranges):
        first, last = max(numbers.start, part.start), min(numbers.stop, part.stop)
        for number in range(first, last, size):
            tile = slice(number, min(number + size, last))
            low, high = start + tile.start - numbers.start, start + tile.stop - numbers.start
            seen = keys.numbers_within(*_reach(sight, queries, low, high))
            if seen.start < seen.stop:
                yield Piece(tile, seen, "masked")


def _reach(sight: Sight, queries: Tokens, low: int, high: int) -> Range:
    """The places that queries at the places low to high may see."""
    first = 0 if sight.before is None else low - sight.before
    last = 2**62 if sight.after is None else high + sight.after
    if queries.is_limited:
        assert queries.reach is not None
        first = max(first, int(queries.reach[low:high, 0].min()))
        last = min(last, int(queries.reach[low:high, 1].max()))
    return first, last
