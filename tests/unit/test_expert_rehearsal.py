"""A mixture is rehearsed on one process as one of 64 ranks: every layer sends what even routing would send."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import phalanx as px
from phalanx.cluster import comm, launch
from phalanx.errors import PlanError

WORLD, ROWS, LENGTH, HIDDEN, LAYERS, CHOICES = 64, 2, 64, 64, 2, 2


@pytest.fixture
def rehearsed_world():
    launch.shutdown()
    yield launch.rehearse(WORLD, 5)
    launch.shutdown()


def tiny_mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = dict(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=500)
    experts = dict(num_local_experts=16, num_experts_per_tok=CHOICES, intermediate_size=128)
    return MixtralForCausalLM(MixtralConfig(hidden_size=HIDDEN, **shape, **experts))


@pytest.mark.parametrize("plan", ["ep8", "zero1+ep16", "zero3+ep8"])
def test_a_step_sends_tokens_as_even_routing_would(rehearsed_world, plan):
    size = px.Plan.of(plan).ep
    booster = px.Booster(plan)
    with FakeTensorMode():
        model = tiny_mixtral()
        model, _, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        booster.step({"input_ids": ids, "labels": ids})
        with comm.ledger.record() as rows:
            booster.step({"input_ids": ids, "labels": ids})
    (sent,) = [wire for operation, axis, _, _, wire in rows if (operation, axis) == ("all_to_all", "ep")]
    tokens = ROWS * LENGTH
    bound = LAYERS * 2 * (2 * CHOICES * tokens * HIDDEN * 4 * (size - 1) / size)
    beside = LAYERS * 3 * CHOICES * tokens * CHOICES * 4 * 1.2  # weights there and back, numbers of the choices
    assert 0.9 * bound < sent < bound + beside + 10_000


def test_more_ranks_than_experts_are_refused(rehearsed_world):
    with FakeTensorMode():
        model = tiny_mixtral()
    with pytest.raises(PlanError, match="ep64 for 16 experts"):
        px.Booster("ep64").boost(model)
