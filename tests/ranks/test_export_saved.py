"""What one process makes of the checkpoint of a run equals what the run itself would have written."""

import json

import pytest
import torch
from booster_programs import batch, boost, decoder, local
from test_booster_saving import tiny_llama

from phalanx.booster import Booster
from phalanx.booster.export_saved import export_saved
from phalanx.checkpoint import inspect
from phalanx.checkpoint.convert import convert
from phalanx.cli.main import main
from phalanx.errors import CheckpointError, DamageError
from phalanx.testing import run_ranks


def tiny_mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=37, use_cache=False, **sizes, **heads)).to(torch.bfloat16)


MODELS = {"llama": (tiny_llama, "zero3"), "mixture": (tiny_mixture, "zero2+ep2")}


def saved(folder, kinds):
    for kind in kinds:
        make, plan = MODELS[kind]
        model, booster = make(), Booster(plan)
        booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        rows = local(batch())
        booster.step({"input_ids": rows["words"], "labels": rows["labels"]})
        booster.save(folder / f"{kind}-run")
        booster.save_model(folder / f"{kind}-model")
    booster, _, _ = own(0)
    booster.step(local(batch()))
    booster.save(folder / "own-run")
    booster.save_model(folder / "own-model")


def own(seed):
    model = decoder(seed, dtype=torch.float32, dropout=0.1, layers=2)
    return boost("zero2", model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(saved, 2, folder, list(MODELS))
    return folder


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", [*MODELS, "own"])
def test_an_export_is_what_the_run_would_have_written(folder, tmp_path, kind):
    export_saved(folder / f"{kind}-run", tmp_path / "model")
    assert contents(tmp_path / "model") == contents(folder / f"{kind}-model")


def test_what_cannot_be_exported_is_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match="holds 1 models"):
        export_saved(folder / "own-run", tmp_path / "model", number=1)
    damaged = tmp_path / "run"
    convert(folder / "own-run", damaged, 10**6)
    content = bytearray((damaged / "rank-00000-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "rank-00000-00000.safetensors").write_bytes(content)
    for work in (lambda: export_saved(damaged, tmp_path / "model"), lambda: convert(damaged, tmp_path / "other", 10**6)):
        with pytest.raises(DamageError, match=r"rank-00000-00000\.safetensors is damaged"):
            work()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def continued(paths):
    """The weights, and a random number, after a step from each of these."""
    found = []
    for path in paths:
        booster, _, _ = own(5)
        booster.load(path)
        booster.step(local(batch(1)))
        found.append((booster.full_state_dict(), torch.rand(1)))
    return [
        all(torch.equal(found[0][0][name], value) for name, value in other.items()) and number == found[0][1] for other, number in found
    ]


def test_a_converted_checkpoint_goes_on_to_the_same_bits(folder, tmp_path):
    sizes = {"one": 10**9, "many": 700}
    for name, size in sizes.items():
        convert(folder / "own-run", tmp_path / name, size)
        assert inspect.check(tmp_path / name) == []
    counts = {name: len(list((tmp_path / name).glob("rank-*"))) for name in sizes}
    assert counts["one"] == 1
    assert counts["many"] > 30
    before, after = inspect.show(folder / "own-run"), inspect.show(tmp_path / "one")
    assert (after.world, after.saved_at_s, after.facts, after.num_elements) == (2, before.saved_at_s, before.facts, before.num_elements)
    assert {parts for _, _, parts in after.tensors.values()} == {1}
    assert run_ranks(continued, 2, [folder / "own-run", *(tmp_path / name for name in sizes)]) == [[True] * 3] * 2


def test_commands(folder, tmp_path, capsys):
    assert main(["checkpoint", "export", str(folder / "llama-run"), str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_files"] == 1
    assert contents(tmp_path / "model") == contents(folder / "llama-model")
    assert main(["checkpoint", "convert", str(folder / "own-run"), str(tmp_path / "new"), "--max-file", "2KB"]) == 0
    assert "files" in capsys.readouterr().out
    assert inspect.check(tmp_path / "new") == []
    for words, told in [
        (["convert", folder / "own-run"], "was not told where to write"),
        (["convert", folder / "own-run", folder / "own-run"], "cannot be converted to itself"),
        (["convert", folder / "own-run", folder / "own-model"], "is not a Phalanx checkpoint; saving there would delete it"),
        (
            ["export", folder / "own-run", tmp_path / "x", "--max-file", "1GB"],
            "--max-file is given to export. Allowed: --max-file with convert",
        ),
        (["show", folder / "own-run", tmp_path / "x"], "target is given to show"),
    ]:
        assert main(["checkpoint", *map(str, words)]) == 2
        assert told in capsys.readouterr().err
