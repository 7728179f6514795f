"""The fused cross entropy against its definition: values, gradients, odd shapes, what it keeps, what it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from phalanx.errors import ConfigError, ShapeError
from phalanx.kernels import cross_entropy
from phalanx.kernels.cross_entropy import causal_loss, cross_entropy_sum, fused

SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0), (2, 3, 4)]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def example(shape, dtype, vocab=37, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, vocab, generator=generator)).to(dtype)
    labels = torch.randint(0, vocab, shape, generator=generator)
    return logits, labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)


def value_and_grad(function, logits, labels, scale=0.25):
    logits = logits.detach().requires_grad_()
    loss, count = function(logits, labels)
    (loss * scale).backward()
    return loss.detach(), count, logits.grad


@pytest.mark.parametrize("chunk_bytes", [1, 37 * 4 * 2, cross_entropy.CPU_CHUNK_BYTES])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_count_and_gradient_equal_the_definition(shape, dtype, chunk_bytes, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_BYTES", chunk_bytes)
    logits, labels = example(shape, dtype)
    loss, count, grad = value_and_grad(fused, logits, labels)
    expected, expected_count, expected_grad = value_and_grad(cross_entropy.reference, logits, labels)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=1e-14 if dtype == torch.float64 else 5e-7, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)
    assert count.item() == expected_count.item() == (labels != -100).sum()


def test_gradcheck_with_the_incoming_gradient():
    logits, labels = example((4,), torch.float64, vocab=5)
    torch.autograd.gradcheck(lambda x: fused(x, labels)[0] * 0.7, (logits.requires_grad_(),))


@pytest.mark.parametrize(
    "view", [lambda x: x[:, :-1], lambda x: x.transpose(0, 1), lambda x: x[..., :30], lambda x: x[:1].expand(4, -1, -1)]
)
def test_strided_logits_need_no_copy(view):
    logits, _ = example((4, 6), torch.float64)
    part = view(logits)
    labels = torch.randint(0, 30, part.shape[:-1])
    loss, _, grad = value_and_grad(fused, part, labels)
    expected, _, expected_grad = value_and_grad(cross_entropy.reference, part, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_extreme_logits():
    logits, labels = example((6,), torch.float32)
    logits[:, 5] = 1e4
    logits[:, 7] = float("-inf")
    labels = labels.masked_fill(labels == 7, 0)
    loss, _, grad = value_and_grad(fused, logits, labels)
    expected, _, expected_grad = value_and_grad(cross_entropy.reference, logits, labels)
    assert loss.isfinite()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)


def test_ignored_rows_may_hold_anything_in_the_loss():
    logits, labels = torch.zeros(2, 3), torch.tensor([-100, 1])
    logits[0] = float("nan")
    assert fused(logits, labels)[0].isfinite()


@pytest.mark.usefixtures("either_form")
def test_another_ignored_index_and_short_labels():
    logits, labels = example((8,), torch.float64)
    labels = labels.masked_fill(labels == -100, 3).int()
    loss, count = cross_entropy_sum(logits, labels, ignore_index=3)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels.long(), ignore_index=3, reduction="sum"))
    assert count == (labels != 3).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_the_logits_is_kept_or_made_beside_the_gradient(dtype):
    logits, labels = example((64,), dtype, vocab=8192)
    logits.requires_grad_()
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and function._schema.name.split("::")[1] in ("empty", "_to_copy", "clone"):
                sizes.append(result.untyped_storage().nbytes())
            return result

    kept = []
    with Sizes(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss, _ = fused(logits, labels)
        forward = list(sizes)
        loss.backward()
    gradient_bytes = logits.untyped_storage().nbytes()
    assert max(forward) <= cross_entropy.CPU_CHUNK_BYTES
    assert sorted(sizes)[-2] <= cross_entropy.CPU_CHUNK_BYTES
    assert max(sizes) == gradient_bytes
    assert {t.data_ptr() for t in kept if t.numel() > 64} == {logits.data_ptr()}


def test_a_second_derivative_is_refused():
    logits, labels = example((3,), torch.float64)
    loss, _ = fused(logits.requires_grad_(), labels)
    with pytest.raises(ConfigError, match="second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.usefixtures("either_form")
def test_what_does_not_fit_is_refused():
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(ShapeError, match=r"\(2, 4\)"):
        cross_entropy_sum(logits, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ConfigError, match="float32"):
        cross_entropy_sum(logits, torch.zeros(2, 3))
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy_sum(logits, torch.full((2, 3), 5))
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy_sum(logits, torch.full((2, 3), -1))


def test_small_logits_take_the_reference_and_large_ones_the_fused_form():
    assert cross_entropy.choice(torch.empty(2, 5, 8)) is cross_entropy.reference
    assert cross_entropy.choice(torch.empty(4, 256, 8192, dtype=torch.bfloat16, device="meta")) is fused


@pytest.fixture(params=[0, cross_entropy.SMALL_BYTES], ids=["fused", "reference"])
def either_form(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "SMALL_BYTES", request.param)


@pytest.mark.usefixtures("either_form")
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(5)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_loss_equals_that_of_transformers(num_items, shifted, dtype):
    logits, labels = example((3, 7), dtype)
    keywords = {"num_items_in_batch": num_items, "shift_labels": labels.flip(1) if shifted else None}

    def of(function):
        return value_and_grad(lambda x, y: (function(logits=x, labels=y, vocab_size=37, **keywords), None), logits, labels)

    found, expected = of(causal_loss), of(ForCausalLMLoss)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[2], expected[2], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)


@pytest.mark.usefixtures("either_form")
def test_causal_loss_without_a_counted_label_is_what_torch_says():
    logits = torch.zeros(1, 4, 5)
    assert causal_loss(logits, torch.full((1, 4), -100), 5).isnan()


@pytest.mark.usefixtures("either_form")
def test_causal_loss_serves_as_the_loss_function_of_a_model():
    torch.manual_seed(0)
    config = tf.LlamaConfig(vocab_size=37, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    model = tf.LlamaForCausalLM(config).double()
    ids = torch.randint(0, 37, (2, 6))
    expected = model(input_ids=ids, labels=ids).loss
    model.loss_function = causal_loss
    found = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-6, atol=0)
    assert torch.equal(model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(20)).loss, found * 10 / 20)
