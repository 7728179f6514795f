"""Damage is found and named before anything changes; a failed or killed save leaves the old checkpoint or the new one."""

import errno
import json
import os
import zlib

import pytest
import torch
from checkpoint_cases import ALONE, blank, killed, same, some_pieces

from phalanx.checkpoint import disk, inspect, load, save
from phalanx.errors import CheckpointError
from phalanx.layout import Layout, Piece

STATE = {"step": 3, "moments": torch.arange(4.0)}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of several small files."""
    save(tmp_path / "at", some_pieces(), STATE, {"rng": b"abc"}, ALONE, max_file_bytes=64)
    return tmp_path / "at"


def refused(path, message: str, **options) -> None:
    """Loading raises one CheckpointError with this message and changes no piece."""
    pieces = [blank(piece) for piece in some_pieces()]
    with pytest.raises(CheckpointError, match=message):
        load(path, pieces, ALONE, **options)
    assert same(pieces, [blank(piece) for piece in some_pieces()])


def test_every_flipped_byte_of_every_file_is_found(saved):
    for file in sorted(saved.iterdir()):
        content = bytearray(file.read_bytes())
        for place in range(0, len(content), max(1, len(content) // 60)):
            content[place] ^= 0x10
            file.write_bytes(content)
            refused(saved, "damaged|has .* bytes where|not a safetensors|cut short")
            assert inspect.check(saved)
            content[place] ^= 0x10
        file.write_bytes(content)
    assert inspect.check(saved) == []
    load(saved, [blank(piece) for piece in some_pieces()], ALONE)


def test_truncated_and_missing_files_are_found(saved):
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        refused(saved, file.name, verify=False)
        file.unlink()
        refused(saved, f"{file.name}|incomplete", verify=False)
        file.write_bytes(content)
    load(saved, [blank(piece) for piece in some_pieces()], ALONE)


def test_without_verify_only_the_data_is_taken_on_trust(saved):
    [file] = [file for file in saved.glob("rank-*") if b"steps" in file.read_bytes()]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused(saved, "damaged")
    load(saved, [blank(piece) for piece in some_pieces()], ALONE, verify=False)


def test_directories_that_are_no_checkpoint_are_told_apart(tmp_path, saved):
    refused(tmp_path / "none", "there is no checkpoint .*none")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_text("x")
    refused(tmp_path / "foreign", r"not a Phalanx checkpoint \(it holds model.safetensors\)")
    (tmp_path / "foreign" / "manifest.json").write_text("{}")
    (tmp_path / "foreign" / "COMPLETE").write_text("")
    refused(tmp_path / "foreign", "damaged")
    (saved / "COMPLETE").unlink()
    refused(saved, "incomplete")


def rewrite(saved, change) -> None:
    """Changes the manifest in a way that its marker agrees with."""
    content = json.loads((saved / "manifest.json").read_bytes())
    change(content)
    encoded = json.dumps(content).encode()
    (saved / "manifest.json").write_bytes(encoded)
    (saved / "COMPLETE").write_text(json.dumps({"manifest_bytes": len(encoded), "manifest_checksum": zlib.crc32(encoded)}))


def test_a_future_format_and_a_foreign_manifest_are_refused(saved):
    rewrite(saved, lambda content: content.update(version=2, phalanx="9.0"))
    refused(saved, "format 2 by Phalanx 9.0. Allowed: formats up to 1. Try: Phalanx 9.0 or newer")
    rewrite(saved, lambda content: content.update(format="other"))
    refused(saved, "not the manifest of a Phalanx checkpoint")
    rewrite(saved, lambda content: content.update(format="phalanx-checkpoint", version=1, tensors=[]))
    refused(saved, "not the manifest of a Phalanx checkpoint")


def test_a_manifest_cannot_name_files_elsewhere(saved):
    rewrite(saved, lambda content: content["files"].update({"../../etc/passwd": {"bytes": 1, "checksum": 0}}))
    refused(saved, "names a file elsewhere")


def test_missing_and_extra_names_are_named_with_the_nearest(saved):
    pieces = some_pieces()
    pieces[0].name = "layers.0.weigth"
    with pytest.raises(CheckpointError, match=r"layers.0.weigth \(nearest: layers.0.weight\).*strict=False"):
        load(saved, pieces, ALONE)
    with pytest.raises(CheckpointError, match="holds what no rank wants: steps"):
        load(saved, [piece for piece in some_pieces() if piece.name != "steps"], ALONE)


def test_a_partial_load_is_asked_for(saved):
    wanted, absent = blank(some_pieces()[0]), Piece("absent", torch.zeros(2), Layout.whole((2,)))
    state, _ = load(saved, [wanted, absent], ALONE, strict=False)
    assert torch.equal(wanted.tensor, some_pieces()[0].tensor)
    assert absent.tensor.tolist() == [0, 0]
    assert state["step"] == 3


def test_shapes_and_dtypes_must_fit(saved):
    wanted = [blank(piece) for piece in some_pieces()]
    wanted[0] = Piece("layers.0.weight", torch.zeros(7, 5), Layout.whole((7, 5)))
    with pytest.raises(CheckpointError, match=r"layers.0.weight was saved with shape \(5, 7\) and is wanted with shape \(7, 5\)"):
        load(saved, wanted, ALONE)
    wanted[0] = Piece("layers.0.weight", torch.zeros(5, 7, dtype=torch.float64), Layout.whole((5, 7)))
    with pytest.raises(CheckpointError, match=r"layers.0.weight was saved as F32 and is wanted as F64.*cast=True"):
        load(saved, wanted, ALONE)
    load(saved, wanted, ALONE, cast=True)
    assert torch.equal(wanted[0].tensor, some_pieces()[0].tensor.double())
    with pytest.raises(CheckpointError, match=r"layers.0.weight has 3 elements here where its layout has 35"):
        load(saved, [Piece("layers.0.weight", torch.zeros(3), Layout.whole((5, 7)))], ALONE, strict=False)


def test_a_full_disk_keeps_the_old_checkpoint_and_leaves_nothing(saved, monkeypatch):
    room = 0
    write_all = disk.write_all

    def write_while_there_is_room(file, view):
        nonlocal room
        room -= memoryview(view).nbytes
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, view)

    monkeypatch.setattr(disk, "write_all", write_while_there_is_room)
    for enough in range(0, 1800, 150):
        room = enough
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(saved, some_pieces(1), {"step": 4}, {}, ALONE, max_file_bytes=64)
        assert [entry.name for entry in saved.parent.iterdir()] == ["at"]
        pieces = [blank(piece) for piece in some_pieces()]
        assert load(saved, pieces, ALONE)[0]["step"] == 3
        assert same(pieces, some_pieces())
    room = 10000
    save(saved, some_pieces(1), {"step": 4}, {}, ALONE, max_file_bytes=64)
    assert load(saved, [blank(piece) for piece in some_pieces()], ALONE)[0] == {"step": 4}


@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize(("replaces", "failing"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)])
def test_a_rename_that_fails_leaves_what_was_there(tmp_path, monkeypatch, happened, replaces, failing):
    """Also where the rename has happened and only flushing it failed."""
    path, count, rename = tmp_path / "at", 0, disk.rename
    if replaces:
        save(path, some_pieces(), {"step": 3}, {}, ALONE)

    def failing_rename(source, target):
        nonlocal count
        count += 1
        if count != failing + 1 or happened:
            rename(source, target)
        if count == failing + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "rename", failing_rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(path, some_pieces(1), {"step": 4}, {}, ALONE)
    assert [entry.name for entry in tmp_path.iterdir()] == (["at"] if replaces else [])
    if replaces:
        assert load(path, [blank(piece) for piece in some_pieces()], ALONE)[0] == {"step": 3}


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(saved, monkeypatch, capsys):
    def cannot(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(disk, "remove_tree", cannot)
    save(saved, some_pieces(1), {"step": 4}, {}, ALONE)
    assert "is saved; the one it replaces is still in" in capsys.readouterr().err
    assert load(saved, [blank(piece) for piece in some_pieces()], ALONE)[0] == {"step": 4}
    monkeypatch.undo()
    save(saved, some_pieces(), {"step": 5}, {}, ALONE)
    assert [entry.name for entry in saved.parent.iterdir()] == ["at"]


def test_what_is_not_a_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "note").write_text("x")
    for name in ("mine", "note"):
        with pytest.raises(CheckpointError, match="is not a Phalanx checkpoint; saving there would delete it"):
            save(tmp_path / name, some_pieces(), {}, {}, ALONE)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def killed_save(path, seed: int, at: int) -> bool:
    return killed(at, lambda: save(path, some_pieces(seed), {"step": seed}, {}, ALONE, max_file_bytes=100))


def test_kill_before_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path):
    path = tmp_path / "at"
    save(path, some_pieces(0), {"step": 0}, {}, ALONE, max_file_bytes=100)
    found, at = {0: 0, 1: 0}, 0
    while killed_save(path, 1, at):
        pieces = [blank(piece) for piece in some_pieces()]
        step = load(path, pieces, ALONE)[0]["step"]
        assert same(pieces, some_pieces(step))
        found[step] += 1
        save(path, some_pieces(0), {"step": 0}, {}, ALONE, max_file_bytes=100)
        assert [entry.name for entry in tmp_path.iterdir()] == ["at"]
        at += 1
    assert found[0] > 20
    assert found[1] > 0


def test_a_killed_first_save_is_told_from_a_checkpoint_and_can_be_repeated(tmp_path):
    path, at = tmp_path / "at", 0
    while killed_save(path, 1, at):
        if not (path / "COMPLETE").exists():
            with pytest.raises(CheckpointError, match=r"there is no checkpoint|incomplete"):
                load(path, some_pieces(), ALONE)
        at += 1
    assert load(path, [blank(piece) for piece in some_pieces()], ALONE)[0] == {"step": 1}
