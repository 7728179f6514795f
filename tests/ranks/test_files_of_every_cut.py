"""Files of `transformers` come back bit for bit from every size of tensor and pipeline groups, and no rank loads the whole model."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

import phalanx as px
from phalanx.errors import CheckpointError
from phalanx.testing import RankError, run_ranks

GROUPS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3) if tp * pp > 1]
DEFAULT = [(2, 3)]


def fused(seed):
    """One matrix for queries, keys and values of (8, 4) heads, one for gate and up, 37 tokens, 3 layers."""
    torch.manual_seed(seed)
    config = Phi3Config(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config)


def plan_of(tp, pp):
    return "+".join([f"tp{tp}"] * (tp > 1) + [f"pp{pp}+micro1"] * (pp > 1))


def round_trip(plan, path):
    booster = px.Booster(plan)
    booster.boost(fused(1))
    booster.load_model(path)
    booster.save_model(f"{path}-again")


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(*cell, marks=[] if cell in DEFAULT else pytest.mark.slow) for cell in GROUPS])
def test_what_goes_in_comes_out(tmp_path, tp, pp):
    fused(0).save_pretrained(tmp_path / "model")
    run_ranks(round_trip, tp * pp, plan_of(tp, pp), str(tmp_path / "model"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "model-again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_file_of_another_shape_is_refused_by_name(tmp_path):
    fused(0).save_pretrained(tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.self_attn.qkv_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][::2].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(RankError) as caught:
        run_ranks(round_trip, 4, "tp2+pp2+micro1", str(tmp_path / "model"))
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert name in str(caught.value)


LARGE = LlamaConfig(
    vocab_size=4096, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=12
)


def resident_bytes():
    """What this process holds that is no file's."""
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("RssAnon:") + 1])


def rise_while_loading(plan, path):
    """The highest that this process' memory stood above its start, of a model that was described and then loaded."""
    start = resident_bytes()
    highest, done = [start], threading.Event()

    def watch():
        while not done.is_set():
            highest[0] = max(highest[0], resident_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    with px.lazy():
        model = LlamaForCausalLM(LARGE)
    booster = px.Booster(plan)
    booster.boost(model)
    booster.load_model(path)
    done.set()
    thread.join()
    return highest[0] - start


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "tp4", "zero3+tp2", "pp3+micro1"])
def test_no_rank_holds_the_whole_model_while_it_loads(tmp_path, plan):
    LlamaForCausalLM(LARGE).save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert size > 190e6
    assert sum(run_ranks(rise_while_loading, 3 if "pp3" in plan else 4, plan, str(tmp_path / "model"))) < 2.5 * size
