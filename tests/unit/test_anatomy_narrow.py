"""Large models of transformers are read from a narrower one of the same kind, and that reading is the same."""

import dataclasses

import pytest
import torch

from phalanx.anatomy import narrow, read_anatomy

SIZES = dict(vocab_size=91, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=32)


def build(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {
        "llama": dict(num_key_value_heads=2, intermediate_size=320),
        "qwen3": dict(num_key_value_heads=4, intermediate_size=320, head_dim=64),
        "phi3": dict(num_key_value_heads=4, intermediate_size=320, pad_token_id=0),
        "falcon": dict(new_decoder_architecture=True, num_kv_heads=4, ffn_hidden_size=640),
        "gpt2": dict(n_inner=None),
        "gpt_neox": dict(intermediate_size=320),
        "bloom": {},
        "opt": dict(ffn_dim=320, word_embed_proj_dim=256),
    }[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **extra}))


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "falcon", "gpt2", "gpt_neox", "bloom", "opt"])
def test_the_reading_of_a_narrower_model_is_that_of_the_model(name, monkeypatch):
    model = build(name)
    expected = read_anatomy(model, 2)
    monkeypatch.setattr(narrow, "LARGE_ELEMENTS", 0)
    small, factor = narrow.narrowed(model, 1)
    assert factor == 4 if name != "qwen3" else factor == 8
    assert sum(parameter.numel() for parameter in small.parameters()) < sum(parameter.numel() for parameter in model.parameters()) / 3
    assert dataclasses.asdict(read_anatomy(model, 2)) == dataclasses.asdict(expected)


def test_a_model_of_70_billion_parameters_is_read_without_its_memory():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    anatomy = read_anatomy(model, 8)
    assert len(anatomy.seams) == 160
    assert set(anatomy.heads.values()) == {(64, 8)}
    assert anatomy.seams[1].group.atoms == 28672
