"""Saving and loading take the memory of a block, not of a copy of what is saved."""

import re
from pathlib import Path

import pytest
import torch
from checkpoint_cases import ALONE
from freed_memory import give_back_freed_memory

from phalanx.checkpoint import disk, load, save
from phalanx.checkpoint.shard_file import ShardFile
from phalanx.layout import Layout, Piece

TENSOR_BYTES, NUM_TENSORS = 48 << 20, 2
STATUS = Path("/proc/self/status")


def memory_at_start() -> int:
    give_back_freed_memory()
    return own_memory_bytes()


def own_memory_bytes() -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())[1]) * 1024


@pytest.fixture
def peak(monkeypatch):
    """The memory in use after each write and read."""
    seen: list[int] = []

    def watched(step):
        def watching(*arguments):
            step(*arguments)
            seen.append(own_memory_bytes())

        return watching

    monkeypatch.setattr(disk, "write_all", watched(disk.write_all))
    monkeypatch.setattr(ShardFile, "read_into", watched(ShardFile.read_into))
    return seen


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_saving_and_loading_need_one_block(tmp_path, peak):
    count = TENSOR_BYTES // 4
    pieces = [Piece(f"w{index}", torch.ones(1024, count // 1024), Layout.whole((1024, count // 1024))) for index in range(NUM_TENSORS)]
    before = memory_at_start()
    save(tmp_path / "at", pieces, {}, {}, ALONE)
    assert max(peak) - before < TENSOR_BYTES // 2
    columns = Layout((1024, count // 1024), ((0, 1024), (100, 1100)), (0, 1024 * 1000))
    wanted = [Piece(piece.name, torch.full((1024 * 1000,), 2.0), columns) for piece in pieces]
    peak.clear()
    before = memory_at_start()
    load(tmp_path / "at", wanted, ALONE)
    assert max(peak) - before < TENSOR_BYTES // 2
    assert all((piece.tensor == 1).all() for piece in wanted)


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_a_copy_would_be_noticed(tmp_path, peak):
    pieces = [Piece("w", torch.ones(TENSOR_BYTES // 4096, 1024).T, Layout.whole((1024, TENSOR_BYTES // 4096)))]
    before = memory_at_start()
    save(tmp_path / "at", pieces, {}, {}, ALONE)
    assert max(peak) - before > TENSOR_BYTES // 2
