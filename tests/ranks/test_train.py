"""A recipe on several ranks: the same curve as on one, resume equal to never stopped, and a model that others can load."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import CheckpointError
from phalanx.log import read_events
from phalanx.testing import RankError, run_ranks
from phalanx.train.folder import Folder
from phalanx.train.loop import train
from phalanx.train.picture import curves
from phalanx.train.recipe import load_recipe, recipe_from_table, recipe_table
from phalanx.train.review import describe, review

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wise", "owls", "watch", "from", "oaks"]


def write_recipe(folder):
    """A recipe whose text has 90 paragraphs, small enough for a second on one core."""
    text = "\n\n".join(" ".join(WORDS[(line * word + line) % len(WORDS)] for word in range(12)) + "." for line in range(1, 91))
    (folder / "a.txt").write_text(text)
    path = folder / "a.toml"
    path.write_text(
        f"""
        name = "tiny"
        run = {{folder = '{folder}/run', plan = "zero2", processes = 2}}
        text = {{files = ["a.txt"], held_out = 0.1, vocabulary = 300}}
        batch = {{rows = 5, tokens = 16}}
        steps = {{total = 6, log_every = 2, evaluate_every = 4, save_every = 3}}
        optimizer = {{warmup_steps = 2, learning_rate = 1e-2}}
        sample = {{prompt = "the", tokens = 5}}
        model = {{config = {{hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, num_attention_heads = 2}}}}
        """
    )
    return path


def train_rank(table, resume=False):
    torch.set_num_threads(1)
    train(recipe_from_table(table), resume=resume)


def run(path, world, *overrides, resume=False):
    """Trains on `world` ranks; returns the run's folder."""
    recipe = load_recipe(path, overrides)
    Folder(recipe.folder()).prepare(resume=resume, overwrite=False)
    run_ranks(train_rank, world, recipe_table(recipe), resume)
    return Folder(recipe.folder())


def curve(folder, name="train.loss"):
    return curves(read_events(folder.events))[name]


def test_two_ranks_learn_what_one_learns(tmp_path):
    path = write_recipe(tmp_path)
    one, two = run(path, 1, f"run.folder={tmp_path}/one"), run(path, 2, f"run.folder={tmp_path}/two")
    losses = curve(one)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1] - 0.3
    assert curve(two) == pytest.approx(losses, rel=1e-5)
    summaries = [json.loads(folder.summary.read_text()) for folder in (one, two)]
    assert summaries[1]["validation"]["bits_per_byte"] == pytest.approx(summaries[0]["validation"]["bits_per_byte"], rel=1e-5)
    assert summaries[1]["validation"]["tokens"] == summaries[0]["validation"]["tokens"]
    assert [len(summary["memory"]) for summary in summaries] == [1, 2]
    kept = [memory["measured"]["kept"] for summary in summaries for memory in summary["memory"]]
    assert kept[1] < kept[0]


LARGER = ("hidden_size=128", "intermediate_size=384", "num_hidden_layers=4", "num_attention_heads=4")


OTHERS = ("interleaved2", "gpipe", "zb-h1", "recompute=full,0", "zb-h1+recompute=0,full")


@pytest.mark.parametrize("plan", ["pp2", *(pytest.param(f"pp2+{name}", marks=pytest.mark.slow) for name in OTHERS)])
def test_stages_take_the_memory_that_was_predicted(tmp_path, plan):
    """Of each rank's own stages, in the order of the schedule."""
    overrides = [*(f"model.config.{setting}" for setting in LARGER), "batch.rows=8", "batch.tokens=64", "text.held_out=0.4"]
    folder = run(write_recipe(tmp_path), 2, f"run.plan={plan}", "steps.total=3", *overrides)
    for memory in json.loads(folder.summary.read_text())["memory"]:
        for name in ("kept", "peak"):
            assert memory["predicted"][name] == pytest.approx(memory["measured"][name], rel=0.02), name


def test_the_engine_of_pytorch_learns_the_same(tmp_path):
    path = write_recipe(tmp_path)
    ours, theirs = (run(path, 2, f"run.folder={tmp_path}/{plan}", f"run.plan={plan}", "steps.total=2") for plan in ("zero3", "fsdp"))
    assert curve(theirs) == pytest.approx(curve(ours), rel=1e-5)
    kept = [json.loads(folder.summary.read_text())["memory"][0] for folder in (ours, theirs)]
    assert all(memory["measured"]["kept"] > 0 and memory["predicted"]["kept"] > 0 for memory in kept)


def flip(path):
    shard = next(path.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path):
    """Also past a damaged and a half-written one, to the same bits as if it had never stopped; old ones go as the recipe says."""
    path = write_recipe(tmp_path)
    keeping = ["steps.save_every=1", "steps.keep_last=3", "steps.keep_every=2"]
    whole, broken = run(path, 2, f"run.folder={tmp_path}/whole"), run(path, 2, f"run.folder={tmp_path}/broken", *keeping)
    assert list(broken.checkpoints.paths()) == [2, 4, 5, 6]
    flip(broken.checkpoints.path(5))
    (broken.checkpoints.path(6) / "COMPLETE").unlink()
    shutil.rmtree(broken.model)
    run(path, 2, f"run.folder={tmp_path}/broken", *keeping, resume=True)
    resumed = [event.step for event in read_events(broken.events) if (event.kind, event.name) == ("run", "resume")]
    assert resumed == [4]
    assert curve(broken) == curve(whole)
    assert (broken.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert list(broken.checkpoints.paths()) == [2, 4, 5, 6]


def start(path, folder, *overrides):
    words = [sys.executable, "-m", "phalanx.train", str(path), f"run.folder={folder.root}", *overrides, "--resume"]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})


