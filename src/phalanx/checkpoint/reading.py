"""Loading: every rank fills its pieces from whatever layout was saved, after all ranks have found the checkpoint to be sound."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.checkpoint import directory, manifest, spans
from phalanx.checkpoint.agree import gathered, require_all_ranks, together
from phalanx.checkpoint.files import Files
from phalanx.checkpoint.filling import Target, fill, overlaps
from phalanx.checkpoint.manifest import STATE, Manifest, SavedPiece, SavedTensor, local_name
from phalanx.checkpoint.names import with_nearest
from phalanx.checkpoint.shard_file import DTYPE_NAMES, DTYPES
from phalanx.cluster.mesh import Axis
from phalanx.errors import CheckpointError
from phalanx.layout import Piece
from phalanx.log import get_logger


def load(
    path: str | os.PathLike,
    pieces: Iterable[Piece],
    axis: Axis,
    strict: bool = True,
    *,
    verify: bool = True,
    cast: bool = False,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fills the pieces in place from a checkpoint that was saved under any layout, collectively over `axis`.

    Returns `state`, and this rank's `local_state`, which is None if the checkpoint was saved by another number of ranks. With
    `strict`, the names wanted by all ranks together and the names saved must be the same; without, pieces that were not saved
    keep their values. With `cast`, a saved dtype is converted to the piece's. A checkpoint whose replacement was cut off by a
    kill is found where it was moved aside.

    Cost: `verify` reads each byte that any rank wants once more, shared out among the ranks, before the first piece changes;
    filling reads the windows of 4 MiB that hold this rank's elements. Extra memory is one window.
    Raises: CheckpointError on all ranks, before any piece is changed, if the checkpoint is missing, incomplete, foreign, damaged,
    from a newer format, or does not fit the pieces; CommError on all ranks if only the first one calls.
    """
    require_all_ranks(axis, "load")
    target = directory.resolve(path)
    plan, masks = gathered(axis, lambda: _plan(target, list(pieces), strict, cast))
    wanted = _wanted_names(plan.saved, masks)
    together(axis, lambda: _require_all_wanted(plan, wanted, strict))
    if verify:
        together(axis, lambda: _verify_share(plan, wanted, axis))
    state, local_state = together(axis, lambda: _read_states(plan, axis))
    together(axis, lambda: _fill_all(plan))
    if plan.source != target and axis.index == 0:
        get_logger().warning("%s was being replaced when its writer was killed; loaded the one before it from %s", target, plan.source)
    return state, local_state


@dataclass
class _Plan:
    """What this rank reads: for each target, the saved pieces and which of their elements."""

    source: Path
    saved: Manifest
    reads: list[tuple[Piece, list[tuple[SavedPiece, np.ndarray]]]] = field(default_factory=list)


def _plan(target: Path, wanted: list[Piece], strict: bool, cast: bool) -> tuple[_Plan, bytes]:
    """Checks this rank's pieces against the manifest; also returns one bit per saved name, set if it is wanted here."""
    source = directory.find(target)
    plan = _Plan(source, manifest.read(source))
    saved = plan.saved.tensors
    missing = sorted({piece.name for piece in wanted if piece.name not in saved})
    if missing and strict:
        remedy = "strict=False, which leaves them as they are"
        raise CheckpointError(f"{source} does not hold {with_nearest(missing, list(saved))}", remedy=remedy)
    for piece in wanted:
        if piece.name in saved:
            plan.reads.append((piece, _match(piece, saved[piece.name], cast)))
    names = {piece.name for piece in wanted}
    return plan, np.packbits(np.array([name in names for name in saved], dtype=bool)).tobytes()


def _match(piece: Piece, saved: SavedTensor, cast: bool) -> list[tuple[SavedPiece, np.ndarray]]:
    """The saved pieces that fill a wanted one.

    Raises: CheckpointError where shapes or dtypes differ, or where they do not cover it exactly once.
    """
    if piece.layout.shape != saved.shape:
        raise CheckpointError(f"{piece.name} was saved with shape {saved.shape} and is wanted with shape {piece.layout.shape}")
    if piece.tensor.numel() != piece.layout.num_elements:
        raise CheckpointError(f"{piece.name} has {piece.tensor.numel()} elements here where its layout has {piece.layout.num_elements}")
    if DTYPE_NAMES.get(piece.tensor.dtype) != saved.dtype and not cast:
        dtype = DTYPE_NAMES.get(piece.tensor.dtype, piece.tensor.dtype)
        raise CheckpointError(f"{piece.name} was saved as {saved.dtype} and is wanted as {dtype}", remedy="cast=True, which converts")
    found = [(saved.pieces[index], overlap) for index, overlap in overlaps(piece.layout, [part.layout for part in saved.pieces])]
    rows = np.concatenate([np.zeros((0, 3), dtype=np.int64), *(overlap for _, overlap in found)])
    if not spans.tiles(rows[:, 0], rows[:, 2], piece.layout.num_elements):
        raise CheckpointError(f"the checkpoint does not hold each of the {piece.layout.num_elements} wanted elements of {piece.name} once")
    return found


def _wanted_names(saved: Manifest, masks: list[bytes]) -> set[str]:
    """The saved names that at least one rank wants."""
    bits = [np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=len(saved.tensors)) for mask in masks]
    return {name for name, wanted in zip(saved.tensors, np.bitwise_or.reduce(bits)) if wanted}


def _require_all_wanted(plan: _Plan, wanted: set[str], strict: bool) -> None:
    extra = sorted(plan.saved.tensors.keys() - wanted)
    if extra and strict:
        remedy = "strict=False, which leaves them out"
        raise CheckpointError(f"{plan.source} holds what no rank wants: {with_nearest(extra, sorted(wanted))}", remedy=remedy)


def _verify_share(plan: _Plan, wanted: set[str], axis: Axis) -> None:
    """Checks this rank's share of the wanted bytes: all ranks together read each of them once for this."""
    every = []
    for name in wanted:
        saved = plan.saved.tensors[name]
        every += [(part.file, part.key, part.checksum, part.layout.num_elements * DTYPES[saved.dtype].itemsize) for part in saved.pieces]
    every.sort()
    before, total = 0, sum(num_bytes for *_, num_bytes in every)
    with Files(plan.source, plan.saved) as files:
        for file, key, checksum, num_bytes in every:
            if min(before * axis.size // max(total, 1), axis.size - 1) == axis.index:
                files.require_sound(file, key, checksum)
            before += num_bytes


def _read_states(plan: _Plan, axis: Axis) -> tuple[dict[str, Any], dict[str, Any] | None]:
    with Files(plan.source, plan.saved) as files:
        local_state = files.read_state(local_name(axis.index)) if plan.saved.world == axis.size else None
        return files.read_state(STATE), local_state


def _fill_all(plan: _Plan) -> None:
    with Files(plan.source, plan.saved) as files:
        for piece, parts in plan.reads:
            target = Target(piece.tensor)
            for part, overlap in parts:
                fill(target.flat, files[part.file], part.key, overlap)
            target.close()
