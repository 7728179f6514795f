"""Whole logical tensors from the pieces that ranks own, whatever cut them: one tensor at a time, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ShapeError
from phalanx.layout import Box, Layout, Piece

Part = tuple[int, Layout, torch.dtype]


def assemble(pieces: Iterable[Piece], world: Axis, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of everything that some rank owns a piece of. Collective: every rank goes through all of them.

    Cost: one full tensor at a time; each byte travels once to every rank.
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
    for name, entries in parts.items():
        yield name, _assemble_one(name, entries, mine.get(name, []), world, device)


def _assemble_one(name: str, entries: list[Part], mine: list[Piece], world: Axis, device: torch.device) -> torch.Tensor:
    """One tensor: runs make up boxes, boxes make up the tensor. What this rank holds itself is shown as it holds it."""
    shape, found = entries[0][1].shape, sum(layout.num_elements for _, layout, _ in entries)
    if found != math.prod(shape):
        raise ShapeError(f"ranks own {found} elements of '{name}'", allowed=f"each of its {math.prod(shape)} elements once")
    full = torch.empty(shape, dtype=entries[0][2], device=device)
    boxes: dict[Box, torch.Tensor] = {}
    for _, layout, dtype in entries:
        boxes.setdefault(layout.box, torch.empty(math.prod(layout.box_shape), dtype=dtype, device=device))
    for piece in mine:
        if piece.layout.box in boxes:
            boxes[piece.layout.box][slice(*piece.layout.run)] = piece.tensor.reshape(-1)
    for rank, layout, _ in entries:
        run = boxes[layout.box][slice(*layout.run)]
        if run.numel():
            _receive(run, any(piece.layout == layout for piece in mine), rank, world)
    for ranges, box in boxes.items():
        layout = Layout.of_box(full.shape, ranges)
        layout.put(full, box.view(layout.box_shape))
    return full


def _receive(run: torch.Tensor, is_held: bool, rank: int, world: Axis) -> None:
    """Takes a run from the rank that owns it; who holds it too keeps its own, so that copies that differ do not go unseen."""
    target = run if rank == world.index or not is_held else torch.empty_like(run)
    comm.broadcast(target.view(torch.uint8), world, source=rank)  # as bytes, which every backend has
