"""The tiers: what goes in comes out, budgets are strict, the disk is scratch that leaves nothing behind, links may be slow."""

import os
import time

import pytest
import torch

from phalanx.errors import CapacityError, ConfigError
from phalanx.memory.arena import Arena, Budget
from phalanx.memory.tier import BOUNCE_BYTES, PAGE_BYTES, Disk, Host

CPU = torch.device("cpu")


def tiers(tmp_path, **options):
    return Host(1 << 30, CPU, **options), Disk(1 << 30, tmp_path, **options)


@pytest.mark.parametrize(
    "num_bytes", [1, 8, PAGE_BYTES - 8, PAGE_BYTES, PAGE_BYTES + 24, 3 * PAGE_BYTES + 104, BOUNCE_BYTES + PAGE_BYTES + 16]
)
def test_bytes_come_back_as_they_went(tmp_path, num_bytes):
    data = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    for tier in tiers(tmp_path):
        first, place = tier.room(num_bytes), tier.room(num_bytes)
        tier.write(place, 0, data).wait()
        tier.write(first, 0, torch.zeros_like(data)).wait()
        back = torch.empty_like(data)
        tier.read(place, 0, back).wait()
        assert torch.equal(back, data)
        assert torch.equal(place.bytes[:num_bytes], data), "the mapping shows what was written past the cache"
        place.bytes[:num_bytes].add_(1)
        tier.read(place, 0, back).wait()
        assert torch.equal(back, data + 1), "and what is written through the mapping is read past the cache"
        assert (tier.written_bytes, tier.read_bytes) == (2 * num_bytes, 2 * num_bytes)
        tier.close()


def test_the_disk_leaves_nothing_behind(tmp_path):
    disk = Disk(1 << 20, tmp_path)
    disk.room(PAGE_BYTES)
    assert os.listdir(tmp_path) == [], "the file has no name while it is in use, so nothing can be left"
    with pytest.raises(ConfigError, match="cannot write in"):
        Disk(1 << 20, "/proc/nowhere")


def test_a_full_disk_is_found_before_it_is_written(tmp_path, monkeypatch):
    disk = Disk(1 << 20, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"no room for 4096 bytes more.*No space left"):
        disk.room(100)


def test_a_failing_write_is_told_where_it_is_waited_for(tmp_path, monkeypatch):
    disk = Disk(1 << 20, tmp_path)
    place = disk.room(PAGE_BYTES)

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(CapacityError, match=r"failed at byte 0: Input/output error.*last checkpoint"):
        disk.write(place, 0, torch.zeros(PAGE_BYTES, dtype=torch.uint8)).wait()


def test_budgets_are_strict(tmp_path):
    host = Host(100, CPU)
    host.room(60)
    with pytest.raises(CapacityError, match="110 bytes are needed of the host tier, whose budget is 100"):
        host.room(50)
    host.room(40)
    assert (host.budget.used, host.budget.peak) == (100, 100)
    with pytest.raises(CapacityError, match="disk tier"):
        Disk(PAGE_BYTES, tmp_path).room(PAGE_BYTES + 1)


def test_an_arena_counts_what_comes_and_goes_and_what_is_kept_for_others():
    arena = Arena(Budget("device", 100), CPU)
    flat = arena.hollow(10, torch.float64)
    assert flat.untyped_storage().nbytes() == 0
    arena.fill(flat)
    view = flat[2:4]
    arena.empty(flat)
    arena.fill(flat)
    flat.fill_(3.0)
    assert view.tolist() == [3.0, 3.0], "a view stays a view"
    with pytest.raises(CapacityError, match="104 bytes"):
        arena.new(6, torch.float32)
    with pytest.raises(CapacityError, match="101 bytes"):
        arena.budget.reserve(21)
    arena.budget.reserve(20)
    assert (arena.budget.used, arena.budget.peak, arena.budget.free) == (80, 100, 0)
    arena.empty(flat)
    arena.empty(flat)
    assert arena.budget.used == 0


def test_a_slow_link_runs_beside_the_work(tmp_path):
    for tier in tiers(tmp_path, bytes_per_s=1e6):
        place, data = tier.room(50_000), torch.ones(50_000, dtype=torch.uint8)
        begin = time.perf_counter()
        copy = tier.write(place, 0, data)
        assert time.perf_counter() - begin < 0.04
        copy.wait()
        assert time.perf_counter() - begin >= 0.05


def test_half_precision_is_cast_on_the_way():
    host = Host(1000, CPU)
    source, out = torch.tensor([1.0, 2.5, -3.0]), torch.empty(3, dtype=torch.bfloat16)
    host.raise_up(source, out).wait()
    assert torch.equal(out, source.bfloat16())
    assert host.read_bytes == 6
