"""What is exported is what `transformers` writes itself, and it loads it strictly; ties are stored once."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.checkpoint.export import read_safetensors, write_safetensors


def tiny_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("max_shard_bytes", [20_000, 1 << 30])
@pytest.mark.parametrize("tied", [False, True])
def test_exports_equal_those_of_transformers_and_load_strictly(tmp_path, tied, max_shard_bytes):
    model = tiny_model(tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    model.config.save_pretrained(tmp_path / "ours")
    files = write_safetensors(tmp_path / "ours", model.state_dict().items(), max_shard_bytes, tied=["lm_head.weight"] if tied else [])
    assert [file.name for file in files] == sorted(file.name for file in (tmp_path / "theirs").glob("*.safetensors"))
    for file in files:
        assert file.read_bytes() == (tmp_path / "theirs" / file.name).read_bytes()
    loaded, report = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    with read_safetensors(tmp_path / "theirs") as stored:
        names = model.state_dict().keys() - ({"lm_head.weight"} if tied else set())
        assert set(stored) == names
        assert all(torch.equal(stored.read(name), model.state_dict()[name]) for name in names)
