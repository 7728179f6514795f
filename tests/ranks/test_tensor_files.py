"""Files of `transformers` go out and in bit for bit under tensor parallelism, and a rank reads and holds little more than its part."""

import pytest
import torch
from safetensors.torch import load_file

import phalanx as px
from phalanx.booster import file_weights
from phalanx.checkpoint.shard_file import ShardFile
from phalanx.testing import run_ranks
from phalanx.train.memory import TensorCount
from phalanx.verify.tiny import build_tiny

# Fused weights, tied ones, interleaved ones, ones renamed and stacked; uneven parts and blocks.
CASES = [("tiny-phi3", "tp4:2d", 4), ("tiny-bloom", "tp3+sp", 3), ("tiny-mixtral", "tp2+ep2", 4), ("tiny-qwen3-moe", "zero3+tp2", 4)]


def reload(name, plan, path, one_by_one=True):
    """Loads a directory into a model of zeros: names that differ, then bytes read, the rise while loading, and this rank's share."""
    if not one_by_one:
        file_weights._by_entry = lambda layout, sources: None
    model, _ = build_tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    booster = px.Booster(plan)
    booster.boost(model)
    read = []
    plain = ShardFile.read_into
    ShardFile.read_into = lambda self, key, start, out: (read.append(out.nbytes), plain(self, key, start, out))[1]
    with TensorCount() as count:
        booster.load_model(path)
    ShardFile.read_into = plain
    engine = booster.trainings[0].engine
    share = sum(piece.tensor.nbytes for piece in engine.pieces(""))
    booster.save_model(f"{path}-again")
    full = booster.full_state_dict()
    expected, _ = build_saved(name)
    differ = [key for key, value in expected.state_dict().items() if not torch.equal(full[key], value)]
    return differ, sum(read), count.peak - count.kept, share


def build_saved(name):
    torch.manual_seed(0)
    return build_tiny(name)


def entry_bytes(model):
    """The largest weight, where experts that are stacked in memory count one by one."""
    return max(value.nbytes // (value.shape[0] if "experts" in name else 1) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "plan", "world"), CASES)
def test_a_rank_reads_its_part_and_the_files_come_back_as_they_were(tmp_path, name, plan, world):
    model, _ = build_saved(name)
    model.save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    for differ, read, rise, share in run_ranks(reload, world, name, plan, str(tmp_path / "model")):
        assert differ == []
        assert rise <= 4 * entry_bytes(model)  # read, stacked, joined, cut
        assert read < 0.8 * sum(value.nbytes for value in stored.values())
        assert read <= 2 * share  # a part of the columns lies in windows with the others
    again = load_file(tmp_path / "model-again" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[key], value) for key, value in stored.items())


def test_reading_all_experts_would_be_noticed(tmp_path):
    model, _ = build_saved("tiny-mixtral")
    model.save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    _, read, rise, _ = run_ranks(reload, 4, "tiny-mixtral", "tp2+ep2", str(tmp_path / "model"), False)[0]
    assert rise > 4 * entry_bytes(model)
    assert read > 0.8 * sum(value.nbytes for value in stored.values())
