"""`phalanx checkpoint`: what it tells of a run folder, of damage, and of paths that are no checkpoint."""

import json

import pytest
from checkpoint_cases import ALONE, some_pieces

from phalanx.checkpoint import save
from phalanx.cli.main import main


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two whole checkpoints, a third one half-written."""
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints" / f"step-{step:06d}", some_pieces(), {"plan": "zero2", "step": step, "models": []}, {}, ALONE)
    (tmp_path / "checkpoints" / "step-000003" / "COMPLETE").unlink()
    return tmp_path


def call(capsys, *words):
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_tells_step_plan_and_what_is_whole(capsys, run):
    code, out, _ = call(capsys, "list", run, "--json")
    found = json.loads(out)["checkpoints"]
    assert code == 0
    assert [(entry["step"], entry["plan"], entry["complete"]) for entry in found[:2]] == [(1, "zero2", True), (2, "zero2", True)]
    assert (found[2]["step"], found[2]["complete"]) == (3, False)
    code, out, _ = call(capsys, "list", run / "checkpoints")
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 5)
    assert lines[1].startswith("1 ")
    assert "zero2" in lines[1]
    assert "complete" in lines[1]
    assert "NOT WHOLE" in lines[3]
    assert "step-000003 is incomplete: saving it did not finish" in lines[4]
    assert "holds no checkpoint" in call(capsys, "list", run / "checkpoints" / "step-000001")[1]


def test_check_reads_all_of_a_run_and_ends_with_1_where_something_is_damaged(capsys, run):
    whole, other = run / "checkpoints" / "step-000001", run / "checkpoints" / "step-000002"
    assert call(capsys, "check", whole)[:2] == (0, f"{whole} is sound\n")
    flip(next(other.glob("rank-*")))
    code, out, _ = call(capsys, "check", run)
    assert code == 1
    assert f"{whole} is sound" in out
    assert "is damaged (its checksum differs" in out
    assert "step-000003 is incomplete" in out
    code, out, _ = call(capsys, "check", other, "--json")
    [found] = json.loads(out)["checkpoints"]
    assert (code, json.loads(out)["ok"], found["path"], len(found["faults"])) == (1, False, str(other), 1)


def test_show_tells_what_one_holds(capsys, run):
    path = run / "checkpoints" / "step-000002"
    code, out, _ = call(capsys, "show", path, "--json")
    shown = json.loads(out)
    assert (code, shown["num_elements"], shown["facts"]) == (0, 43, {"plan": "zero2", "step": 2})
    assert shown["tensors"]["layers.0.weight"] == ["F32", [5, 7], 1]
    code, out, _ = call(capsys, "show", path, "--tensors")
    assert "F32 [5, 7] in 1 parts" in out
    assert "zero2" in out


def test_show_of_a_run_takes_the_last_whole_one_and_of_a_damaged_one_ends_with_1(capsys, run):
    assert json.loads(call(capsys, "show", run, "--json")[1])["facts"]["step"] == 2
    flip(run / "checkpoints" / "step-000002" / "manifest.json")
    code, out, err = call(capsys, "show", run / "checkpoints" / "step-000002")
    assert (code, out) == (1, "")
    assert "DamageError" in err
    assert "manifest.json is damaged" in err
    assert json.loads(call(capsys, "show", run, "--json")[1])["facts"]["step"] == 1
    for file in ("COMPLETE", "manifest.json"):
        (run / "checkpoints" / "step-000003" / file).unlink(missing_ok=True)
        code, _, err = call(capsys, "show", run / "checkpoints" / "step-000003")
        assert code == 1
        assert "step-000003 is incomplete" in err


@pytest.mark.parametrize("action", ["list", "check", "show"])
def test_a_path_that_is_no_checkpoint_is_wrong_use(capsys, tmp_path, action):
    code, out, err = call(capsys, action, tmp_path / "none")
    assert (code, out) == (2, "")
    assert "there is no folder" in err
    assert "Allowed:" in err
    assert "Try:" in err
    (tmp_path / "notes").mkdir()
    code, _, err = call(capsys, action, tmp_path)
    assert code == (0 if action == "list" else 2)
    code, out, err = call(capsys, action, tmp_path / "none", "--json")
    assert (code, json.loads(out)["ok"]) == (2, False)


def test_a_flag_of_another_action_is_refused(capsys, run):
    code, _, err = call(capsys, "check", run, "--tensors")
    assert code == 2
    assert "--tensors is given to check. Allowed: --tensors with show" in err
