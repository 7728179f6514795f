"""Attention of blocks: what is seen is computed once and nothing else, masks stay small, and every kernel says the same."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch

from phalanx.kernels import attention_cpu, attention_device, attention_masked, attention_reference, attention_sight, attention_trial
from phalanx.kernels.attention import Form, attend, choice, differentiate, merge
from phalanx.kernels.attention_sight import MASK_ELEMENTS, Sight, Tokens, mask, pieces
from phalanx.parallel.sequence.cut import reach_of

CPU = torch.device("cpu")
SIGHTS = [Sight(), Sight(after=0), Sight(before=3, after=0), Sight(before=2, after=2), Sight(before=100, after=0)]
BLOCKS = [((0, 4), (12, 16)), ((4, 12),), ((0, 16),), ((8, 12), (20, 24)), ((16, 20),)]


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_pieces_cover_what_is_seen_and_nothing_else(sight):
    for query_ranges in BLOCKS:
        for key_ranges in BLOCKS:
            queries, keys = Tokens(query_ranges), Tokens(key_ranges)
            seen = mask(sight, queries, keys, CPU)
            expected = torch.ones(queries.length, keys.length, dtype=torch.long) if seen is None else seen[0, 0].long()
            found = torch.zeros_like(expected)
            for piece in pieces(sight, queries, keys, num_rows=1):
                area = found[piece.queries, piece.keys]
                part = torch.ones_like(area) if piece.kind == "all" else torch.ones_like(area).tril()
                if piece.kind == "masked":
                    part = mask(sight, queries.take(piece.queries), keys.take(piece.keys), CPU)[0, 0].long()
                area += part
            assert torch.equal(found, expected), (query_ranges, key_ranges)


def test_the_parts_of_a_zigzag_need_no_mask():
    """The own block lies under one diagonal, an earlier one is half seen by all, a later one seen by the second half."""
    own, earlier, later = Tokens(((8, 12), (20, 24))), Tokens(((0, 4), (28, 32))), Tokens(((12, 20),))
    shown = lambda keys: [(p.queries, p.keys, p.kind) for p in pieces(Sight(after=0), own, keys, num_rows=1)]  # noqa: E731
    assert shown(own) == [(slice(0, 8), slice(0, 8), "causal")]
    assert shown(earlier) == [(slice(0, 8), slice(0, 4), "all")]
    assert shown(later) == [(slice(4, 8), slice(0, 8), "all")]


def test_masks_stay_small_and_windows_narrow_them():
    length, window = 128 * 1024, 4096
    found = pieces(Sight(before=window - 1, after=0), Tokens(((0, length),)), Tokens(((0, length),)), num_rows=1)
    sizes = [(p.queries.stop - p.queries.start) * (p.keys.stop - p.keys.start) for p in found]
    assert max(sizes) <= 4 * MASK_ELEMENTS
    assert sum(sizes) < 1.3 * length * window


def test_documents_narrow_the_keys():
    documents = torch.arange(4096).div(256, rounding_mode="floor")[None]
    reach = torch.stack([documents[0] * 256, documents[0] * 256 + 256], 1)
    tokens = Tokens(((0, 4096),), documents, reach=reach)
    found = pieces(Sight(after=0), tokens, tokens, num_rows=1)
    assert sum((p.queries.stop - p.queries.start) * (p.keys.stop - p.keys.start) for p in found) <= 4096 * 1024


def _tensors(dtype=torch.float64, heads=4, groups=2, queries=9, keys=11, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, queries), (groups, keys), (groups, keys), (heads, queries)
    return [torch.randn(2, *shape, width, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("masked", "causal"), [(False, False), (False, True), (True, False)])  # a mask says itself what is causal
def test_the_fused_kernel_equals_the_reference(masked, causal):
    q, k, v, grad = _tensors(keys=9 if causal else 11)
    seen = torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None
    if seen is not None:
        seen[0, 0, 3] = False
    options = dict(form=Form(scale=0.3), causal=causal, seen=seen, seed=0)
    assert choice(q, v, Form(scale=0.3), masked) is attention_cpu
    results = []
    for kernel in (attention_cpu, attention_reference):
        out, lse = kernel.forward(q, k, v, **options)
        results.append((out, lse, *kernel.backward(grad, q, k, v, out, lse, **options)))
    for fused, reference in zip(*results, strict=True):
        torch.testing.assert_close(fused, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_dtype_and_sums_wide(dtype):
    q, k, v, grad = _tensors(dtype)
    tokens, keys = Tokens(((0, 9),)), Tokens(((0, 11),))
    hidden = Tokens(((0, 11),), hidden=torch.zeros(2, 11, dtype=torch.bool).index_fill_(1, torch.tensor([0, 1]), True))
    for seen in (keys, hidden):
        out, lse = attend(q, k, v, Sight(after=0), tokens, seen, Form(scale=0.3))
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        gradients = differentiate(grad, q, k, v, out, lse, Sight(after=0), tokens, seen, Form(scale=0.3))
        exact = attend(*(t.double() for t in (q, k, v)), Sight(after=0), tokens, seen, Form(scale=0.3))
        torch.testing.assert_close(out.double(), exact[0], rtol=0, atol=8 * torch.finfo(dtype).eps)
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_merging_parts_of_the_keys_gives_the_whole():
    q, k, v, _ = _tensors()
    tokens, form = Tokens(((0, 9),)), Form(scale=3.0)
    out, lse = attend(q, k[:, :, :4], v[:, :, :4], Sight(), tokens, Tokens(((0, 4),)), form)
    merge(out, lse, *attend(q, k[:, :, 4:], v[:, :, 4:], Sight(), tokens, Tokens(((4, 11),)), form))
    whole = attend(q, k, v, Sight(), tokens, Tokens(((0, 11),)), form)
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


def test_nothing_to_see_is_none():
    q, k, v, _ = _tensors()
    assert attend(q, k, v, Sight(after=0), Tokens(((0, 9),)), Tokens(((9, 20),)), Form(scale=1.0)) is None


def _spoilt(name: str, change):
    """The kernel of processors with one of its functions changed."""
    kernel = ModuleType(f"spoilt.{name}")
    kernel.TRIED, kernel.forward, kernel.backward = attention_cpu.TRIED, attention_cpu.forward, attention_cpu.backward
    setattr(kernel, name, change)
    return kernel


def _scaled(function):
    return lambda *tensors, form, **options: function(*tensors, form=dataclasses.replace(form, scale=form.scale * 1.2), **options)


def _own_logsumexp(grad, q, k, v, out, lse, **options):
    """Forgets that out and log-sum-exp are those of more keys."""
    return attention_cpu.backward(grad, q, k, v, *attention_cpu.forward(q, k, v, **options), **options)


def _no_mask(*tensors, seen, **options):
    return attention_cpu.forward(*tensors, seen=None, **options)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("forward", _scaled(attention_cpu.forward)),
        ("backward", _scaled(attention_cpu.backward)),
        ("backward", _own_logsumexp),
        ("forward", _no_mask),
        ("forward", lambda *tensors: None),
    ],
)
def test_a_kernel_that_says_something_else_is_not_used(name, change):
    assert attention_trial.flaw(attention_cpu, CPU, torch.float32) is None
    assert attention_trial.flaw(attention_cpu, CPU, torch.bfloat16) is None
    assert attention_trial.flaw(_spoilt(name, change), CPU, torch.float32) is not None


@pytest.mark.parametrize(("kernel", "masked"), [(attention_device, False), (attention_masked, False), (attention_masked, True)])
def test_kernels_of_accelerators_are_called_as_pytorch_wants_it(kernel, masked):
    """Without data, by the rules that PyTorch has for shapes; their numbers are for `tests/gpu`."""
    q, k, v, grad = (torch.empty(2, heads, 50, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2, 4))
    seen = torch.empty(2, 1, 50, 50, dtype=torch.bool, device="meta") if masked else None
    options = dict(form=Form(scale=0.3), causal=not masked, seen=seen, seed=0)
    out, lse = kernel.forward(q, k, v, **options)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = kernel.backward(grad, q, k, v, out, lse, **options)
    assert [gradient.shape for gradient in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_documents_of_one_row_are_computed_one_by_one_without_masks(sight, monkeypatch):
    monkeypatch.setattr(attention_sight, "SHORTEST_TILE", 1)
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor([1, 9, 3, 4, 7]))[None]
    reach = reach_of(documents, None, 24)
    for query_ranges in BLOCKS:
        for key_ranges in BLOCKS:
            pick = lambda ranges: Tokens(ranges, torch.cat([documents[:, a:b] for a, b in ranges], 1), reach=reach)  # noqa: E731
            queries, keys = pick(query_ranges), pick(key_ranges)
            expected = mask(sight, queries, keys, CPU)[0, 0].long()
            found = torch.zeros_like(expected)
            for piece in pieces(sight, queries, keys, num_rows=1):
                area = found[piece.queries, piece.keys]
                part = torch.ones_like(area) if piece.kind == "all" else torch.ones_like(area).tril()
                if piece.kind == "masked":
                    taken = (Tokens(tokens.take(part).ranges) for tokens, part in ((queries, piece.queries), (keys, piece.keys)))
                    part = mask(sight, *taken, CPU)[0, 0].long()
                area += part
            assert torch.equal(found, expected), (query_ranges, key_ranges)
