"""A run with divided experts is saved by logical names: it goes on under any other division, and exports whole."""

import pytest
import torch
from safetensors.torch import load_file

import phalanx as px
from phalanx.testing import run_ranks
from phalanx.verify.batches import make_batch
from phalanx.verify.program import use_plain_experts
from phalanx.verify.tiny import build_tiny


def run(plan, path, begun=None, loads=None):
    """Two steps with AdamW from the start or from a saved run, then everything that is saved; returns the weights."""
    torch.manual_seed(4)
    model, kind = build_tiny("tiny-mixtral")
    use_plain_experts(model)
    batches = [make_batch(kind, model.config, step) for step in range(2)]
    booster = px.Booster(plan, routing=px.Routing(loads=loads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, _, _, loader, _ = booster.boost(model, optimizer, None, batches)
    if begun:
        booster.load(begun)
    for batch in loader:
        booster.step(batch)
    booster.save(path)
    booster.save_model(f"{path}-model", format="huggingface")
    return {name: value.clone() for name, value in booster.full_state_dict().items()}


def test_a_run_goes_on_under_another_division(tmp_path):
    from transformers import AutoModelForCausalLM

    saved = run_ranks(run, 4, "zero1+ep2", f"{tmp_path}/a")[0]
    exported = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/a-model").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in saved.items())
    right = run_ranks(run, 2, "zero0", f"{tmp_path}/b", f"{tmp_path}/a")[0]
    loads = {"model.layers.0.mlp.experts": [5.0, 1.0, 4.0, 0.0]}  # experts of a rank that are no neighbours
    for world, plan, name in ((4, "zero3+ep4", "c"), (4, "zero1+ep2", "d")):
        found = run_ranks(run, world, plan, f"{tmp_path}/{name}", f"{tmp_path}/a", loads)[0]
        for key, value in right.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-6, msg=key)


def load_files(name, plan, path):
    """The weights after loading a directory of `transformers` into a model of zeros, and what the model then exports."""
    model, _ = build_tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    booster = px.Booster(plan)
    booster.boost(model)
    booster.load_model(path)
    booster.save_model(f"{path}-again")
    return {key: value.clone() for key, value in booster.full_state_dict().items()}


@pytest.mark.parametrize(("name", "plan"), [("tiny-mixtral", "ep2"), ("tiny-deepseek-v3", "zero3+ep2"), ("tiny-gpt-oss", "zero1")])
def test_files_of_transformers_are_read_and_written_as_they_are(tmp_path, name, plan):
    """Most families have their experts stacked in memory and one by one in files."""
    torch.manual_seed(0)
    model, _ = build_tiny(name)
    model.save_pretrained(tmp_path / "model")
    found = run_ranks(load_files, 2, name, plan, str(tmp_path / "model"))[0]
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    theirs, ours = load_file(tmp_path / "model" / "model.safetensors"), load_file(tmp_path / "model-again" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
