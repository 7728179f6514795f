"""Saving: every rank writes what it owns, beside the place where the checkpoint will stand."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.checkpoint import directory, disk, shard_file
from phalanx.checkpoint import manifest as manifests
from phalanx.checkpoint.agree import Gather, gathered, require_all_ranks, together
from phalanx.checkpoint.manifest import MANIFEST, STATE, Manifest, SavedFile, SavedPiece, SavedTensor, local_name, part_name
from phalanx.checkpoint.shard_file import Item
from phalanx.checkpoint.state import decode, encode
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import CheckpointError
from phalanx.layout import Layout, Piece

MAX_FILE_BYTES = 512 << 20


@dataclass(frozen=True)
class Share:
    """What one rank gives to a checkpoint; `state` is the same on all ranks."""

    pieces: list[Piece]
    state: dict[str, Any]
    local_state: dict[str, Any]

    def staged(self) -> Share:
        """A copy on the host of all that this rank writes; the original may then change. Cost: the bytes of the owned pieces."""
        pieces = [replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True)) if piece.owned else piece for piece in self.pieces]
        return Share(pieces, _copied(self.state, "state"), _copied(self.local_state, "local_state"))


def _copied(values: dict[str, Any], where: str) -> dict[str, Any]:
    encoded, tensors = encode(values, where)
    return decode(encoded, {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()})


def save(
    path: str | os.PathLike,
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    local_state: Mapping[str, Any],
    axis: Axis,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a checkpoint directory, collectively: all ranks of `axis` call it with the same `path` and the same `state`.

    `pieces` are this rank's tensors, of which it writes the owned ones. `state` is what all ranks share, `local_state` what is
    this rank's own; both are nested plain values and tensors. A checkpoint already at `path` is replaced once the new one is
    complete, and the directory belongs to it: other files in there go with it.

    Cost: extra memory of one block of 1 MiB per rank (and a copy of one tensor where pieces are not contiguous). Files on disk
    hold at most `max_file_bytes` of data each; larger pieces are cut.
    Raises: CheckpointError on all ranks, with what stood at `path` still there, if anything fails on one of them;
    CommError on all ranks if only the first one calls.
    """
    require_all_ranks(axis, "save")
    token = gathered(axis, lambda: (None, new_token()))[1][0]
    write(directory.resolve(path), token, Share(list(pieces), dict(state), dict(local_state)), axis, max_file_bytes)


def new_token() -> str:
    """What tells the directories of one save from those of another; the first rank's counts."""
    return secrets.token_hex(4)


def write(
    target: Path,
    token: str,
    share: Share,
    axis: Axis,
    max_file_bytes: int = MAX_FILE_BYTES,
    gather: Gather = comm.gather_objects,
) -> None:
    """Writes what all ranks give; they meet by `gather`."""
    growing = directory.beside(target, "saving", token)
    try:
        together(axis, lambda: _begin(target, token, axis), gather)
        _, digests = gathered(axis, lambda: (None, _write_part(growing, share, axis, max_file_bytes)), gather)
        _require_same_state(digests)
        together(axis, lambda: _finish(growing, target, token, axis), gather)
    except CheckpointError:
        if axis.index == 0:
            directory.abandon(target, token)
        raise


def _begin(target: Path, token: str, axis: Axis) -> None:
    if axis.index == 0:
        directory.begin(target, token)


def _write_part(growing: Path, share: Share, axis: Axis, max_file_bytes: int) -> dict[str, int]:
    """Writes this rank's files and the list of them; returns a digest of each entry of `state`, to compare."""
    if not growing.is_dir():
        raise CheckpointError(f"{growing.parent} is not on a file system that all ranks share", remedy="a shared directory")
    part = Manifest(world=axis.size)
    for piece in share.pieces:
        _require_fit(piece)
        # Also pieces that others own are listed, so that a tensor which nobody owns is noticed now and not when it is needed.
        part.tensors.setdefault(piece.name, SavedTensor(shard_file.dtype_name(piece.tensor, piece.name), piece.layout.shape))
    for number, group in enumerate(_group(share.pieces, max_file_bytes)):
        _write_shard(growing, f"rank-{axis.index:05d}-{number:05d}.safetensors", group, part)
    if axis.index == 0:
        _write_state(growing, STATE, share.state, part)
    _write_state(growing, local_name(axis.index), share.local_state, part)
    disk.write_file(growing / part_name(axis.index), part.to_json())
    disk.flush_directory(growing)
    return _digests(share.state)


