"""The command line: help, JSON, exit codes, and one clear line for every wrong use."""

import json
import subprocess
import sys

import pytest

from phalanx.cli.main import COMMANDS, main


def call(capsys, *words):
    """(exit code, stdout, stderr) of one command, run in this process."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_its_exit_codes(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"example:\n  phalanx {command}" in out
    assert "exit code: 0" in out
    assert "--json" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "x"], "did you mean 'train'?"),
        (["plan", "zero2", "--wrld=2"], "unrecognized arguments: --wrld=2"),
        (["train", "recipes/none.toml", "--bogus"], "unrecognized arguments: --bogus"),
        (["train", "recipes/none.toml"], "does not exist"),
        (["run", "-n", "0", "x.py"], "-n is 0. Allowed: 1 or more"),
        (["run", "none.py"], "there is no script none.py"),
        (["plan", "zero1", "--world", "x"], "invalid int value"),
        (["plan", "zero1", "--world", "0"], "ConfigError: --world is 0. Allowed: 1 or more. Try: --world 2"),
        (["plan", "zero1", "--world", "-2"], "ConfigError: --world is -2"),
        (["plan", "zero1", "--parameters", "-5"], "ConfigError: --parameters is -5. Allowed: 1 or more"),
        (["plan", "zero1", "--parameters", "0"], "ConfigError: --parameters is 0"),
        (["plan", "zero1", "--parameters", "nan"], "ConfigError: --parameters is nan"),
        (["plan", "zero1", "--parameters", "inf"], "ConfigError: --parameters is inf"),
        (["plan", "zero1", "--parameters", "10", "--layers", "0"], "ConfigError: --layers is 0"),
        (["verify", "--model", "tiny-gpt2", "--plan", "zero1", "--world", "0"], "ConfigError: world is 0. Allowed: 1 or more"),
        (["verify", "--model", "tiny-gpt2", "--plan", "zero1", "--rows", "0"], "ConfigError: rows is 0. Allowed: 1 or more"),
        (["verify", "--model", "tiny-gpt2", "--plan", "zero1", "--steps", "0"], "ConfigError: steps is 0. Allowed: 1 or more"),
    ],
)
def test_wrong_use_ends_with_2_and_one_line(capsys, words, message):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2


def test_an_error_is_also_an_object(capsys):
    code, out, err = call(capsys, "train", "none.toml", "--json")
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "ConfigError"
    assert "ConfigError" in err


def test_a_misspelt_recipe_key_offers_the_nearest(capsys, tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text("name = 'a'\nrun = {folder = 'unused'}\ntext = {files = ['a.txt']}")
    code, _, err = call(capsys, "train", str(recipe), "--steps.totl=3")
    assert code == 2
    assert "'totl'" in err
    assert "Try: total" in err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.plan=zero9", "zero9"),
        ("run.plan=dp3", "world"),
        ("text.files=['none.txt']", "none.txt"),
        ("text.files=['binary']", "not"),
        ("model.type=lama", "model.type 'lama' is no language model of transformers. Try: llama"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(capsys, tmp_path, override, message):
    (tmp_path / "binary").write_bytes(b"\x00\xff")
    (tmp_path / "a.txt").write_text("some text")
    recipe = tmp_path / "a.toml"
    recipe.write_text(f"name = 'a'\nrun = {{folder = '{tmp_path}/run', processes = 2}}\ntext = {{files = ['a.txt']}}")
    code, _, err = call(capsys, "train", str(recipe), f"--{override}")
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_not_overwritten_unasked(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    recipe = tmp_path / "a.toml"
    recipe.write_text(f"name = 'a'\nrun = {{folder = '{tmp_path}/run', processes = 2}}\ntext = {{files = ['a.txt']}}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("kept")
    code, _, err = call(capsys, "train", str(recipe))
    assert code == 2
    assert "--resume" in err
    assert (tmp_path / "run" / "events.jsonl").read_text() == "kept"


def test_plan_prints_sizes_and_memory(capsys):
    code, out, _ = call(capsys, "plan", "zero1", "--world", "4", "--parameters", "1000", "--layers", "2", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["plan"], report["sizes"]["dp"]) == ("zero1", 4)
    assert report["bytes_per_rank"]["total"] == 1000 * (8 + 8 // 4)
    code, out, _ = call(capsys, "plan", "zero1", "--world", "4")
    assert "dp4" in out


def test_plan_prints_where_the_state_lives_and_when_it_moves(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[gemini]\ndevice = "800kB"\nhost = "1GB"\nplacement = "host"\n')
    code, out, _ = call(capsys, "plan", str(path), "--memory", "tiny-vit", "--world", "1", "--json")
    memory = json.loads(out)["memory"]
    assert code == 0
    assert [chunk["optimizer"] for chunk in memory["chunks"]] == ["host"] * len(memory["chunks"])
    read = sum(chunk["bytes"] * len(chunk["fetched"]) for chunk in memory["chunks"])
    assert memory["moved_bytes"]["host read"] == read + memory["chunks"][-1]["bytes"], (
        "each fetch, and what stays gathered after its update"
    )
    code, out, _ = call(capsys, "plan", str(path), "--memory", "tiny-vit", "--world", "1")
    assert code == 0
    assert "smallest device budget" in out
    code, _, err = call(capsys, "plan", "zero3", "--memory", "tiny-vit")
    assert code == 2
    assert "has no tiers" in err


def test_plan_lists_every_conflict_and_ends_with_1(capsys):
    code, out, _ = call(capsys, "plan", "zero1+zero2+foo", "--json")
    assert code == 1
    assert len(json.loads(out)["conflicts"]) == 2


def test_doctor_finds_what_is_needed_here(capsys):
    code, out, _ = call(capsys, "doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0
    assert found["torch"]["state"] == found["cpu"]["state"] == "ok"
    assert all(finding["cost"] for finding in found.values() if finding["state"] == "missing")
    code, out, _ = call(capsys, "doctor")
    assert "torch" in out


def test_a_reader_that_leaves_early_is_no_error():
    words = f"{sys.executable} -m phalanx.cli.main plan zero1 --parameters 1e9 | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words}"], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr


def test_anatomy_shows_a_model_as_a_tree_and_what_stays_whole(capsys):
    code, out, _ = call(capsys, "anatomy", "tiny-olmo2")
    assert code == 0
    assert "0 to 1" in out
    assert "row: 48" in out
    assert out.count("heads that depend on each other") == 4
    code, out, _ = call(capsys, "anatomy", "tiny-llama", "--json")
    assert json.loads(out)["heads"]["model.layers.3.self_attn"] == {"heads": 8, "kv_heads": 4}
    assert json.loads(out)["roles"]["lm_head"] == "vocabulary"


def test_anatomy_needs_several_parts(capsys):
    code, _, err = call(capsys, "anatomy", "tiny-llama", "--parts", "1")
    assert code == 2
    assert "--parts is 1" in err
