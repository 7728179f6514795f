"""Recomputed activations: the same numbers with dropout, less kept, no cache filled twice, and out of the way elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.errors import ConfigError
from phalanx.parallel import recompute

SMALL = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
MODES = ["full", "selective", 0.5]


class Layer(nn.Module):
    """A block with dropouts whose input and output are tuples, called with keywords."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.3)
        self.num_calls = 0

    def forward(self, pair, *, scale=None):
        x, y = pair
        self.num_calls += 1
        hidden = self.drop(torch.nn.functional.gelu(self.up(x)) * scale)
        return x + self.drop(self.down(hidden)), y


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        pair = (x, x.sum())
        for layer in self.layers:
            pair = layer(pair, scale=x.new_tensor(1.5))
        return pair[0].square().sum()


class Counter(TorchDispatchMode):
    def __init__(self, *names):
        super().__init__()
        self.calls = dict.fromkeys(names, 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in self.calls:
            self.calls[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def gradients(model, compute):
    model.zero_grad()
    torch.manual_seed(7)
    compute(model).backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"drawn after": torch.rand(3)}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mode", MODES)
def test_dropout_of_a_user_module_is_bit_equal(mode):
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(5, 8)
    expected = gradients(model, lambda m: m(x))
    recompute.apply(model.layers, mode)
    assert_equal(gradients(model, lambda m: m(x)), expected)
    calls = [layer.num_calls for layer in model.layers]
    assert calls == ([2, 3, 3] if mode == 0.5 else [3, 3, 3])


def transformer(name):
    torch.manual_seed(0)
    heads = {"num_key_value_heads": 2}
    build = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, **heads, attention_dropout=0.3)),
        "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=37, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.3, attn_pdrop=0.3)),
        "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=37, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.3)),
        "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SMALL, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=37, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.3, decoder_start_token_id=0)
        ),
    }
    model = build[name]().train()
    return model, [m for m in model.modules() if isinstance(m, tf.modeling_layers.GradientCheckpointingLayer)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "bert", "t5"])
def test_dropout_of_transformers_is_bit_equal(name, mode):
    model, blocks = transformer(name)
    ids = torch.randint(3, 37, (2, 6))
    expected = gradients(model, lambda m: m(input_ids=ids, labels=ids).loss)
    recompute.apply(blocks, mode)
    assert_equal(gradients(model, lambda m: m(input_ids=ids, labels=ids).loss), expected)


def test_without_kept_random_state_the_gradients_would_differ():
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(5, 8)
    expected = gradients(model, lambda m: m(x))
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda *a, forward=forward, **k: torch.utils.checkpoint.checkpoint(
            forward, *a, use_reentrant=False, preserve_rng_state=False, **k
        )
    found = gradients(model, lambda m: m(x))
    assert not torch.equal(found["layers.0.up.weight"], expected["layers.0.up.weight"])


def test_a_cache_that_is_passed_in_training_is_not_filled():
    model, blocks = transformer("llama")
    ids = torch.randint(3, 37, (2, 6))
    expected = gradients(model, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss)
    recompute.apply(blocks, "full")
    cache = tf.DynamicCache(config=model.config)
    assert_equal(gradients(model, lambda m: m(input_ids=ids, labels=ids, cache=cache, use_cache=True).loss), expected)
    assert cache.get_seq_length() == 0


def test_a_filled_cache_is_refused_in_training():
    model, blocks = transformer("llama")
    ids = torch.randint(3, 37, (2, 6))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).cache
    recompute.apply(blocks, 0.5)
    with pytest.raises(ConfigError, match="LlamaDecoderLayer"):
        model(input_ids=ids, labels=ids, cache=cache)


def test_generation_uses_its_cache_in_training_and_eval_mode():
    model, blocks = transformer("llama")
    model.config.attention_dropout = 0.0
    ids = torch.randint(3, 37, (1, 4))
    for training in (True, False):
        recompute.remove(blocks)
        for block in blocks:
            block.self_attn.attention_dropout = 0.0
        model.train(training)
        expected = model.generate(ids, max_new_tokens=5, do_sample=False)
        recompute.apply(blocks, "full")
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
        with torch.no_grad():
            assert model(input_ids=ids, use_cache=True).cache.get_seq_length() == 4


