"""Reads and writes safetensors files tensor by tensor, in blocks, with a checksum of everything that is written.

The safetensors library writes a whole file from tensors that are all in memory and reads through a memory map; a checkpoint
needs neither. The files are ordinary: any safetensors reader opens them, byte for byte what the library would have written.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from phalanx.checkpoint import disk
from phalanx.errors import CheckpointError, DamageError

BLOCK_BYTES = 1 << 20  # stays in the processor cache between checksum and write
MAX_HEADER_BYTES = 100 << 20  # the safetensors library refuses more
METADATA = "__metadata__"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Files are ordered by this and then by name, as the library does: wide types first keep every tensor aligned.
_ORDER = ["U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"]


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    """The name of a tensor's dtype in safetensors files.

    Raises: CheckpointError where files have no such dtype or the tensor is not a plain one with data.
    """
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{where} has dtype {tensor.dtype}, which safetensors files do not have", allowed=", ".join(map(str, DTYPE_NAMES))
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"{where} is not a plain tensor with data ({tensor.device}, {tensor.layout})", remedy="materialize it before saving"
        )
    return DTYPE_NAMES[tensor.dtype]


@dataclass(frozen=True)
class Item:
    """Elements start to stop of a flattened tensor, to be stored under `key` with `shape`."""

    key: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor) -> Item:
        return cls(key, tensor, tuple(tensor.shape), 0, tensor.numel())

    @property
    def dtype(self) -> str:
        return dtype_name(self.tensor, self.key)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.tensor.element_size()

    def blocks(self) -> Iterator[memoryview]:
        """Yields the bytes in blocks. Cost: nothing for contiguous tensors on the host, else one block, or a copy of a strided tensor."""
        flat = self.tensor.detach().reshape(-1)
        step = max(1, BLOCK_BYTES // flat.element_size())
        for first in range(self.start, self.stop, step):
            yield as_bytes(flat[first : min(first + step, self.stop)].cpu())


class Source(Protocol):
    """What becomes one tensor of a file: its key, its dtype's name, its shape, and its bytes in blocks."""

    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def blocks(self) -> Iterator[memoryview]: ...


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous one-dimensional tensor on the host, shared."""
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Written:
    """What a finished file is known by: its size, the checksum of its header, and one checksum per tensor."""

    num_bytes: int
    header_checksum: int
    checksums: dict[str, int]


def write(path: Path, items: Sequence[Source], metadata: Mapping[str, str] | None = None) -> Written:
    """Writes one safetensors file and flushes it. Cost: extra memory of one block."""
    items = sorted(items, key=lambda item: (_ORDER.index(item.dtype), item.key))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for item in items:
        end = offset + item.num_bytes
        header[item.key] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    encoded = len(encoded).to_bytes(8, "little") + encoded
    checksums = {}
    with open(path, "wb", buffering=0) as file:
        disk.write_all(file, encoded)
        for item in items:
            checksum = 0
            for block in item.blocks():
                checksum = zlib.crc32(block, checksum)
                disk.write_all(file, block)
            checksums[item.key] = checksum
        disk.flush(file)
    return Written(len(encoded) + offset, zlib.crc32(encoded), checksums)


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its dtype name, shape, and the bytes start to stop of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class ShardFile:
    """An open safetensors file whose tensors are read by ranges of bytes, without a memory map.

    Raises: DamageError where the file is missing, cut short or not a safetensors file.
    """

    def __init__(self, path: Path, header_checksum: int | None = None):
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - held open for the life of the object
        except OSError as error:
            raise DamageError(f"{path} cannot be read ({error.strerror})") from error
        try:
            self.metadata, self.tensors = self._read_header(header_checksum)
        except BaseException:
            self.close()
            raise

    def _read_header(self, checksum: int | None) -> tuple[dict[str, str], dict[str, Stored]]:
        total = os.fstat(self._file.fileno()).st_size
        start = self._file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(total - 8, MAX_HEADER_BYTES):
            raise DamageError(f"{self.path} is cut short or not a safetensors file ({total} bytes)")
        encoded = self._file.read(length)
        if checksum is not None and zlib.crc32(encoded, zlib.crc32(start)) != checksum:
            raise DamageError(f"the header of {self.path} is damaged (its checksum differs from the manifest's)")
        try:
            header = json.loads(encoded)
            metadata = header.pop(METADATA, {})
            tensors = {key: _stored(entry, 8 + length) for key, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamageError(f"{self.path} is not a safetensors file (its header cannot be read: {error})") from error
        end = max((entry.stop for entry in tensors.values()), default=8 + length)
        if end != total:
            raise DamageError(f"{self.path} has {total} bytes where its header needs {end}", remedy="an undamaged copy of the file")
        return metadata, tensors

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fills the contiguous host tensor `out` from byte `start` of a tensor on."""
        view, position = as_bytes(out), self.tensors[key].start + start
        while view.nbytes:
            try:
                count = os.preadv(self._file.fileno(), [view], position)
            except OSError as error:
                raise DamageError(f"{self.path} cannot be read ({error.strerror})", remedy="an undamaged copy of the file") from error
            if not count:
                raise DamageError(f"{self.path} ends inside {key!r}")
            view, position = view[count:], position + count

    def checksum(self, key: str) -> int:
        """The checksum of a tensor's bytes as they are on disk now. Cost: reads all of them."""
        stored = self.tensors[key]
        staging = torch.empty(min(BLOCK_BYTES, stored.stop - stored.start), dtype=torch.uint8)
        checksum = 0
        for position in range(0, stored.stop - stored.start, BLOCK_BYTES):
            block = staging[: min(BLOCK_BYTES, stored.stop - stored.start - position)]
            self.read_into(key, position, block)
            checksum = zlib.crc32(as_bytes(block), checksum)
        return checksum

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stored(entry: Mapping, data_start: int) -> Stored:
    """One entry of a header, checked against itself."""
    start, stop = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    count = 1
    for size in shape:
        count *= size
    if not 0 <= start <= stop:
        raise ValueError(f"bytes {start} to {stop}")
    if dtype in DTYPES and stop - start != count * DTYPES[dtype].itemsize:
        raise ValueError(f"{count} elements of {dtype} in {stop - start} bytes")
    return Stored(dtype, shape, data_start + start, data_start + stop)
