"""The safetensors files of one checkpoint, and whether what they hold is what was written."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.shard_file import DTYPES, ShardFile
from phalanx.checkpoint.state import decode
from phalanx.errors import DamageError

REMEDY = "an earlier checkpoint"


MAX_OPEN = 32


class Files:
    """Opens files by name, checking their headers, and holds the last few that were used open."""

    def __init__(self, source: Path, saved: Manifest):
        self._source, self._saved = source, saved
        self._open: dict[str, ShardFile] = {}

    def __getitem__(self, name: str) -> ShardFile:
        found = self._open.pop(name, None)
        if found is None:
            if len(self._open) == MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            found = ShardFile(self._source / name, self._saved.files[name].checksum)
        self._open[name] = found  # the last one used comes last
        return found

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_sound(self, name: str, key: str, checksum: int) -> None:
        """Reads all bytes of a tensor. Raises: DamageError where they are not the ones that were written."""
        if self[name].checksum(key) != checksum:
            where = self._source / name
            raise DamageError(f"{key} in {where} is damaged (its checksum differs from the one it was written with)", remedy=REMEDY)

    def read_state(self, name: str) -> dict[str, Any]:
        """The nested values and tensors that were written as `name`. They are small, so always verified."""
        where = self._source / f"{name}.json"
        content = where.read_bytes()
        if zlib.crc32(content) != self._saved.files[where.name].checksum:
            raise DamageError(f"{where} is damaged (its checksum differs from the manifest's)", remedy=REMEDY)
        entry = json.loads(content)
        file, tensors = f"{name}.safetensors", {}
        for key, checksum in entry["checksums"].items():
            self.require_sound(file, key, checksum)
            stored = self[file].tensors[key]
            tensors[key] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
            self[file].read_into(key, 0, tensors[key].reshape(-1))
        return decode(entry["values"], tensors)
