"""The kernels of accelerators against the definition, with their log-sum-exp and their gradients."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels import attention_device, attention_masked, attention_package, attention_reference, attention_trial
from phalanx.kernels.attention import Form, choice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]
# What each kernel is for; what it cannot do is left to another one.
CASES = [
    *((attention_package, seen_by) for seen_by in ("all", "causal", "cap")),
    *((attention_device, seen_by) for seen_by in ("all", "causal")),
    *((attention_masked, seen_by) for seen_by in ("all", "causal", "mask")),
]


@pytest.mark.parametrize(("kernel", "seen_by"), CASES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("keys", [96, 100, 103])
def test_fused_attention_equals_the_definition(kernel, seen_by, groups, keys):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda heads, tokens: torch.randn(2, heads, tokens, 64, generator=generator, device="cuda").bfloat16()  # noqa: E731
    queries = keys if seen_by == "causal" else 100
    q, k, v, grad = draw(4, queries), draw(groups, keys), draw(groups, keys), draw(4, queries)
    form = Form(scale=0.125, softcap=2.0 if seen_by == "cap" else None)
    if kernel is attention_package:
        pytest.importorskip("flash_attn")
    assert kernel.takes(q, v, softcap=form.softcap, dropout=0.0, masked=seen_by == "mask")
    seen = torch.rand(2, 1, queries, keys, generator=generator, device="cuda") < 0.5 if seen_by == "mask" else None
    if seen is not None:
        seen[1, 0, 7] = False
    options = {"form": form, "causal": seen_by == "causal", "seen": seen, "seed": 0}
    out, lse = kernel.forward(q, k, v, **options)
    wide = [tensor.double() for tensor in (q, k, v)]
    exact, exact_lse = attention_reference.forward(*wide, **options)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=3e-2)
    found = kernel.backward(grad, q, k, v, out, lse, **options)
    expected = attention_reference.backward(grad.double(), *wide, exact, exact_lse, **options)
    for left, right in zip(found, expected, strict=True):
        assert float((left.double() - right).abs().max()) < 3e-2 * float(right.abs().max())


@pytest.mark.parametrize("kernel", [attention_device, attention_masked])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_trial_finds_them_sound(kernel, dtype):
    assert attention_trial.flaw(kernel, torch.device("cuda"), dtype) is None


def test_masks_do_not_fall_back_to_the_definition():
    q = torch.randn(1, 4, 64, 64, device="cuda").bfloat16()
    assert choice(q, q, Form(scale=0.125), masked=True) is attention_masked
    assert choice(q, q, Form(scale=0.125), masked=False) in (attention_package, attention_device)
