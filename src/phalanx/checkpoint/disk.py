"""The few ways in which a checkpoint changes the disk: each flushes what it did, so the order on disk is the order in the program."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

MARKER = "COMPLETE"


def write_all(file: BinaryIO, view: memoryview | bytes) -> None:
    """Writes the whole of `view` to an unbuffered file."""
    view = memoryview(view)
    while view.nbytes:
        view = view[file.write(view) :]


def write_file(path: Path, content: bytes) -> None:
    """Creates a file with this content and flushes it to the device."""
    with open(path, "wb", buffering=0) as file:
        write_all(file, content)
        flush(file)


def flush(file: BinaryIO) -> None:
    """Waits until the content of an open file is on the device."""
    os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Waits until the names in a directory are on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a directory, with its parents."""
    path.mkdir(parents=True)
    flush_directory(path.parent)


def rename(source: Path, target: Path) -> None:
    """Renames within one directory, atomically."""
    os.rename(source, target)
    flush_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Deletes a checkpoint directory, its marker first: killed half-way, what is left does not pass for complete."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)
