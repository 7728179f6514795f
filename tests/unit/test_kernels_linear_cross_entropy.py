"""The chunked loss equals projection and cross entropy made one after the other, and keeps no whole logits."""

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.kernels import linear_cross_entropy
from phalanx.kernels.linear_cross_entropy import chunk_rows, chunked, reference
from phalanx.train.memory import TensorCount

TOKENS, WIDTH, SIZE = 23, 6, 37


def inputs(dtype=torch.float64, bias=True, tokens=TOKENS, size=SIZE):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    labels = torch.randint(size, (tokens,), generator=generator)
    labels[3:7] = -100
    return draw(tokens, WIDTH), draw(size, WIDTH), labels, draw(size) if bias else None


def gradients(form, x, weight, labels, bias):
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None and leaf.requires_grad]
    loss, count = form(x, weight, labels, bias)
    return loss, count, torch.autograd.grad(3 * loss, leaves)


@pytest.mark.parametrize("rows", [1, 5, 23, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_every_chunk_size_gives_the_definition(monkeypatch, rows, bias):
    monkeypatch.setattr(linear_cross_entropy, "CPU_CHUNK_BYTES", rows * SIZE * 8)
    given = inputs(bias=bias)
    assert chunk_rows(given[1]) == rows
    (loss, count, found), (expected_loss, expected_count, expected) = (gradients(form, *given) for form in (chunked, reference))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    assert count == expected_count == TOKENS - 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_frozen_parts_get_no_gradient(frozen):
    given = list(inputs())
    given[frozen].requires_grad_(False)
    for one, other in zip(gradients(chunked, *given)[2], gradients(reference, *given)[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_no_label_counts():
    x, weight, labels, bias = inputs()
    loss, count, found = gradients(chunked, x, weight, torch.full_like(labels, -100), bias)
    assert float(loss.detach()) == int(count) == 0
    assert all(not gradient.any() for gradient in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_are_summed_in_float32(monkeypatch, dtype):
    monkeypatch.setattr(linear_cross_entropy, "CPU_CHUNK_BYTES", 2 * SIZE * 2)
    given = inputs(dtype)
    loss, _, found = gradients(chunked, *given)
    exact_loss, _, exact = gradients(
        reference, *(None if t is None else t.detach().double().requires_grad_() if t.is_floating_point() else t for t in given)
    )
    assert loss.dtype == torch.float32
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), exact_loss, rtol=step, atol=0)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() < 3 * step * other.abs().max()


def rise(form, tokens):
    """The most bytes above what was there, of a forward and backward."""
    x, weight, labels, _ = inputs(torch.float32, tokens=tokens, size=4096)
    with TensorCount() as count:
        form(x, weight, labels)[0].backward()
    return count.peak - count.kept


def test_whole_logits_are_never_in_memory(monkeypatch):
    """One chunk, its slope in the same memory, gradients and what a loss keeps for each token; the definition holds all logits."""
    monkeypatch.setattr(linear_cross_entropy, "CPU_CHUNK_BYTES", 1 << 20)
    tokens = 2048
    weight_bytes, input_bytes, logits_bytes = 4096 * WIDTH * 4, tokens * WIDTH * 4, tokens * 4096 * 4
    bound = (1 << 20) + 3 * weight_bytes + 3 * input_bytes + 64 * tokens
    assert rise(chunked, tokens) < bound < logits_bytes / 4
    assert rise(reference, tokens) > logits_bytes


def test_half_weights_have_one_gradient_in_float32(monkeypatch):
    """Beside it only that in half precision, and a few rows of their product."""
    monkeypatch.setattr(linear_cross_entropy, "CPU_CHUNK_BYTES", 1 << 14)
    x, weight, labels, _ = inputs(torch.bfloat16, tokens=8, size=16384)
    loss = chunked(x, weight, labels)[0]
    with TensorCount() as count:
        loss.backward()
    assert count.peak - count.kept < weight.nbytes + 3 * (1 << 14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_backward_may_come_twice(monkeypatch, dtype):
    monkeypatch.setattr(linear_cross_entropy, "CPU_CHUNK_BYTES", 100)
    x, weight, labels, bias = inputs(dtype)
    loss, leaves = chunked(x, weight, labels, bias)[0], (x, weight, bias)
    once, again = torch.autograd.grad(3 * loss, leaves, retain_graph=True), torch.autograd.grad(3 * loss, leaves)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_an_evaluation_forms_no_gradients(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "slope", lambda *arguments, **keywords: pytest.fail("a gradient was formed"))
    x, weight, labels, bias = inputs()
    with torch.no_grad():
        torch.testing.assert_close(chunked(x, weight, labels, bias), reference(x, weight, labels, bias))


def test_a_second_derivative_is_refused():
    x, weight, labels, bias = inputs()
    with pytest.raises(ConfigError, match="second derivative"):
        torch.autograd.grad(chunked(x, weight, labels, bias)[0], x, create_graph=True)
