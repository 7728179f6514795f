"""A plan for 64 ranks is rehearsed on one: no data, no other rank, and the ledger counts what every step would send."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import phalanx as px
from phalanx.cluster import comm, launch

WORLD = 64


@pytest.fixture
def rehearsed_world():
    launch.shutdown()
    yield launch.rehearse(WORLD, 3)
    launch.shutdown()


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, vocab_size=8000)
    return LlamaForCausalLM(LlamaConfig(**shape))


def wire_bytes_of_a_step(plan: str) -> tuple[int, int]:
    booster = px.Booster(plan)
    with FakeTensorMode():
        model = tiny_llama()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        model, _, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        ids = torch.zeros(2, 16, dtype=torch.long)
        booster.step({"input_ids": ids, "labels": ids})  # the first step records the order
        comm.ledger.reset()
        result = booster.step({"input_ids": ids, "labels": ids})
    assert not result.skipped
    return comm.ledger.total_wire_bytes(), num_parameters


@pytest.mark.parametrize(("plan", "passes"), [("zero0", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_a_step_sends_what_its_strategy_needs(rehearsed_world, plan, passes):
    """Bytes are at most `passes` times (n - 1)/n of the parameters, and 1 % for padding and statistics."""
    sent, num_parameters = wire_bytes_of_a_step(plan)
    bound = passes * (WORLD - 1) / WORLD * 4 * num_parameters
    assert 0.5 * bound < sent <= 1.01 * bound


def test_half_precision_halves_what_parameters_send(rehearsed_world):
    sent, num_parameters = wire_bytes_of_a_step("zero3+bf16")
    bound = (WORLD - 1) / WORLD * (2 * 2 + 4) * num_parameters  # parameters twice in bf16, gradients once in float32
    assert 0.5 * bound < sent <= 1.01 * bound


@pytest.mark.parametrize("plan", ["zero3+tp4", "zero1+tp4+sp"])
def test_tensor_parallelism_is_rehearsed(rehearsed_world, plan):
    """Activations of 2 x 16 tokens of 256 features, in 3 layers: at least 8 (t - 1)/t of them for each, beside what ZeRO sends."""
    sent, num_parameters = wire_bytes_of_a_step(plan)
    activations = 2 * 16 * 256 * 4
    least = 3 * 8 * 3 / 4 * activations
    assert least < sent < least + 3 * 4 * num_parameters / 4 * 1.1 + 10 * activations


@pytest.mark.parametrize("plan", ["zero1+tp4:2d", "zero3+tp8:2.5d2", "tp64:3d"])
def test_grids_are_rehearsed(rehearsed_world, plan):
    """What is cut into more parts sends less than all parameters of a data rank would."""
    sent, num_parameters = wire_bytes_of_a_step(plan)
    assert 0 < sent < 3 * 4 * num_parameters