def _require_fit(piece: Piece) -> None:
    """Raises: CheckpointError where a piece does not hold what its layout says."""
    if piece.tensor.numel() != piece.layout.num_elements:
        raise CheckpointError(f"{piece.name} has {piece.tensor.numel()} elements here where its layout has {piece.layout.num_elements}")


def _group(pieces: list[Piece], max_file_bytes: int) -> Iterable[list[tuple[str, Layout, Item]]]:
    """Yields what goes into one file after the other, pieces that are too large cut into runs."""
    group: list[tuple[str, Layout, Item]] = []
    used = 0
    keys: set[str] = set()
    for piece in pieces:
        for start, stop in _cuts(piece, max_file_bytes):
            num_bytes = (stop - start) * piece.tensor.element_size()
            if group and used + num_bytes > max_file_bytes:
                yield group
                group, used, keys = [], 0, set()
            key = piece.name if piece.name not in keys else f"{piece.name}#{len(group)}"
            layout = piece.layout.with_run(piece.layout.run[0] + start, piece.layout.run[0] + stop)
            whole_box = layout.run == Layout.whole(layout.box_shape).run
            shape = layout.box_shape if whole_box else (stop - start,)
            group.append((piece.name, layout, Item(key, piece.tensor, shape, start, stop)))
            keys.add(key)
            used += num_bytes
    if group:
        yield group


def _cuts(piece: Piece, max_file_bytes: int) -> Iterable[tuple[int, int]]:
    """The ranges of a piece's elements that fit into a file; none if another rank writes it or there is nothing to write."""
    count = piece.tensor.numel()
    if not piece.owned or (not count and Layout.whole(piece.layout.shape).num_elements):
        return
    step = max(1, max_file_bytes // piece.tensor.element_size())
    for start in range(0, max(count, 1), step):
        yield start, min(start + step, count)


def _write_shard(growing: Path, file: str, group: list[tuple[str, Layout, Item]], part: Manifest) -> None:
    written = shard_file.write(growing / file, [item for _, _, item in group])
    part.files[file] = SavedFile(written.num_bytes, written.header_checksum)
    for name, layout, item in group:
        part.tensors[name].pieces.append(SavedPiece(layout, file, item.key, written.checksums[item.key]))


def _write_state(growing: Path, name: str, values: dict[str, Any], part: Manifest) -> None:
    """Writes nested values as `name`.json and their tensors, whose checksums the former holds, as `name`.safetensors."""
    encoded, tensors = encode(values, name)
    checksums: dict[str, int] = {}
    if tensors:
        written = shard_file.write(growing / f"{name}.safetensors", [Item.whole(key, tensor) for key, tensor in tensors.items()])
        part.files[f"{name}.safetensors"] = SavedFile(written.num_bytes, written.header_checksum)
        checksums = written.checksums
    content = json.dumps({"values": encoded, "checksums": checksums}).encode()
    disk.write_file(growing / f"{name}.json", content)
    part.files[f"{name}.json"] = SavedFile(len(content), zlib.crc32(content))


def _digests(state: Mapping[str, Any]) -> dict[str, int]:
    """A checksum of each entry of the state, by which ranks compare theirs."""
    digests = {}
    for key, value in state.items():
        encoded, tensors = encode(value, f"state[{key!r}]")
        digest = zlib.crc32(json.dumps(encoded).encode())
        for tensor in tensors.values():
            for block in Item.whole(key, tensor).blocks():
                digest = zlib.crc32(block, digest)
        digests[key] = digest
    return digests


def _require_same_state(digests: list[dict[str, int]]) -> None:
    """Raises: CheckpointError where ranks gave different `state`: only one of them would have come back."""
    for index, other in enumerate(digests):
        if other != digests[0]:
            keys = sorted(str(key) for key in digests[0].keys() | other.keys() if digests[0].get(key) != other.get(key))
            found = f"state differs between rank 0 and rank {index} in {', '.join(keys)}"
            raise CheckpointError(found, remedy="put what belongs to one rank into local_state")


def _finish(growing: Path, target: Path, token: str, axis: Axis) -> None:
    """On the first rank: gathers the parts into the manifest and puts the directory in its place."""
    if axis.index:
        return
    whole = Manifest(world=axis.size)
    for index in range(axis.size):
        part = growing / part_name(index)
        whole.add(Manifest.from_json(part.read_bytes(), part))
        part.unlink()
    whole.require_whole()
    encoded = whole.to_json()
    disk.write_file(growing / MANIFEST, encoded)
    disk.flush_directory(growing)
    directory.finish(growing, target, token, manifests.marker(encoded))
