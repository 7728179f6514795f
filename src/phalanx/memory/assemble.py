"""Whole logical tensors from the pieces that ranks own, whatever cut them, a few at a time, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ShapeError
from phalanx.layout import Box, Layout, Piece

Part = tuple[int, Layout, torch.dtype]
Run = tuple[torch.Tensor, bool]  # bytes that one rank owns, and whether this rank holds them too

BATCH_BYTES = 1 << 20


def assemble(pieces: Iterable[Piece], world: Axis, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of everything that some rank owns a piece of. Collective: every rank goes through all of them.

    Cost: one full tensor at a time, or small ones of together at most `BATCH_BYTES`; each byte travels once to every rank.
    """
    pieces = list(pieces)
    owned = [(piece.name, piece.layout, piece.tensor.dtype) for piece in pieces if piece.owned]
    parts: dict[str, list[Part]] = {}
    for rank, listed in enumerate(comm.gather_objects(owned, world)):
        for name, layout, dtype in listed:
            parts.setdefault(name, []).append((rank, layout, dtype))
    mine: dict[str, list[Piece]] = {}
    for piece in pieces:
        mine.setdefault(piece.name, []).append(piece)
    for some in _batches(parts):
        yield from _assemble_some(some, mine, world, device)


def _batches(parts: dict[str, list[Part]]) -> Iterator[dict[str, list[Part]]]:
    """Tensors that come together: one large one, or small ones of at most `BATCH_BYTES`."""
    batch: dict[str, list[Part]] = {}
    num_bytes = 0
    for name, entries in parts.items():
        _, layout, dtype = entries[0]
        size = math.prod(layout.shape) * dtype.itemsize
        if batch and num_bytes + size > BATCH_BYTES:
            yield batch
            batch, num_bytes = {}, 0
        batch[name] = entries
        num_bytes += size
    if batch:
        yield batch


def _assemble_some(
    parts: dict[str, list[Part]], mine: dict[str, list[Piece]], world: Axis, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """A batch of tensors: runs make up boxes, boxes make up each tensor. What this rank holds itself is shown as it holds it."""
    boxes: dict[str, dict[Box, torch.Tensor]] = {}
    runs: dict[int, list[Run]] = {}
    for name, entries in parts.items():
        own = mine.get(name, [])
        boxes[name] = _boxes_of(name, entries, own, device)
        for rank, layout, _ in entries:
            run = boxes[name][layout.box][slice(*layout.run)]
            if run.numel():
                runs.setdefault(rank, []).append((run.view(torch.uint8), any(piece.layout == layout for piece in own)))
    for rank, found in runs.items():
        _receive(found, rank, world)
    for name, entries in parts.items():
        full = torch.empty(entries[0][1].shape, dtype=entries[0][2], device=device)
        for ranges, box in boxes.pop(name).items():
            layout = Layout.of_box(full.shape, ranges)
            layout.put(full, box.view(layout.box_shape))
        yield name, full


def _boxes_of(name: str, entries: list[Part], mine: list[Piece], device: torch.device) -> dict[Box, torch.Tensor]:
    """The boxes of a tensor, filled with what this rank holds."""
    shape, found = entries[0][1].shape, sum(layout.num_elements for _, layout, _ in entries)
    if found != math.prod(shape):
        raise ShapeError(f"ranks own {found} elements of '{name}'", allowed=f"each of its {math.prod(shape)} elements once")
    boxes: dict[Box, torch.Tensor] = {}
    for _, layout, dtype in entries:
        if layout.box not in boxes:
            boxes[layout.box] = torch.empty(math.prod(layout.box_shape), dtype=dtype, device=device)
    for piece in mine:
        if piece.layout.box in boxes:
            boxes[piece.layout.box][slice(*piece.layout.run)] = piece.tensor.reshape(-1)
    return boxes


def _receive(runs: list[Run], rank: int, world: Axis) -> None:
    """Takes runs from the rank that owns them; who holds one too keeps its own, so that copies that differ do not go unseen.

    They travel as bytes, which every backend has, and as one message.
    """
    is_source = rank == world.index
    alone = runs[0][0] if len(runs) == 1 and (is_source or not runs[0][1]) else None
    if alone is not None:
        comm.broadcast(alone, world, source=rank)
        return
    sizes = [run.numel() for run, _ in runs]
    message = torch.cat([run for run, _ in runs]) if is_source else runs[0][0].new_empty(sum(sizes))
    comm.broadcast(message, world, source=rank)
    for (run, is_held), part in zip(runs, message.split(sizes), strict=True):
        if not is_held:
            run.copy_(part)
