"""Reading text files: the text as it is, or one clear error."""

import pytest

from phalanx.data import read_text
from phalanx.errors import ConfigError


def test_read_text_keeps_the_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGrüße,\r\n世界 🌍\n".encode())
    assert read_text(path) == "Grüße,\r\n世界 🌍\n"
    assert read_text(str(path)) == read_text(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no text \\(0 bytes\\)"),
        (b" \n\t\n", "holds no text \\(4 bytes\\)"),
        (b"abc\xff", "not UTF-8: byte 3 is 0xff"),
        (b"\xef\xbb\xbfabc\xff", "not UTF-8: byte 6 is 0xff"),
        ("Grüße".encode("latin-1"), "not UTF-8: byte 2 is 0xfc.*iconv"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "not a text file: byte 8 is 0"),
    ],
)
def test_read_text_refuses_what_is_no_text(tmp_path, data, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as error:
        read_text(path)
    assert str(path) in str(error.value)


def test_read_text_refuses_missing_files_and_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*missing.txt"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
