"""Tensor parallelism on ranks: what it sends, what it keeps, what it refuses, and that the tests of it can fail."""

import pytest
import torch
from torch.nn import functional as F

import phalanx as px
from phalanx.cluster import comm
from phalanx.cluster.mesh import Mesh
from phalanx.errors import PlanError
from phalanx.parallel.tensor.vocabulary import split_cross_entropy_sum
from phalanx.testing import RankError, run_ranks

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 8, 32, 37


def llama(layers, kv_heads=4):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=kv_heads, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def batch():
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def sent_elements(plan, layers):
    booster = px.Booster(plan)
    booster.boost(llama(layers))
    with comm.ledger.record() as rows, booster.no_sync():  # norms' gradients under sp are summed once a step, counted apart
        booster.forward_backward(batch())
    return sum(wire for _, axis, _, _, wire in rows if axis == "tp") / 8


@pytest.mark.parametrize(("plan", "world"), [("tp2", 2), ("tp4", 4), ("tp2+sp", 2), ("tp4+sp", 4)])
def test_a_layer_sends_what_the_formula_says(plan, world):
    """8 (t - 1)/t x for each layer, forward and backward; logits never travel."""
    activations = ROWS * LENGTH * WIDTH
    more, less = run_ranks(two_depths, world, plan)[0]
    assert (more - less) / 2 == 8 * (world - 1) / world * activations
    labels = ROWS * LENGTH
    around = less - 2 * 8 * (world - 1) / world * activations
    ends = 4 * activations + 6 * labels  # the embedding's sum, the head's backward sum; a maximum and two sums for each label
    ends += 2 * activations if "sp" in plan else 0  # the stream is joined after the last layer, and its gradient before the first
    assert around == ends * (world - 1) / world


def two_depths(plan):
    return sent_elements(plan, 4), sent_elements(plan, 2)


def held_elements():
    booster = px.Booster("tp2")
    model, *_ = booster.boost(llama(2))
    layer = model.model.layers[0]
    return {
        "q": tuple(layer.self_attn.q_proj.weight.shape),
        "k": tuple(layer.self_attn.k_proj.weight.shape),
        "down": tuple(layer.mlp.down_proj.weight.shape),
        "tokens": tuple(model.model.embed_tokens.weight.shape),
        "full": tuple(booster.full_state_dict()["model.embed_tokens.weight"].shape),
    }


def test_ranks_hold_their_part():
    first, second = run_ranks(held_elements, 2)
    assert first == {"q": (16, 32), "k": (8, 32), "down": (32, 24), "tokens": (19, 32), "full": (37, 32)}
    assert second["tokens"] == (18, 32)


def split_loss():
    axis = Mesh({"tp": 3}).axis("tp")
    generator = torch.Generator().manual_seed(3)
    logits = 30 * torch.randn(11, VOCABULARY, dtype=torch.float64, generator=generator)
    labels = torch.randint(VOCABULARY, (11,), generator=generator)
    labels[2:5] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, reduction="sum")
    expected.backward()
    low, high = [(0, 13), (13, 25), (25, 37)][axis.index]
    part = logits[:, low:high].clone().requires_grad_()
    loss, count = split_cross_entropy_sum(part, labels, axis, low)
    (2 * loss).backward()
    return abs(float(loss - expected)), int(count), float((part.grad - 2 * whole.grad[:, low:high]).abs().max())


def test_a_loss_over_parts_of_the_vocabulary():
    for error, count, gradient_error in run_ranks(split_loss, 3):
        assert error < 1e-10
        assert gradient_error < 1e-12
        assert count == 8


def read_logits():
    model = llama(2)
    model.eval()
    expected = model(**batch()).logits
    boosted, *_ = px.Booster("tp2").boost(model)
    return float((boosted(**batch()).logits - expected).abs().max())


def test_logits_that_a_person_reads_are_whole():
    assert max(run_ranks(read_logits, 2)) < 1e-12


def refused(plan, build):
    try:
        px.Booster(plan).boost(build())
    except PlanError as error:
        return str(error)
    return ""


def olmo():
    from phalanx.verify.tiny import build_tiny

    return build_tiny("tiny-olmo2")[0]


def without_layers():
    return torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 3))


def test_refusals_name_the_module():
    assert all("model.layers.0.self_attn.o_proj" in found and "tp2 without sp" in found for found in run_ranks(refused, 2, "tp2+sp", olmo))
    assert all("inputs cannot be guessed" in found for found in run_ranks(refused, 2, "tp2", without_layers))


def broken_gradient():
    """Gradients under tp2, with the sum over ranks where a split part begins taken out."""
    from phalanx.parallel.tensor import one

    one.comm = type("Silent", (), {**vars(comm), "copy_to": staticmethod(lambda x, axis: x)})
    booster = px.Booster("tp2")
    booster.boost(llama(2))
    booster.forward_backward(batch())
    return booster.gradients()["model.layers.0.input_layernorm.weight"]


def test_without_its_sum_a_gradient_is_wrong():
    model = llama(2)
    model(**batch()).loss.backward()
    expected = model.model.layers[0].input_layernorm.weight.grad
    try:
        found = run_ranks(broken_gradient, 2)[0]
    except RankError:
        return
    assert (found - expected).abs().max() > 1e-3 * expected.abs().max()
