"""The learning rate and the picture of a run."""

import sys
import types

import pytest

from phalanx.errors import ConfigError
from phalanx.log import Events, read_events
from phalanx.train import tensorboard
from phalanx.train.picture import curves, draw_loads, draw_losses
from phalanx.train.schedule import warmup_cosine


def test_the_rate_rises_in_a_line_and_falls_to_the_final_fraction():
    factor = warmup_cosine(total_steps=11, warmup_steps=4, final_fraction=0.1)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    falling = [factor(step) for step in range(4, 11)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(0.1)
    assert factor(7) == pytest.approx(0.55)
    assert factor(500) == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up_works():
    factor = warmup_cosine(total_steps=1, warmup_steps=0, final_fraction=0.1)
    assert factor(0) == 1.0


def write_events(path):
    events = Events()
    events.open(path, "a", 0)
    for step in range(1, 6):
        events.emit("train", "loss", 5.0 / step, step=step)
    events.emit("train", "loss", 4.0, step=2)  # a resumed run
    events.emit("train", "loss", float("inf"), step=6)
    events.emit("evaluate", "bits_per_byte", 2.0, step=5)
    events.emit("run", "end", 1.0)


def test_curves_hold_the_last_finite_value_of_each_step(tmp_path):
    write_events(tmp_path / "events.jsonl")
    found = curves(read_events(tmp_path / "events.jsonl"))
    assert found == {"train.loss": {1: 5.0, 2: 4.0, 3: 5 / 3, 4: 1.25, 5: 1.0}, "evaluate.bits_per_byte": {5: 2.0}}


def test_the_picture_is_drawn_from_the_events(tmp_path):
    write_events(tmp_path / "events.jsonl")
    draw_losses(tmp_path / "events.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_loads_of_experts_are_drawn_where_there_are_any(tmp_path):
    write_events(tmp_path / "events.jsonl")
    assert not draw_loads(tmp_path / "events.jsonl", tmp_path / "experts.png")
    events = Events()
    events.open(tmp_path / "events.jsonl", "run", 0)
    for step in (1, 2):
        for layer in ("layers.0", "layers.1"):
            events.emit("experts", layer, 0.9, step=step, chosen=[3.0, 1.0, 2.0], dropped=0.0)
    events.close()
    assert draw_loads(tmp_path / "events.jsonl", tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")


def test_no_loss_no_picture(tmp_path):
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match="no training loss"):
        draw_losses(tmp_path / "events.jsonl", tmp_path / "loss.png")


class Writer:
    """Stands in for TensorBoard's, which is an extra."""

    def __init__(self, folder):
        self.points = []
        Writer.last = self

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.closed = True

    def add_scalar(self, name, value, step):
        self.points.append((name, value, step))


def test_every_curve_goes_to_tensorboard(tmp_path, monkeypatch):
    write_events(tmp_path / "events.jsonl")
    monkeypatch.setattr(tensorboard, "require_tensorboard", lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    assert tensorboard.export_tensorboard(tmp_path / "events.jsonl", tmp_path / "out") == 6
    assert Writer.last.points[0] == ("train/loss", 5.0, 1)
    assert ("evaluate/bits_per_byte", 2.0, 5) in Writer.last.points
    assert Writer.last.closed


def test_without_tensorboard_the_export_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"phalanx\[tensorboard\]"):
        tensorboard.require_tensorboard()