def saves(folder):
    """How many checkpoints were saved, also those that are gone or were saved twice."""
    written = read_events(folder.events) if folder.events.exists() else ()
    return sum((event.kind, event.name) == ("run", "save") for event in written)


def killed_after(process, folder, count, seconds):
    """Kills a process `seconds` after it has saved `count` checkpoints; whether it was still there."""
    before = saves(folder)
    while saves(folder) < before + count and process.poll() is None:
        time.sleep(0.005)
    time.sleep(seconds)
    process.kill()
    return process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path, seed):
    path, choose = write_recipe(tmp_path), random.Random(seed)
    keeping = ["run.plan=zero0", "steps.total=60", "steps.save_every=1", "steps.keep_last=1", "steps.evaluate_every=0"]
    whole, broken = Folder(tmp_path / "whole"), Folder(tmp_path / "broken")
    assert start(path, whole, *keeping).wait() == 0
    for _ in range(4):
        assert killed_after(start(path, broken, *keeping), broken, choose.randint(1, 10), choose.uniform(0, 0.05))
    assert start(path, broken, *keeping).wait() == 0
    resumed = [event.step for event in read_events(broken.events) if (event.kind, event.name) == ("run", "resume")]
    assert len(resumed) == 4
    assert resumed == sorted(resumed)
    assert (broken.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert [entry.name for entry in broken.checkpoints.folder.iterdir()] == ["step-000060"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_asked_to_stop_saves_its_step_and_goes_on_from_it(tmp_path, processes):
    """Once by itself and once through the launcher, which hands SIGTERM on to its ranks."""
    path = write_recipe(tmp_path)
    keeping = ["--run.plan=zero2", "--steps.total=60", "--steps.save_every=0", "--steps.evaluate_every=0", "-n", str(processes), "--resume"]
    whole, broken = Folder(tmp_path / "whole"), Folder(tmp_path / "broken")

    def command(folder):
        words = [sys.executable, "-m", "phalanx.cli.main", "train", str(path), f"--run.folder={folder.root}", *keeping]
        return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    assert command(whole).wait() == 0
    process = command(broken)
    while not (broken.events.exists() and any(event.name == "loss" for event in read_events(broken.events))):
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 143
    [step] = [event.step for event in read_events(broken.events) if (event.kind, event.name) == ("run", "stop")]
    assert list(broken.checkpoints.paths()) == [step]
    assert 2 <= step < 60
    assert command(broken).wait() == 0
    assert [event.step for event in read_events(broken.events) if (event.kind, event.name) == ("run", "resume")] == [step]
    assert (broken.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()


def test_where_every_checkpoint_is_damaged_the_run_is_refused_and_nothing_is_lost(tmp_path):
    path = write_recipe(tmp_path)
    folder = run(path, 1)
    before = curve(folder)
    for saved in folder.checkpoints.paths().values():
        flip(saved)
    with pytest.raises(RankError, match=r"every checkpoint in .* is damaged"):
        run(path, 1, "steps.total=8", resume=True)
    assert curve(folder) == before
    assert list(folder.checkpoints.paths()) == [3, 6]


def test_a_complete_run_is_completed_again_without_a_step(tmp_path):
    path = write_recipe(tmp_path)
    folder = run(path, 1)
    before = json.loads(folder.summary.read_text())
    run(path, 1, resume=True)
    after = json.loads(folder.summary.read_text())
    assert after["validation"] == before["validation"]
    assert "not measured" in dict(describe(review(load_recipe(path)), folder.root))["memory of rank 0"]


def test_the_review_reloads_judges_writes_and_draws(tmp_path):
    path = write_recipe(tmp_path)
    folder = run(path, 2)
    summary = review(load_recipe(path))
    assert summary["reloaded"]["loss"] == pytest.approx(summary["validation"]["loss"], rel=1e-5)
    assert folder.sample.read_text().startswith("the")
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert any("bits per byte" in value for _, value in describe(summary, folder.root))
    weights = load_file(folder.model / "model.safetensors")
    save_file({name: tensor * 1.05 for name, tensor in weights.items()}, folder.model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="when reloaded"):
        review(load_recipe(path))


def test_the_command_starts_its_own_ranks(tmp_path):
    path = write_recipe(tmp_path)
    words = [sys.executable, "-m", "phalanx.cli.main", "train", str(path), "--plan", "zero3", "--steps.total=2", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["ok"], summary["plan"], summary["world"], summary["steps"]) == (True, "zero3", 2, 2)
    assert "step 2/2" in done.stderr