def test_selective_keeps_products_and_attention_and_recomputes_the_rest():
    model, blocks = transformer("llama")
    for block in blocks:
        block.self_attn.attention_dropout = 0.0
    ids = torch.randint(3, 37, (2, 6))
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def count():
        with Counter("aten::mm", attention, "aten::silu") as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        return counter.calls

    plain = count()
    recompute.apply(blocks, "selective")
    selective = count()
    recompute.apply(blocks, "full")
    full = count()
    assert plain[attention] == selective[attention] == 4
    assert full[attention] == 8
    assert selective["aten::mm"] == plain["aten::mm"] < full["aten::mm"]
    assert selective["aten::silu"] == full["aten::silu"] == 2 * plain["aten::silu"]


def test_module_hooks_of_the_block_run_once():
    model, x, seen = Stack(), torch.randn(2, 8), []
    recompute.apply(model.layers, "full")
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
        layer.register_forward_hook(lambda module, args, output: seen.append("after"))
    model(x).backward()
    assert seen == ["before", "after"] * 3


def test_no_gradients_and_eval_mode_leave_the_block_as_it_is():
    model, x = Stack(), torch.randn(2, 8)
    recompute.apply(model.layers, "full")
    with torch.no_grad():
        model(x)
    model.eval()
    model(x).backward()
    assert [layer.num_calls for layer in model.layers] == [2, 2, 2]


def test_applying_twice_replaces_and_removing_restores():
    model = Stack()
    recompute.apply(model.layers, "full")
    recompute.apply(model.layers, "full")
    model(torch.randn(2, 8)).backward()
    assert [layer.num_calls for layer in model.layers] == [2, 2, 2]
    recompute.remove(model.layers)
    assert all("forward" not in layer.__dict__ for layer in model.layers)


def test_a_forward_set_on_the_instance_is_kept():
    layer = Layer()
    layer.forward = own = lambda pair, scale=None: (pair[0] * 2, pair[1])
    recompute.apply([layer], "full")
    assert torch.equal(layer((torch.ones(1, requires_grad=True), 0), scale=1)[0], torch.tensor([2.0]))
    recompute.remove([layer])
    assert layer.forward is own


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_compiled_block_recomputes(mode):
    class Compiled(Layer):
        def forward(self, pair):
            return pair[0] + self.down(torch.nn.functional.gelu(self.up(pair[0])))

    torch.manual_seed(0)
    layer, x = Compiled(), torch.randn(2, 8)
    expected = gradients(layer, lambda block: block((x, 0)).square().sum())
    recompute.apply([layer], mode)
    layer.compile(backend="aot_eager", fullgraph=True)
    found = gradients(layer, lambda block: block((x, 0)).square().sum())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_deep_copy_recomputes_its_own_block():
    model, x = Stack(), torch.randn(2, 8)
    recompute.apply(model.layers, "full")
    copied = copy.deepcopy(model)
    copied(x).backward()
    assert [layer.num_calls for layer in copied.layers] == [2, 2, 2]
    assert all(p.grad is None for p in model.parameters())


def test_input_changed_in_place_before_the_backward_is_noticed():
    layer = Layer()
    recompute.apply([layer], "full")
    x = torch.randn(2, 8)
    out = layer((x, 0), scale=torch.ones(()))[0].sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward()


@pytest.mark.parametrize(
    ("num_blocks", "fraction", "chosen"),
    [(4, 0.5, [1, 3]), (3, 0.5, [1, 2]), (5, 0.2, [4]), (2, 0.01, [1]), (3, 0.0, []), (3, 1.0, [0, 1, 2]), (0, 0.5, [])],
)
def test_a_fraction_is_spread_evenly(num_blocks, fraction, chosen):
    assert [index for index, on in enumerate(recompute.spread(num_blocks, fraction)) if on] == chosen


@pytest.mark.parametrize("mode", ["half", 1.5, -0.1])
def test_unknown_modes_are_refused(mode):
    with pytest.raises(ConfigError, match="recompute mode"):
        recompute.apply([Layer()], mode)
