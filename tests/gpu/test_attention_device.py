"""The kernel of accelerators against the definition, with its log-sum-exp and its gradients."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels import attention_device, attention_reference
from phalanx.kernels.attention import Form, choice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flash_attention_equals_the_definition(causal, groups):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda heads, tokens: torch.randn(2, heads, tokens, 64, generator=generator, device="cuda").bfloat16()  # noqa: E731
    q, k, v, grad = draw(4, 100), draw(groups, 100), draw(groups, 100), draw(4, 100)
    form = Form(scale=0.125)
    assert choice(q, v, form, masked=False) is attention_device
    options = {"form": form, "causal": causal, "seen": None, "seed": 0}
    out, lse = attention_device.forward(q, k, v, **options)
    wide = [tensor.double() for tensor in (q, k, v)]
    exact, exact_lse = attention_reference.forward(*wide, **options)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=3e-2)
    found = attention_device.backward(grad, q, k, v, out, lse, **options)
    expected = attention_reference.backward(grad.double(), *wide, exact, exact_lse, **options)
    for left, right in zip(found, expected, strict=True):
        assert float((left.double() - right).abs().max()) < 3e-2 * float(right.abs().max())
