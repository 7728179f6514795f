"""Weights out of the files of `transformers`: each rank takes what it holds of a weight, and of what makes it up, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from phalanx.anatomy.file_names import FileNames, Source
from phalanx.checkpoint.export import Weights
from phalanx.errors import CheckpointError
from phalanx.layout import Layout, Piece


def fill_from_files(piece: Piece, sources: Sequence[Source], names: FileNames, weights: Weights) -> None:
    """Fills this rank's part of a weight.

    Cost: one window of the file where the weight is stored as it is; else the tensors that make up one entry of its first dimension,
    as one expert of a stack, and all of them where they do not stand for entries.
    Raises: CheckpointError where they do not make up the weight.
    """
    if [source.file_name for source in sources] == [piece.name]:
        weights.fill(piece, cast=True)
        return
    entries = _by_entry(piece.layout, sources)
    if entries is not None:
        for index, place in _entries_held(piece.layout):
            entry = _joined(piece.name, entries[index], names, weights)
            if tuple(entry.shape) != (1, *piece.layout.shape[1:]):
                break  # they were stacked along another dimension
            _take(piece, entry, piece.layout.box[1:], place)
        else:
            return
    full = _joined(piece.name, sources, names, weights)
    if tuple(full.shape) != piece.layout.shape:
        raise CheckpointError(f"{piece.name} is {tuple(full.shape)} in the files and {piece.layout.shape} in the model")
    piece.tensor.copy_(piece.layout.take(full).reshape(-1)[slice(*piece.layout.run)].view(piece.tensor.shape))


def _joined(name: str, sources: Sequence[Source], names: FileNames, weights: Weights) -> torch.Tensor:
    return names.join(name, sources, [weights.read(source.file_name) for source in sources])


def _by_entry(layout: Layout, sources: Sequence[Source]) -> list[list[Source]] | None:
    """The sources of each entry of the first dimension; None unless each pattern has one source for every entry."""
    by_pattern: dict[str | None, list[Source]] = {}
    for source in sources:
        by_pattern.setdefault(source.pattern, []).append(source)
    if not layout.shape or any(len(found) != layout.shape[0] for found in by_pattern.values()):
        return None
    return [list(entry) for entry in zip(*by_pattern.values(), strict=True)]


def _entries_held(layout: Layout) -> Iterator[tuple[int, int]]:
    """The entries of the first dimension of which this rank has elements: (index in the weight, place in the box)."""
    held = [index for start, stop in layout.box[0] for index in range(start, stop)]
    size = max(_entry_size(layout), 1)
    for place in range(layout.run[0] // size, -(-layout.run[1] // size)):
        yield held[place], place


def _entry_size(layout: Layout) -> int:
    """The elements of one entry within the box."""
    return torch.Size(layout.box_shape[1:]).numel()


def _take(piece: Piece, entry: torch.Tensor, box: Sequence, place: int) -> None:
    """Copies what the piece has of one entry."""
    size, (begin, end) = _entry_size(piece.layout), piece.layout.run
    part = Layout.of_box(entry.shape, [(0, 1), *box]).take(entry).reshape(-1)
    first, last = max(begin, place * size), min(end, (place + 1) * size)
    piece.tensor.view(-1)[first - begin : last - begin].copy_(part[first - place * size : last - place * size])
