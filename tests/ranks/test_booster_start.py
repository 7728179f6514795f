"""What ranks bring to boost, and what may become of their parameters after it: the same model on every rank, whose memory stays ours."""

import math

import pytest
import torch
from booster_programs import STAGES, batch, boost, decoder, local
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.testing import run_ranks


def wider(rank):
    return nn.Linear(4, 8 + rank)


def deeper(rank):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + rank)])


def half_frozen(rank):
    model = nn.Linear(4, 8)
    model.bias.requires_grad_(rank == 0)
    return model


def half_lazy(rank):
    if rank == 0:
        return nn.Linear(4, 8)
    with px.lazy():
        return nn.Linear(4, 8)


def _refusal(plan, make):
    model = make(px.cluster.launch.launch().rank)
    with pytest.raises(ConfigError, match="ranks bring different models to boost") as refused:
        boost(plan, model)
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (wider, "weight [9, 4]"),
        (deeper, "nothing more where rank 1"),
        (half_frozen, "frozen parameter bias"),
        (half_lazy, "lazy parameter"),
    ],
)
def test_ranks_that_bring_different_models_are_told(make, found):
    told = run_ranks(_refusal, 3, "zero2", make)
    assert found in told[0]
    assert len(set(told)) == 1


def _meta():
    with torch.device("meta"):
        model = nn.Linear(4, 8)
    with pytest.raises(ConfigError, match="'weight' is a meta tensor"):
        boost("zero3", model)


def test_meta_tensors_without_values_are_refused():
    run_ranks(_meta, 1)
    run_ranks(_meta, 2)


class SharedBuffer(nn.Module):
    """Two modules that share a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = decoder(layers=1)
        self.register_buffer("scale", torch.full((1,), 1.5, dtype=torch.float64))
        self.part = nn.Module()
        self.part.register_buffer("scale", self.scale)

    def forward(self, words):
        return self.inner(words) * self.part.scale


def _lazy_loss(plan):
    with px.lazy():
        model = SharedBuffer()
    booster, model, _ = boost(plan, model)
    assert model.part.scale is model.scale
    return booster.evaluate(local(batch())).loss, boost("zero0", SharedBuffer())[0].evaluate(local(batch())).loss


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_buffer_that_modules_share_is_shared_in_a_lazy_model_too(plan):
    for lazy, eager in run_ranks(_lazy_loss, 2, plan):
        assert lazy == eager


def _replace(plan, name):
    model = decoder()
    booster, model, _ = boost(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.step(local(batch()))
    parameter = dict(model.named_parameters())[name]
    parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype)
    with pytest.raises(ConfigError, match=f"the parameter '{name}' was replaced after boost"):
        booster.step(local(batch()))


@pytest.mark.parametrize("plan", STAGES)
def test_a_parameter_whose_data_are_replaced_after_boost_is_refused_wherever_it_lies(plan):
    run_ranks(_replace, 2, plan, "blocks.1.norm.weight")  # the first of its unit
    run_ranks(_replace, 2, plan, "blocks.1.down.bias")


def _step_while_gathered():
    model = decoder()
    booster, model, _ = boost("zero3", model, torch.optim.SGD(model.parameters(), lr=0.1))
    with booster.gathered(), pytest.raises(ConfigError, match="inside booster"):
        booster.step(local(batch()))
    return booster.step(local(batch())).loss


def test_a_step_on_gathered_parameters_is_refused():
    first, second = run_ranks(_step_while_gathered, 2)
    assert math.isfinite(first)
    assert first == second
