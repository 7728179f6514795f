"""What a directory holds can be told without loading it."""

import os

import pytest
from checkpoint_cases import ALONE, some_pieces

from phalanx.checkpoint import inspect, save
from phalanx.errors import CheckpointError


def test_a_summary_counts_what_is_there(tmp_path):
    save(tmp_path / "at", some_pieces(), {}, {}, ALONE, max_file_bytes=64)
    summary = inspect.show(tmp_path / "at")
    assert summary.tensors["layers.0.weight"] == ("F32", (5, 7), 3)
    assert summary.num_elements == 35 + 7 + 1
    assert summary.world == 1
    files = [file for file in (tmp_path / "at").iterdir() if file.name not in ("manifest.json", "COMPLETE")]
    assert (summary.num_files, summary.num_bytes) == (len(files), sum(file.stat().st_size for file in files))


def test_a_listing_tells_the_whole_from_what_is_left(tmp_path):
    for name in ("step-20", "step-10", "best", "step-30", "step-40"):
        save(tmp_path / name, some_pieces(), {"plan": "zero1", "step": 7}, {}, ALONE)
    (tmp_path / "notes").mkdir()
    os.remove(tmp_path / "step-30" / "COMPLETE")
    (tmp_path / "step-40" / "state.json").write_bytes(b"{}")
    (tmp_path / ".step-50.saving-0123abcd").mkdir()
    (tmp_path / ".step-50.saving-0123abcd" / "rank-00000-00000.safetensors").write_bytes(b"123")
    found = {listed.path.name: listed for listed in inspect.listing(tmp_path)}
    assert list(found)[:3] == ["step-20", "step-10", "best"]
    assert sorted(found) == ["best", "step-10", "step-20", "step-30", "step-40", "step-50"]
    assert [name for name, listed in found.items() if listed.fault is None] == ["step-20", "step-10", "best"]
    assert (found["best"].step, found["best"].plan, found["step-50"].step, found["step-50"].num_bytes) == (7, "zero1", 50, 3)
    assert "saving it did not finish" in found["step-30"].fault
    assert "state.json has 2 bytes where" in found["step-40"].fault
    assert "step-50 is incomplete" in found["step-50"].fault
    os.rename(tmp_path / "step-10", tmp_path / ".step-10.old-0123abcd")  # its replacement was killed
    assert {listed.path.name: listed for listed in inspect.listing(tmp_path)}["step-10"].fault is None
    with pytest.raises(CheckpointError, match="there is no folder"):
        inspect.listing(tmp_path / "none")


def test_a_check_names_all_that_is_wrong(tmp_path):
    save(tmp_path / "at", some_pieces(), {"a": 1}, {}, ALONE, max_file_bytes=64)
    assert inspect.check(tmp_path / "at") == []
    for name in ("rank-00000-00000.safetensors", "state.json"):
        content = bytearray((tmp_path / "at" / name).read_bytes())
        content[-2] ^= 1
        (tmp_path / "at" / name).write_bytes(content)
    first, second = inspect.check(tmp_path / "at")
    assert "layers.0.weight" in first
    assert "state.json is damaged" in second
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        inspect.show(tmp_path / "none")
