"""The dtype policy of each precision term, and the lift that leaves no float32 number in a float64 model."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from phalanx.errors import PlanError
from phalanx.precision import DTypes, Precision, lift_to_float64

SMALL = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}


class Float32Outputs(TorchDispatchMode):
    """Names the operations that produced a float32 tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            self.names.append(str(function))
        return result


def build(name: str) -> torch.nn.Module:
    configs = {
        "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, SMALL | HEADS),
        "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, SMALL | HEADS),
        "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4}),
        "t5": (
            tf.T5ForConditionalGeneration,
            tf.T5Config,
            {"vocab_size": 37, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        ),
        "bloom": (tf.BloomForCausalLM, tf.BloomConfig, {"vocab_size": 37, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        "bert": (tf.BertForMaskedLM, tf.BertConfig, SMALL),
        "vit": (tf.ViTForImageClassification, tf.ViTConfig, SMALL | {"image_size": 8, "patch_size": 4, "num_labels": 5}),
    }
    model, config, fields = configs[name]
    torch.manual_seed(0)
    return model(config(**fields, attn_implementation="eager")).double()


def batch_of(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64), "labels": torch.tensor([0, 4, 2])}
    ids = torch.randint(3, 37, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "t5", "bloom", "bert", "vit"])
def test_no_float32_number_is_left_in_forward_and_backward(name):
    model, batch = build(name), batch_of(name)
    with Float32Outputs() as seen, lift_to_float64():
        loss = model(**batch).loss
        loss.backward()
    assert seen.names == []
    assert loss.dtype == torch.float64
    assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())


def test_without_the_lift_a_float64_llama_computes_in_float32():
    model = build("llama")
    with Float32Outputs() as seen:
        loss = model(**batch_of("llama")).loss
    assert seen.names
    assert loss.dtype == torch.float32


def differentiate_by_method(loss, weight):
    loss.backward()
    return weight.grad


def differentiate_by_function(loss, weight):
    torch.autograd.backward([loss], inputs=[weight])
    return weight.grad


def differentiate_by_grad(loss, weight):
    return torch.autograd.grad(loss, weight)[0]


@pytest.mark.parametrize("differentiate", [differentiate_by_method, differentiate_by_function, differentiate_by_grad])
def test_recomputed_forward_is_lifted_too(differentiate):
    x = torch.randn(3, 4, dtype=torch.float64)

    def block(weight):
        return torch.softmax((x * weight).float() * torch.arange(4, dtype=torch.float32), -1, dtype=torch.float32).type_as(x)

    plain, recomputed = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with Float32Outputs() as seen, lift_to_float64():
        found = differentiate(checkpoint(block, recomputed, use_reentrant=False).square().sum(), recomputed)
        expected = differentiate(block(plain).square().sum(), plain)
    assert seen.names == []
    assert torch.equal(found, expected)


def test_every_spelling_of_float32_is_lifted_and_the_default_dtype_comes_back():
    x = torch.arange(3)
    with lift_to_float64():
        made = [
            x.float(),
            x.to(torch.float32),
            x.to("cpu", torch.float32),
            x.to(dtype=torch.float),
            x.type(torch.float32),
            x.type(torch.FloatTensor),
            x.type("torch.FloatTensor"),
            x / 2,
            torch.zeros(2),
            torch.tensor([0.5]),
            torch.full((), 0.5, dtype=torch.float32),
            torch.ones(2, dtype=torch.float32),
            x.new_zeros(2, dtype=torch.float32),
            torch.linspace(0, 1, 3),
            x.sum(dtype=torch.float32),
            torch.empty(2, dtype=torch.float32),
            torch.nn.functional.softmax(x, -1, dtype=torch.float32),
        ]
    assert {t.dtype for t in made} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32
    assert x.float().dtype == torch.float32


def test_the_default_dtype_comes_back_after_a_failure():
    with pytest.raises(ZeroDivisionError), lift_to_float64():
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("term", "dtype", "expected"),
    [
        ("fp32", FP32, (FP32, FP32, FP32, FP32)),
        ("fp32", FP64, (FP64, FP64, FP64, FP64)),
        ("fp32", BF16, (BF16, BF16, FP32, FP32)),
        ("bf16", FP32, (BF16, FP32, FP32, FP32)),
        ("bf16", BF16, (BF16, FP32, FP32, FP32)),
        ("bf16", FP16, (BF16, FP32, FP32, FP32)),
        ("bf16", FP64, (FP64, FP64, FP64, FP64)),
        ("bf16", torch.int64, (torch.int64,) * 4),
        ("fp16", FP32, (FP16, FP32, FP32, FP32)),
        ("fp16", torch.complex64, (torch.complex64,) * 4),
    ],
)
def test_parameter_dtypes_follow_the_term(term, dtype, expected):
    compute, master, gradient, reduce = expected
    found = Precision.of(term).for_parameter(dtype)
    assert found == DTypes(compute=compute, master=master, gradient=gradient, reduce=reduce)
    assert found.has_master == (compute != master)


def test_only_fp16_scales_the_loss():
    assert [Precision.of(term).scales_loss for term in ("fp32", "bf16", "fp16")] == [False, False, True]


def test_a_term_without_policy_is_refused():
    with pytest.raises(PlanError, match="fp8"):
        Precision.of("fp8")


def test_inputs_are_cast_where_they_are_float32_or_half():
    Pair = namedtuple("Pair", "left right")
    batch = {
        "x": torch.ones(2),
        "ids": torch.arange(2),
        "nested": [Pair(torch.ones(1, dtype=FP16), "text"), (torch.ones(1, dtype=FP64), None)],
    }
    cast = Precision.of("bf16").cast_inputs(batch)
    assert (cast["x"].dtype, cast["ids"].dtype) == (BF16, torch.int64)
    assert isinstance(cast["nested"][0], Pair)
    assert cast["nested"][0].left.dtype == BF16
    assert cast["nested"][1][0].dtype == FP64
    assert Precision.of("fp32").cast_inputs(batch) is batch


def test_float32_accumulation_of_bfloat16_gradients_stays_within_one_thousandth():
    torch.manual_seed(0)
    gradients = [(torch.randn(200) * 0.1 + 1).bfloat16() for _ in range(64)]
    exact = torch.stack(gradients).double().sum(0)

    def error(dtype):
        total = torch.zeros(200, dtype=dtype)
        for gradient in gradients:
            total += gradient
        return ((total - exact).abs().max() / exact.abs().max()).item()

    assert error(Precision.of("bf16").for_parameter(FP32).gradient) < 1e-3
    assert error(BF16) > 1e-3
