"""The attention seam: every attention of a model arrives as a call, masks are stand-ins of one element, and nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from phalanx.anatomy import AttentionCall, AttentionSeam, Seen
from phalanx.errors import PlanError
from phalanx.verify.tiny import build_tiny
from tests.numerics.sequence_programs import Transformer

TOKENS = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(0))


def calls_of(model: nn.Module, **inputs: torch.Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []

    def attention(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return torch.zeros(*call.q.shape[:3], call.v.shape[3], dtype=call.v.dtype)

    with torch.no_grad(), AttentionSeam(model).exchanged(attention):
        model(**inputs)
    return calls


def said(call: AttentionCall) -> tuple[str, int | None, int | None]:
    return call.name, call.seen.before, call.seen.after


def test_transformers_says_windows_caps_and_causality():
    first, second = calls_of(build_tiny("tiny-gemma2")[0].eval(), input_ids=TOKENS, use_cache=False)
    assert said(first) == ("model.layers.0.self_attn", 3, 0)
    assert said(second) == ("model.layers.1.self_attn", None, 0)
    assert first.softcap == 50.0
    assert first.seen.by_document
    assert first.seen.by_padding
    (bert, _) = calls_of(build_tiny("tiny-bert")[0].eval(), input_ids=TOKENS)
    assert said(bert) == ("bert.encoder.layer.0.attention.self", None, None)


def test_a_model_of_ones_own_is_named():
    names = [said(call) for call in calls_of(Transformer(), ids=TOKENS)]
    assert names == [("blocks.0.attention", None, 0), ("blocks.1.attention", None, 0)]


def test_a_mask_of_keys_is_understood():
    (call, _) = calls_of(Transformer("encoder"), ids=TOKENS.masked_fill(torch.arange(9) > 6, 0))
    assert torch.equal(call.seen.shown, (torch.arange(9) <= 6).expand(2, -1))


def test_a_mask_of_ones_own_is_refused():
    with pytest.raises(PlanError, match=r"blocks.0.attention calls attention with a mask of shape \(9, 9\)"):
        calls_of(Transformer("mask"), ids=TOKENS)


def test_what_pytorch_would_refuse_or_spread_is_refused():
    q, mask = torch.zeros(2, 4, 9, 3), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    with AttentionSeam(Transformer()).exchanged(lambda call: call.q):
        with pytest.raises(PlanError, match="both a mask and is_causal"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
        with pytest.raises(PlanError, match="2 rows of queries and 1 of keys"):
            F.scaled_dot_product_attention(q, q[:1], q[:1])


def test_outside_nothing_has_changed():
    model, original = build_tiny("tiny-llama")[0].eval(), F.scaled_dot_product_attention
    implementation = model.config._attn_implementation
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
    calls_of(model, input_ids=TOKENS)
    with pytest.raises(ZeroDivisionError), AttentionSeam(model).exchanged(lambda call: 1 / 0):
        model(input_ids=TOKENS)
    assert F.scaled_dot_product_attention is original
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, before)


def test_a_stand_in_has_one_element_and_survives_slices():
    seam, seen = AttentionSeam(Transformer()), Seen(before=3)
    mask = seam.stand_in(seen, (2, 1, 4096, 4096), torch.device("cpu"))
    assert mask.shape == (2, 1, 4096, 4096)
    assert mask.untyped_storage().nbytes() == 1
    assert seam._seen("layer", mask[:, :, :, :100], False) is seen


def test_masks_that_say_more_than_limits_are_refused():
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    model = build_tiny("tiny-llama")[0]
    assert isinstance(model.config, LlamaConfig)
    with AttentionSeam(model).exchanged(lambda call: call.q), pytest.raises(PlanError, match="makes its mask by"):
        create_causal_mask(model.config, torch.zeros(1, 4, 8), None, None, or_mask_function=lambda b, h, q, k: q == k)
