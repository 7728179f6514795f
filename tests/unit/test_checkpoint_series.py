"""The checkpoints of a run: the newest whole one is found without being named, and old ones go only when they may."""

import errno
import os

import pytest
from checkpoint_cases import ALONE, blank, killed, same, some_pieces

from phalanx.checkpoint import disk, load, save
from phalanx.checkpoint.series import Series
from phalanx.errors import CheckpointError, DamageError


def save_step(series, step, **kept):
    save(series.path(step), some_pieces(step), {"step": step}, {}, ALONE)
    if kept:
        series.prune(step, **kept)


def load_newest(series):
    """The step that was loaded, after a look at whether it is what was saved then; None where there is none."""
    pieces = [blank(piece) for piece in some_pieces()]
    step = series.load_newest(lambda path: load(path, pieces, ALONE), ALONE)
    assert step is None or same(pieces, some_pieces(step))
    return step


def names(series):
    return sorted(entry.name for entry in series.folder.iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def series(tmp_path):
    """Checkpoints of steps 2, 10 and 100; by name alone 2 and 10 would come in another order."""
    series = Series(tmp_path / "checkpoints")
    for step in (100, 2):
        save_step(series, step)
    save(series.folder / "step-10", some_pieces(10), {"step": 10}, {}, ALONE)
    return series


def test_the_newest_is_that_of_the_highest_step(series):
    assert load_newest(series) == 100
    assert list(series.paths()) == [2, 10, 100]
    assert load_newest(Series(series.folder / "none")) is None


@pytest.mark.parametrize("hurt", ["data", "manifest.json", "state.json", "truncated", "missing", "unmarked"])
def test_one_that_is_not_whole_is_passed_over_and_named(series, capsys, hurt):
    path = series.path(100)
    shard = next(path.glob("rank-*"))
    if hurt == "unmarked":
        (path / "COMPLETE").unlink()
    elif hurt == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif hurt == "missing":
        shard.unlink()
    else:
        flip(shard if hurt == "data" else path / hurt)
    assert load_newest(series) == 10
    assert f"passing over {path}: " in capsys.readouterr().err


def test_a_disk_that_does_not_give_its_bytes_counts_as_damage(series, monkeypatch, capsys):
    preadv, failing = os.preadv, next(series.path(100).glob("rank-*")).stat().st_ino

    def read(descriptor, *arguments):
        if os.fstat(descriptor).st_ino == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", read)
    assert load_newest(series) == 10
    assert "cannot be read (Input/output error)" in capsys.readouterr().err


def test_where_all_are_damaged_nothing_starts_anew(series):
    for path in series.paths().values():
        flip(next(path.glob("rank-*")))
    with pytest.raises(DamageError, match=r"every checkpoint in .* is damaged: .*step-000100"):
        load_newest(series)


def test_one_that_does_not_fit_is_not_passed_over(series):
    pieces = some_pieces()[1:]
    with pytest.raises(CheckpointError, match="step-000100 holds what no rank wants") as caught:
        series.load_newest(lambda path: load(path, pieces, ALONE), ALONE)
    assert not isinstance(caught.value, DamageError)


def test_the_last_ones_and_those_of_round_steps_stay(tmp_path):
    series = Series(tmp_path)
    for step in range(1, 11):
        save_step(series, step, keep_last=2, keep_every=4)
    assert list(series.paths()) == [4, 8, 9, 10]
    for step in (11, 12):
        save_step(series, step, keep_last=0, keep_every=0)
    assert list(series.paths()) == [4, 8, 9, 10, 11, 12]


def test_what_is_not_whole_does_not_count_as_kept(series):
    (series.path(100) / "COMPLETE").unlink()
    save_step(series, 101, keep_last=2, keep_every=0)
    assert list(series.paths()) == [10, 101]


def test_a_run_that_went_back_keeps_what_it_saves(series):
    flip(next(series.path(100).glob("rank-*")))
    save_step(series, 11, keep_last=2, keep_every=0)
    assert list(series.paths()) == [10, 11, 100]
    assert load_newest(series) == 11
    (series.path(100) / "manifest.json").unlink()
    save_step(series, 100, keep_last=1, keep_every=0)  # what is left of a checkpoint is replaced
    assert list(series.paths()) == [100]
    assert load_newest(series) == 100


def test_other_things_in_the_folder_stay(series):
    (series.folder / "notes").mkdir()
    (series.folder / "step-7.txt").write_text("x")
    for name in ("step-000005", "step-000006", ".step-000006.saving-0123abcd"):
        (series.folder / name).mkdir()
        (series.folder / name / "thesis.txt").write_text("x")
    (series.folder / "step-000003").symlink_to(series.path(2))
    save(series.folder / "best", some_pieces(), {}, {}, ALONE)
    (series.folder / ".best.saving-0123abcd").mkdir()
    save_step(series, 101, keep_last=1, keep_every=2)
    assert (series.folder / "step-000005" / "thesis.txt").exists()
    assert (series.folder / "step-000006" / "thesis.txt").exists()
    assert [name for name in names(series) if name not in ("step-000005", "step-000006")] == [
        ".best.saving-0123abcd",
        "best",
        "notes",
        "step-000002",
        "step-000003",
        "step-000100",
        "step-000101",
        "step-10",
        "step-7.txt",
    ]


def test_what_killed_saves_left_goes_also_where_every_checkpoint_stays(series):
    for name in (".step-000007.saving-0123abcd", ".step-000100.old-0123abcd"):
        (series.folder / name).mkdir()
        (series.folder / name / "state.json").write_text("x")
    os.rename(series.path(2), series.folder / ".step-000002.old-0123abcd")  # where it is the checkpoint of step 2
    series.prune(100, keep_last=0, keep_every=0)
    assert names(series) == [".step-000002.old-0123abcd", "step-000100", "step-10"]
    assert list(series.paths()) == [2, 10, 100]


def test_a_disk_that_fails_to_remove_fails_no_run(series, monkeypatch, capsys):
    def cannot(source, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "rename", cannot)
    series.prune(100, keep_last=1, keep_every=0)
    assert "could not be removed" in capsys.readouterr().err
    monkeypatch.undo()
    series.prune(100, keep_last=1, keep_every=0)
    assert names(series) == ["step-000100"]


EVERY = [4, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("every", EVERY)
def test_kill_at_any_step_on_the_disk_leaves_a_run_that_goes_on(tmp_path, every):
    """A save that pushes an old one out: killed anywhere, the newest or the one before is there, and going on cleans up."""
    found, at, going = [], 0, True
    while going:
        series = Series(tmp_path / str(at))
        for step in (1, 2):
            save_step(series, step)
        going = killed(at, lambda series=series: save_step(series, 3, keep_last=1, keep_every=0))
        found.append(load_newest(series))
        save_step(series, 4, keep_last=1, keep_every=0)
        assert names(series) == ["step-000004"]
        at += every
    assert found == sorted(found)
    assert (found.count(2) * every > 20, found.count(3) * every > 4) == (True, True)


@pytest.mark.parametrize("every", EVERY)
def test_kill_in_the_first_save_leaves_a_run_that_starts(tmp_path, every):
    found, at, going = [], 0, True
    while going:
        series = Series(tmp_path / str(at))
        going = killed(at, lambda series=series: save_step(series, 1, keep_last=1, keep_every=0))
        found.append(load_newest(series))
        save_step(series, 2, keep_last=1, keep_every=0)
        assert names(series) == ["step-000002"]
        at += every
    assert set(found) == {None, 1}
