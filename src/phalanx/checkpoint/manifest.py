"""What is in a checkpoint and where: one JSON file that names every tensor by its logical name and every part of it by its slice."""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.checkpoint import spans
from phalanx.checkpoint.disk import MARKER
from phalanx.errors import CheckpointError, DamageError
from phalanx.layout import Layout

FORMAT = "phalanx-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
STATE = "state"


def local_name(index: int) -> str:
    """The files, without extension, that hold what rank `index` alone knows."""
    return f"local-{index:05d}"


def part_name(index: int) -> str:
    """The file in which rank `index` lists what it wrote, until the manifest takes it in."""
    return f"part-{index:05d}.json"


def is_ours(name: str) -> bool:
    """Whether a file of that name is written by saving and by nobody else."""
    return bool(_OURS.fullmatch(name))


_OURS = re.compile(rf"rank-\d{{5}}-\d{{5}}\.safetensors|local-\d{{5}}\.\w+|part-\d{{5}}\.json|{STATE}\.\w+|{MANIFEST}|\.?{MARKER}")


@dataclass(frozen=True)
class SavedPiece:
    """One part of a tensor: its layout, and the file, key and checksum of its bytes."""

    layout: Layout
    file: str
    key: str
    checksum: int


@dataclass
class SavedTensor:
    """A logical tensor: the dtype's name in safetensors files, the logical shape, and the parts that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[SavedPiece] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        return Layout.whole(self.shape).num_elements


@dataclass(frozen=True)
class SavedFile:
    """A file's size, and a checksum: of the header for safetensors files (their tensors have their own), else of the whole file."""

    num_bytes: int
    checksum: int


@dataclass
class Manifest:
    """Everything that a rank must know to load: tensors by name, files by name, the world that saved, and when."""

    world: int
    phalanx: str = field(default_factory=lambda: importlib.metadata.version("phalanx"))
    saved_at_s: float = field(default_factory=time.time)
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The manifest as it is written. Cost: about 150 bytes for each saved piece."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "phalanx": self.phalanx,
            "saved_at_s": self.saved_at_s,
            "world": self.world,
            "tensors": {name: _tensor_to_json(tensor) for name, tensor in self.tensors.items()},
            "files": {name: {"bytes": file.num_bytes, "checksum": file.checksum} for name, file in self.files.items()},
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, encoded: bytes, where: Path) -> Manifest:
        """Reads a manifest. Raises: CheckpointError where it is not one or comes from a newer Phalanx."""
        try:
            content = json.loads(encoded)
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}")
            if content["version"] > VERSION:
                found = f"{where} was written in format {content['version']} by Phalanx {content['phalanx']}"
                raise CheckpointError(found, allowed=f"formats up to {VERSION}", remedy=f"Phalanx {content['phalanx']} or newer")
            return cls(
                world=content["world"],
                phalanx=content["phalanx"],
                saved_at_s=content["saved_at_s"],
                tensors={name: _tensor_from_json(entry) for name, entry in content["tensors"].items()},
                files={name: SavedFile(entry["bytes"], entry["checksum"]) for name, entry in content["files"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is not the manifest of a Phalanx checkpoint ({error!r})") from error

    def add(self, other: Manifest) -> None:
        """Takes in what another rank wrote. Raises: CheckpointError where ranks disagree about a tensor."""
        self.files.update(other.files)
        for name, tensor in other.tensors.items():
            mine = self.tensors.setdefault(name, SavedTensor(tensor.dtype, tensor.shape))
            if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(f"{name} is {mine.dtype} {mine.shape} on one rank and {tensor.dtype} {tensor.shape} on another")
            mine.pieces.extend(tensor.pieces)

    def require_whole(self) -> None:
        """Raises: CheckpointError where the parts of a tensor do not make up the tensor, so that it could not be loaded."""
        wrong = []
        for name, tensor in self.tensors.items():
            rows = np.concatenate([np.zeros((0, 3), dtype=np.int64), *(spans.table(piece.layout) for piece in tensor.pieces)])
            if not spans.tiles(rows[:, 1], rows[:, 2], tensor.num_elements):
                wrong.append(f"{name} ({rows[:, 2].sum()} of {tensor.num_elements} elements)")
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"the owned pieces of all ranks do not make up whole tensors: {', '.join(wrong[:5])}{more}",
                allowed="each element owned by exactly one rank",
            )


def marker(encoded_manifest: bytes) -> bytes:
    """What the marker of a finished checkpoint holds: the size and checksum of its manifest."""
    return json.dumps({"manifest_bytes": len(encoded_manifest), "manifest_checksum": zlib.crc32(encoded_manifest)}).encode()


def read(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint, with the sizes of all its files checked.

    Cost: reads the manifest and the size of each file, no data.
    Raises: DamageError where the directory is incomplete or damaged, CheckpointError where it is missing or foreign.
    """
    try:
        encoded = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise _why_none(directory) from error
    try:
        expected = (directory / MARKER).read_bytes()
    except OSError as error:
        raise DamageError(f"{directory} is incomplete: saving it did not finish", remedy="an earlier checkpoint") from error
    if marker(encoded) != expected:
        raise DamageError(f"{directory / MANIFEST} is damaged (its checksum differs from {MARKER}'s)", remedy="an earlier checkpoint")
    manifest = Manifest.from_json(encoded, directory / MANIFEST)
    for name, file in manifest.files.items():
        if Path(name).name != name:
            raise DamageError(f"{directory / MANIFEST} names a file elsewhere ({name})")
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise DamageError(f"{directory / name} is missing", remedy="an earlier checkpoint") from error
        if found != file.num_bytes:
            raise DamageError(f"{directory / name} has {found} bytes where {file.num_bytes} were written", remedy="an earlier checkpoint")
    return manifest


def _why_none(directory: Path) -> CheckpointError:
    """What is there instead of a checkpoint."""
    if not directory.exists():
        return CheckpointError(f"there is no checkpoint {directory}")
    if not directory.is_dir():
        return CheckpointError(f"{directory} is a file, not a checkpoint directory")
    names = sorted(entry.name for entry in directory.iterdir())
    if (directory / MARKER).exists():
        return DamageError(f"{directory / MANIFEST} is missing", remedy="an earlier checkpoint")
    if any(is_ours(name) for name in names):
        return DamageError(f"{directory} is incomplete: saving it did not finish", remedy="an earlier checkpoint")
    return CheckpointError(f"{directory} is not a Phalanx checkpoint (it holds {', '.join(names[:4]) or 'nothing'})")


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    pieces = [
        {"box": piece.layout.box, "run": piece.layout.run, "file": piece.file, "key": piece.key, "checksum": piece.checksum}
        for piece in tensor.pieces
    ]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "pieces": pieces}


def _tensor_from_json(entry: dict[str, Any]) -> SavedTensor:
    shape = tuple(entry["shape"])
    pieces = [
        SavedPiece(
            Layout(shape, piece["box"], (piece["run"][0], piece["run"][1])),
            piece["file"],
            piece["key"],
            piece["checksum"],
        )
        for piece in entry["pieces"]
    ]
    return SavedTensor(entry["dtype"], shape, pieces)
