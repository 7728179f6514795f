"""Weights leave and enter as the files that other programs write and read."""

import json
import random
import weakref

import pytest
import torch
from checkpoint_cases import cut, random_layouts
from safetensors.torch import load_file, save_file

from phalanx.checkpoint import disk
from phalanx.checkpoint.export import read_safetensors, write_safetensors
from phalanx.checkpoint.shard_file import DTYPES, Item, write
from phalanx.errors import CheckpointError
from phalanx.layout import Layout, Piece


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (37, 8), "a.bias": (8,), "head": (37, 8), "none": (0, 3), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | {"a.weight": torch.ones(8, 8).bfloat16()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def test_files_are_byte_for_byte_those_of_the_library(tmp_path):
    tensors = {name: torch.zeros(2, 3).to(dtype) for name, dtype in DTYPES.items()} | weights() | {'ü "quoted"': torch.ones(3)}
    for metadata in (None, {"format": "pt"}):
        write(tmp_path / "ours", [Item.whole(name, tensor) for name, tensor in tensors.items()], metadata)
        save_file(tensors, tmp_path / "theirs", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_small_exports_are_one_file_and_large_ones_have_an_index_of_what_is_stored(tmp_path):
    write_safetensors(tmp_path, weights().items())
    assert equal(load_file(tmp_path / "model.safetensors"), weights())
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    files = write_safetensors(tmp_path, weights().items(), max_shard_bytes=400)
    assert [file.name for file in files] == [f"model-0000{number}-of-0000{len(files)}.safetensors" for number in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*(file.name for file in files), "model.safetensors.index.json"])


def test_an_export_replaces_the_one_before_and_nothing_else(tmp_path):
    for name in ("config.json", "model-card.safetensors.txt", "adapter_model.safetensors"):
        (tmp_path / name).write_text("mine")
    write_safetensors(tmp_path, weights().items(), max_shard_bytes=400)
    write_safetensors(tmp_path, weights().items())
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["adapter_model.safetensors", "config.json", "model-card.safetensors.txt", "model.safetensors"]


def test_tied_names_are_stored_once_and_doubled_names_refused(tmp_path):
    write_safetensors(tmp_path, weights().items(), tied=["head"])
    assert set(read_safetensors(tmp_path)) == weights().keys() - {"head"}
    with pytest.raises(CheckpointError, match="embed comes twice"):
        write_safetensors(tmp_path, [*weights().items(), *weights().items()])


def test_a_failed_export_leaves_the_one_before(tmp_path, monkeypatch):
    write_safetensors(tmp_path, weights().items())
    before = (tmp_path / "model.safetensors").read_bytes()
    write_all, written = disk.write_all, []

    def write_some(file, view):
        written.append(view)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        write_all(file, view)

    monkeypatch.setattr(disk, "write_all", write_some)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_safetensors(tmp_path, [(name, tensor + 1) for name, tensor in weights().items() if tensor.dim() == 2], max_shard_bytes=400)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_only_one_shard_is_held_at_a_time(tmp_path):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def tensors():
        for number in range(12):
            tensor = torch.zeros(100)
            alive.add(tensor)
            assert len(alive) <= 4 + 2  # a shard of four, the next one, and the one before that the loop still names
            yield f"w{number}", tensor

    write_safetensors(tmp_path, tensors(), max_shard_bytes=1600)
    assert len(read_safetensors(tmp_path)) == 12


@pytest.mark.parametrize("max_shard_bytes", [400, 1 << 20])
def test_tensors_and_slices_are_read_by_name(tmp_path, max_shard_bytes):
    write_safetensors(tmp_path, weights().items(), max_shard_bytes=max_shard_bytes)
    with read_safetensors(tmp_path) as stored:
        assert equal(dict(stored.items()), weights())
        assert stored.shape("embed") == (37, 8)
        assert stored.dtype("a.weight") == torch.bfloat16
        for name, full in weights().items():
            for layout in random_layouts(full.shape, 4, random.Random(1)):
                wanted = cut(name, full, layout)
                filled = Piece(name, torch.ones_like(wanted.tensor), layout)
                stored.fill(filled)
                assert torch.equal(filled.tensor, wanted.tensor)


def test_what_does_not_fit_is_named(tmp_path):
    write_safetensors(tmp_path, weights().items())
    stored = read_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"embed in .* has shape \(37, 8\) and is wanted with shape \(74, 8\)"):
        stored.fill(Piece("embed", torch.zeros(74, 8), Layout.whole((74, 8))))
    with pytest.raises(CheckpointError, match=r"a.weight in .* is torch.bfloat16 and is wanted as torch.float32.*cast=True"):
        stored.fill(Piece("a.weight", torch.zeros(8, 8), Layout.whole((8, 8))))
    with pytest.raises(CheckpointError, match=r"does not hold a.wieght \(nearest: a.weight\)"):
        stored.read("a.wieght")
    filled = Piece("a.weight", torch.zeros(8, 8), Layout.whole((8, 8)))
    stored.fill(filled, cast=True)
    assert torch.equal(filled.tensor, torch.ones(8, 8))


def test_damaged_and_foreign_directories_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no model.safetensors and no model.safetensors.index.json"):
        read_safetensors(tmp_path)
    write_safetensors(tmp_path, weights().items(), max_shard_bytes=400)
    first = min(tmp_path.glob("model-00001-of-*"))
    content = first.read_bytes()
    for damaged in (b"", content[:20], content[:-1], b"\xff" * 8 + content[8:], content[:8] + b"x" + content[9:]):
        first.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"safetensors file|has .* bytes"):
            dict(read_safetensors(tmp_path).items())
    first.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        dict(read_safetensors(tmp_path).items())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "/etc/passwd"}}')
    with pytest.raises(CheckpointError, match="names a file elsewhere"):
        read_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not an index"):
        read_safetensors(tmp_path)
