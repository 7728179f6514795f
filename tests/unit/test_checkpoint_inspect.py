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


def test_complete_checkpoints_are_listed_by_the_time_they_were_saved(tmp_path):
    for name in ("step-20", "step-10", "step-30"):
        save(tmp_path / name, some_pieces(), {}, {}, ALONE)
    (tmp_path / "notes").mkdir()
    os.remove(tmp_path / "step-30" / "COMPLETE")
    assert [summary.path.name for summary in inspect.checkpoints(tmp_path)] == ["step-20", "step-10"]
    os.rename(tmp_path / "step-10", tmp_path / ".step-10.old-0123abcd")  # its replacement was killed
    assert [summary.path.name for summary in inspect.checkpoints(tmp_path)] == ["step-20", "step-10"]
    with pytest.raises(CheckpointError, match="there is no directory"):
        inspect.checkpoints(tmp_path / "none")


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
