"""Tensor parallelism on ranks: what it sends, what it keeps, what it refuses, and that the tests of it can fail."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import phalanx as px
from phalanx.cluster import comm
from phalanx.cluster.mesh import Mesh
from phalanx.errors import PlanError
from phalanx.kernels.split_cross_entropy import split_cross_entropy
from phalanx.parallel.tensor.entered import Entered
from phalanx.parallel.tensor.split_logits import SplitLogits
from phalanx.plan import Plan
from phalanx.testing import run_ranks
from phalanx.train.memory import TensorCount

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


def gathers_again(world):
    return Plan(tp=world, sp=True, tp_keep=False)


def sent_elements(plan, layers):
    booster = px.Booster(plan)
    booster.boost(llama(layers))
    with comm.ledger.record() as rows, booster.no_sync():  # norms' gradients under sp are summed once a step, counted apart
        booster.forward_backward(batch())
    return sum(wire for _, axis, _, _, wire in rows if axis == "tp") / 8


PLANS = [("tp2", 2, 8), ("tp4", 4, 8), ("tp2+sp", 2, 8), ("tp4+sp", 4, 8), (gathers_again(2), 2, 10), (gathers_again(4), 4, 10)]


@pytest.mark.parametrize(("plan", "world", "times"), PLANS)
def test_a_layer_sends_what_the_formula_says(plan, world, times):
    """8 (t - 1)/t x for each layer, forward and backward, 10 where inputs are gathered again; logits never travel."""
    activations = ROWS * LENGTH * WIDTH
    more, less = run_ranks(two_depths, world, plan)[0]
    assert (more - less) / 2 == times * (world - 1) / world * activations
    labels = ROWS * LENGTH
    around = less - 2 * times * (world - 1) / world * activations
    ends = 4 * activations + 6 * labels  # the embedding's sum, the head's backward sum; a maximum and two sums for each label
    ends += 2 * activations if Plan.of(plan).sp else 0  # the stream is joined after the last layer, and its gradient before the first
    assert around == ends * (world - 1) / world


def two_depths(plan):
    return sent_elements(plan, 4), sent_elements(plan, 2)


def held_between(plan):
    """The bytes that a layer holds between its forward and its backward."""
    held = []
    for layers in (4, 2):
        booster = px.Booster(plan)
        booster.boost(llama(layers))
        training = booster.trainings[0]
        booster.forward_backward(batch())
        with TensorCount() as count:
            loss, _ = training.objective(training.model, batch())
            held.append(count.now - count.kept)
            del loss
    return (held[0] - held[1]) / 2


def test_what_is_gathered_again_is_not_held():
    """With `sp` alone a layer holds its two gathered inputs, of all tokens; without them 1/t of everything."""
    whole = run_ranks(held_between, 1, "zero0")[0]
    activations = 8 * ROWS * LENGTH * WIDTH
    for world in (2, 4):
        again, kept = (run_ranks(held_between, world, plan)[0] for plan in (gathers_again(world), f"tp{world}+sp"))
        assert again == pytest.approx(whole / world, abs=64)  # a few scalars are on every rank
        assert kept - again == pytest.approx(2 * activations * (world - 1) / world, abs=64)


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
    loss = split_cross_entropy(part, labels, SplitLogits(axis).across(VOCABULARY)).sum()
    (2 * loss).backward()
    return abs(float(loss - expected)), float((part.grad - 2 * whole.grad[:, low:high]).abs().max())


def test_a_loss_over_parts_of_the_vocabulary():
    for error, gradient_error in run_ranks(split_loss, 3):
        assert error < 1e-10
        assert gradient_error < 1e-12


def read_logits():
    model = llama(2)
    model.eval()
    expected = model(**batch()).logits
    boosted, *_ = px.Booster("tp2").boost(model)
    return float((boosted(**batch()).logits - expected).abs().max())


def test_logits_that_a_person_reads_are_whole():
    assert max(run_ranks(read_logits, 2)) < 1e-12


class NormInside(torch.nn.Module):
    """A block whose attention norms the stream itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(12), torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Around(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = NormInside()

    def forward(self, x):
        return x + self.attention(x)


def norms_inside():
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 12), torch.nn.Sequential(Around(), Around()))


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
    assert all("1.0.attention makes something of the stream" in found for found in run_ranks(refused, 2, gathers_again(2), norms_inside))
    assert all("inputs cannot be guessed" in found for found in run_ranks(refused, 2, "tp2", without_layers))


def broken_gradient():
    """Gradients under tp2, with the sum over ranks where a split part begins taken out."""
    from phalanx.parallel.tensor import one

    one.enter_whole = lambda x, axis: Entered(x)
    booster = px.Booster("tp2")
    booster.boost(llama(2))
    booster.forward_backward(batch())
    return booster.gradients()["model.layers.0.input_layernorm.weight"]


def test_without_its_sum_a_gradient_is_wrong():
    model = llama(2)
    model(**batch()).loss.backward()
    expected = model.model.layers[0].input_layernorm.weight.grad
    found = run_ranks(broken_gradient, 2)[0]
    assert (found - expected).abs().max() > 1e-3 * expected.abs().max()


