"""Lazy construction: the replayed tensors are those of eager construction, bit for bit, with the memory of about one."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest
import torch
import transformers as tf
from freed_memory import give_back_freed_memory
from torch import nn

from phalanx.errors import ConfigError
from phalanx.materialize import is_lazy, lazy, materialize, replay

SMALL = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
EXPERTS = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}


class Odd(nn.Module):
    """What constructors do: reads, slices, copies, casts, constants, numpy, views, tensors of 0 and 1 elements."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)] + torch.linspace(0, 1, 2).tolist()
        self.rates = nn.Parameter(torch.tensor(rates))
        self.embedding = nn.Embedding(11, 4, padding_idx=2)
        self.embedding.weight.data.mul_(3)
        self.embedding.weight.data[5].zero_()
        self.scale = nn.Parameter(torch.tensor(2.0))
        nn.init.normal_(self.scale)
        self.empty, self.one = nn.Parameter(torch.randn(0, 3)), nn.Parameter(torch.rand(1))
        self.half = nn.Linear(3, 5).half()
        table = np.arange(12, dtype=np.float32).reshape(3, 4)
        self.table = nn.Parameter(torch.zeros(3, 4))
        self.table.data.copy_(torch.from_numpy(table))
        self.register_buffer("position", torch.arange(6).view(2, 3) / 4, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool))[None])
        self.register_buffer("order", torch.randperm(7))
        self.norm = nn.BatchNorm1d(3)
        self.copied = nn.Parameter(self.embedding.weight.detach().clone().t().contiguous())
        self.tied = nn.Linear(4, 11, bias=False)
        self.tied.weight = self.embedding.weight
        self.trunc = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 3), std=2.0))
        self.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(9), mean=3.5))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 3)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 2), 0.5))
        self.chosen = nn.Parameter(torch.where(torch.arange(4) > 1, torch.rand(4), torch.zeros(4)))
        self.nonzero = nn.Parameter(torch.ones(3)[torch.eye(3)[1].nonzero()[0]])
        self.written = nn.Parameter(torch.rand(5, 2))
        self.written.data[1:3] = 4.0
        self.written.data[torch.tensor([0, 4]), 1] = -1.0
        self.written.data[3] = torch.tensor([8.0, 9.0])
        self.plain = nn.Parameter(torch.empty(2, 3, device=self.scale.device).fill_(7 if self.scale.device.type == "cpu" else 0))
        assert not self.plain.is_meta
        assert np.asarray(torch.arange(3)).sum() == torch.arange(3).numpy().sum() == 3


BUILDS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=37, n_embd=32, n_layer=2, n_head=4)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SMALL)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**SMALL, image_size=8, patch_size=4)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=37, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "swin": lambda: tf.SwinForImageClassification(tf.SwinConfig(**SWIN)),
    "tied llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "from_config bf16": lambda: tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SMALL), dtype=torch.bfloat16),
    "cast": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).to(torch.float64),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2),
    "lstm": lambda: nn.LSTM(3, 5, num_layers=2),
    "odd": Odd,
}


def tensors_of(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def build(function, *, seed=0):
    torch.manual_seed(seed)
    return function()


def build_lazily(function, *, seed=0):
    torch.manual_seed(seed)
    with lazy():
        return function()


def replayed(model):
    found = {}

    def receive(name, tensor):
        assert name not in found
        found[name] = tensor.clone()

    replay(model, receive)
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", BUILDS)
def test_replayed_values_equal_eager_construction(name):
    expected, model = tensors_of(build(BUILDS[name])), build_lazily(BUILDS[name])
    assert is_lazy(model)
    assert_equal(replayed(model), expected)
    assert_equal(replayed(model), expected)


@pytest.mark.parametrize("name", BUILDS)
def test_materialized_model_equals_eager_construction(name):
    expected, model = build(BUILDS[name]), build_lazily(BUILDS[name])
    parameters = list(model.parameters())
    assert materialize(model) is model
    assert not is_lazy(model)
    if name != "lstm":  # which refers to its parameters weakly
        assert all(old is new for old, new in zip(parameters, model.parameters()))
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == [(n, p.requires_grad) for n, p in expected.named_parameters()]
    assert_equal(tensors_of(model), tensors_of(expected))


def test_another_seed_gives_other_values():
    expected, model = tensors_of(build(BUILDS["gpt2"], seed=1)), build_lazily(BUILDS["gpt2"])
    found = replayed(model)
    assert not torch.equal(found["transformer.wte.weight"], expected["transformer.wte.weight"])


def test_a_materialized_model_trains():
    model = materialize(build_lazily(BUILDS["tied llama"]))
    expected = build(BUILDS["tied llama"])
    ids = torch.arange(10).view(2, 5)
    for each in (model, expected):
        each(input_ids=ids, labels=ids).loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in expected.named_parameters()})


