"""Reading a text file, or saying what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.errors import ConfigError


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, line ends as they are, without a byte order mark.

    Raises: ConfigError where the file is missing, unreadable, empty, binary, or not UTF-8 (with the place of the first wrong byte).
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path} (looked for {Path(path).absolute()})", remedy="the path of a text file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", allowed="a readable text file") from None
    if b"\0" in data:
        raise ConfigError(f"{path} is not a text file: byte {data.index(0)} is 0", allowed="text in UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # A byte order mark is cut off before the position is counted.
        place = error.start + 3 * data.startswith(b"\xef\xbb\xbf")
        raise ConfigError(
            f"{path} is not UTF-8: byte {place} is 0x{data[place]:02x}",
            allowed="text in UTF-8",
            remedy=f"iconv -f LATIN1 -t UTF-8 {path}, if it is Latin-1",
        ) from None
    if not text.strip():
        raise ConfigError(f"{path} holds no text ({len(data)} bytes)", remedy="a file with some text in it")
    return text