class Noisy(torch.nn.Module):
    """Ones through dropout at every kind of place, so that outputs show the masks: after an embedding, between heads, after a sum."""

    def __init__(self):
        super().__init__()
        self.mlp_in, self.mlp_out = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.inside, self.outside = torch.nn.Dropout(0.3), torch.nn.Dropout(0.3)
        self.seen = {}

    def forward(self, x):
        inner = self.inside(self.mlp_in(x).exp())
        self.seen["inside"] = inner == 0
        outer = self.outside(self.mlp_out(inner))
        self.seen["outside"] = outer == 0
        return x + outer


class NoisyStack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Noisy() for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def masks(plan):
    torch.manual_seed(5)
    stack = NoisyStack().double()
    rows = torch.randn(4, 16, WIDTH, dtype=torch.float64)
    booster = px.Booster(plan, forward=lambda model, batch: model(batch[0]))
    booster.boost(stack, None, lambda output, target: (output.sum(), 1), [(rows, rows)])
    found = []
    for _ in range(2):
        booster.forward_backward((rows[:2], rows[:2]))
        found.append({f"{name}{at}": block.seen[name] for at, block in enumerate(stack.blocks) for name in block.seen})
    return found


@pytest.mark.parametrize("plan", ["tp2", "tp2+sp"])
def test_masks_are_equal_where_activations_are_and_differ_where_they_are_split(plan):
    first, second, other, last = run_ranks(masks, 4, plan)  # tensor index 0 and 1 of data index 0, then of data index 1
    for place in ("inside", "outside"):
        dropped = [mask.flatten() for rank in (first, second, other, last) for step in rank for name, mask in step.items() if place in name]
        assert abs(torch.cat(dropped).double().mean() - 0.3) < 0.02
    for step in range(2):
        for name, mask in first[step].items():
            same = torch.equal(mask, second[step][name])
            assert same == (name.startswith("outside") and plan == "tp2"), name
            assert not torch.equal(mask, other[step][name])
        assert not torch.equal(first[step]["inside0"], first[step]["inside1"])
    assert not torch.equal(first[0]["inside0"], first[1]["inside0"])
    again = run_ranks(masks, 4, plan)[1]
    assert all(torch.equal(mask, again[step][name]) for step in range(2) for name, mask in second[step].items())


def noisy_gradients(plan):
    torch.manual_seed(0)
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=3, n_head=4, resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    booster = px.Booster(plan)
    booster.boost(GPT2LMHeadModel(config).double())
    booster.forward_backward(batch())
    return booster.gradients()


@pytest.mark.parametrize("plan", ["tp2", "tp2+sp"])
def test_recompute_draws_the_same_again(plan):
    kept, computed_again = run_ranks(noisy_gradients, 2, plan)[0], run_ranks(noisy_gradients, 2, f"{plan}+recompute")[0]
    assert all(torch.equal(kept[name], computed_again[name]) for name in kept)


def round_trip(plan, folder):
    from transformers import AutoModelForCausalLM

    booster = px.Booster(plan)
    booster.boost(llama(2, kv_heads=2).float())
    booster.save_model(folder / "saved")
    other = px.Booster(plan)
    torch.manual_seed(9)
    model = llama(2, kv_heads=2).float()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    other.boost(model)
    other.load_model(folder / "saved")
    expected = llama(2, kv_heads=2).float().state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()
    again = other.full_state_dict()
    return [name for name, value in expected.items() if not torch.equal(value, loaded[name]) or not torch.equal(value, again[name])]


@pytest.mark.parametrize(("plan", "world"), [("tp3", 3), ("zero3+tp2+sp", 4), ("tp2+pp2", 4)])
def test_files_of_transformers_go_out_and_in_bit_for_bit(plan, world, tmp_path):
    assert run_ranks(round_trip, world, plan, tmp_path)[0] == []


def started(plan, lazy):
    """The names whose start differs from that of one process."""
    with px.lazy() if lazy else nullcontext():
        model = llama(2, kv_heads=2)
    booster = px.Booster(plan)
    booster.boost(model)
    full = booster.full_state_dict()
    return [name for name, value in llama(2, kv_heads=2).state_dict().items() if not torch.equal(full[name], value)]


@pytest.mark.parametrize(("plan", "world"), [("tp3", 3), ("zero3+tp2+sp", 4), ("tp2+pp2", 4), ("zero3+pp2", 4)])
def test_a_start_does_not_depend_on_the_plan(plan, world):
    assert run_ranks(started, world, plan, False)[0] == run_ranks(started, world, plan, True)[0] == []


def generated(plan):
    model = llama(2).eval()
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    prompts = torch.tensor([[5, 6, 7], [9, 4, 2]])
    expected = model.generate(prompts, **options)
    boosted, *_ = px.Booster(plan).boost(model)
    return torch.equal(boosted.generate(prompts, **options), expected)


@pytest.mark.parametrize(("plan", "world"), [("tp2+sp", 2), ("zero3+tp2", 4), ("tp2+pp2", 4)])
def test_a_split_model_generates_as_before(plan, world):
    assert all(run_ranks(generated, world, plan))