def test_the_default_dtype_at_construction_counts_not_the_one_at_replay():
    torch.set_default_dtype(torch.float64)
    try:
        expected, model = tensors_of(build(Odd)), build_lazily(Odd)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(replayed(model), expected)
    assert torch.get_default_dtype() == torch.float32


def reseeding():
    layers = [nn.Linear(3, 3)]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers.append(nn.Linear(3, 3))
    layers.append(nn.Linear(3, 3))
    torch.manual_seed(5)
    layers.append(nn.Linear(3, 3))
    state = torch.get_rng_state()
    layers.append(nn.Linear(3, 3))
    torch.set_rng_state(state)
    layers.append(nn.Linear(3, 3))
    return nn.ModuleList(layers)


def test_seeds_and_states_set_during_construction_are_followed():
    assert_equal(replayed(build_lazily(reseeding)), tensors_of(build(reseeding)))


def test_models_built_one_after_the_other_continue_the_random_numbers():
    def both(context):
        torch.manual_seed(0)
        models = []
        for _ in range(2):
            with context():
                models.append(nn.Linear(4, 4))
        return models

    eager, recorded = both(torch.no_grad), both(lazy)
    assert_equal(replayed(recorded[1]), tensors_of(eager[1]))
    assert_equal(replayed(recorded[0]), tensors_of(eager[0]))


def test_a_replay_leaves_the_random_generator_alone():
    model = build_lazily(BUILDS["vit"])
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = []
    replay(model, lambda name, tensor: drawn.append(torch.rand(1)))
    torch.set_rng_state(state)
    assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(1) for _ in drawn]))


def test_an_eager_model_is_received_as_it_is():
    model = build(BUILDS["bert"])
    assert not is_lazy(model)
    assert_equal(replayed(model), tensors_of(model))


def test_recording_needs_no_memory_and_a_dropped_model_leaves_nothing():
    with lazy():
        model = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(4)))
    assert is_lazy(model)
    assert sum(p.numel() for p in model.parameters()) > 1 << 42


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda: torch.rand(1).item(), "rand"),
        (lambda: torch.randn(3).tolist(), "randn"),
        (lambda: bool(nn.Linear(2, 2).weight.any()), "uniform_"),
        (lambda: torch.randn(3, generator=torch.Generator()), "generator"),
        (lambda: torch.empty(3).resize_(4), "resize_"),
        (lambda: torch.empty(3).copy_(torch.empty(3, device="meta")), "copy_"),
        (lambda: lazy().__enter__(), "inside"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named), lazy():
        change()


def test_a_change_after_the_context_is_refused():
    model = build_lazily(lambda: nn.Linear(2, 2)).double()
    with pytest.raises(ConfigError, match="weight"):
        replay(model, lambda name, tensor: None)


def test_a_lazy_tensor_says_where_it_will_be():
    with lazy():
        weight = nn.Linear(2, 2).weight
        moved = torch.ops.aten._to_copy(weight * 2, device="cuda")  # `.to` asks for a build with CUDA
        assert (weight.device.type, weight.is_cpu, weight.is_meta) == ("cpu", True, False)
        assert ((moved + 1).device.type, moved.is_cuda, moved.is_cpu) == ("cuda", True, False)
        with pytest.raises(ConfigError, match="on cuda"):
            moved.normal_()
    assert weight.is_meta


def test_a_failure_inside_leaves_torch_as_it_was():
    sample = nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), lazy():
        raise ZeroDivisionError
    assert nn.init._no_grad_trunc_normal_ is sample
    assert not torch.ones(2).is_meta
    assert not is_lazy(build(BUILDS["lstm"]))


def resident_mb():
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * resource.getpagesize() / 2**20


def replay_growth(model, keep):
    """Bytes received and the growth of the resident set while they were, in MB."""
    give_back_freed_memory()
    before, peak, total, kept = resident_mb(), 0.0, 0.0, []

    def receive(name, tensor):
        nonlocal peak, total
        peak, total = max(peak, resident_mb()), total + tensor.nbytes / 2**20
        if keep:
            kept.append(tensor)

    replay(model, receive)
    return total, peak - before


def large_model(num_layers):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL | {"vocab_size": 4096, "hidden_size": 640, "num_hidden_layers": num_layers}))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident set from /proc")
def test_a_replay_of_a_large_model_needs_the_memory_of_a_few_tensors():
    build_lazily(BUILDS["llama"])  # imports what the first recording needs
    give_back_freed_memory()
    before = resident_mb()
    whole, cast, kept = (
        build_lazily(each) for each in (lambda: large_model(30), lambda: large_model(12).to(torch.bfloat16), lambda: large_model(6))
    )
    assert resident_mb() - before < 25
    total, growth = replay_growth(whole, keep=False)
    assert total > 200
    assert growth < 50
    total, growth = replay_growth(cast, keep=False)
    assert total > 45
    assert growth < 40
    total, growth = replay_growth(kept, keep=True)
    assert growth > 0.6 * total
