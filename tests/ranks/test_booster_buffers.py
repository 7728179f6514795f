"""Buffers that change in training: they are saved, shown and exported as the ranks have them that run their module."""

import pytest
import torch
from booster_programs import Block, Decoder, batch, boost, criterion
from torch import nn

from phalanx.checkpoint.export import read_safetensors
from phalanx.data import take_rows
from phalanx.layout import split_range
from phalanx.testing import RankError, run_ranks


class Marked(Block):
    """A block that remembers the mean of what it saw; the same in every pass of a step, since it looks at the weights alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("turned", torch.arange(6, dtype=torch.float64).view(2, 3).T)  # not contiguous

    def forward(self, x):
        if self.training:
            self.seen.fill_(self.up.weight.detach().sum())
            self.turned.fill_(self.down.weight.detach().sum())
        return super().forward(x)


def marked():
    torch.manual_seed(0)
    model = Decoder()
    model.blocks = nn.ModuleList(Marked() for _ in range(4))
    return model.double()


def steps(booster, numbers):
    axis = booster.mesh.axis("dp")
    for number in numbers:
        booster.step(take_rows(batch(number), *split_range(8, axis.size, axis.index), 8))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def buffers_of(plan, path):
    model = marked()
    booster, model, _ = boost(plan, model, adam(model), criterion)
    steps(booster, range(2))
    booster.save(path / "run")
    booster.save_model(path / "model")
    shown = booster.full_state_dict()
    other = marked()
    again, *_ = boost(plan, other, adam(other), criterion)
    again.load(path / "run")
    with read_safetensors(path / "model") as weights:
        exported = dict(weights.items())
    return [
        {name: tensor.clone() for name, tensor in full.items() if "blocks" in name} for full in (shown, again.full_state_dict(), exported)
    ]


@pytest.mark.parametrize(("plan", "world"), [("zero0", 1), ("zero3", 2), ("pp2", 2), ("pp2+zero1", 4)])
def test_buffers_are_those_of_the_ranks_that_run_their_module(tmp_path, plan, world):
    torch.manual_seed(0)
    expected = run_ranks(buffers_of, 1, "zero0", tmp_path / "alone")[0][0] if world > 1 else None
    for found in run_ranks(buffers_of, world, plan, tmp_path / "here"):
        for full in found:
            expected = expected or full
            assert full.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.allclose(full[name], tensor, rtol=1e-9, atol=1e-9), name
    assert all(tensor.abs().sum() > 0 for name, tensor in expected.items() if "seen" in name)


class Counting(Block):
    """A block that counts how often it runs, or averages what it saw."""

    def __init__(self, averages):
        super().__init__()
        self.averages = averages
        self.register_buffer("tally", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.tally = 0.9 * self.tally + x.detach().mean() if self.averages else self.tally + 1
        return super().forward(x)


def count_in_stages(plan, averages):
    torch.manual_seed(0)
    model = Decoder()
    model.blocks = nn.ModuleList(Counting(averages) for _ in range(4))
    booster, model, _ = boost(plan, model.double(), adam(model), criterion)
    steps(booster, range(2))
    return {name: float(tensor) for name, tensor in booster.full_state_dict().items() if "tally" in name}


@pytest.mark.parametrize("averages", [False, True])
def test_buffers_that_depend_on_the_micro_batches_are_refused_in_stages(averages):
    with pytest.raises(RankError, match=r"blocks\.[0-3]\.tally' is changed by every forward.*Try: micro1"):
        run_ranks(count_in_stages, 2, "pp2", averages)


def test_a_step_of_one_micro_batch_counts_as_one_process_does():
    for found in run_ranks(count_in_stages, 2, "pp2+micro1", False):
        assert list(found.values()) == [2.0] * 4
