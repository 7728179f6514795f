"""What is read of models for tensor parallelism, from their forwards alone, and that a wrong reading does not pass."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.anatomy import Unrunnable, proof, read_anatomy
from phalanx.anatomy.groups import Found, Group
from phalanx.anatomy.specimen import make_specimen
from phalanx.anatomy.split import Split
from phalanx.verify.tiny import build_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
import tensor_programs


def build(name):
    torch.manual_seed(0)
    if name.startswith("tiny-"):
        return build_tiny(name)[0]
    built = getattr(tensor_programs, name)()
    return built[0] if isinstance(built, tuple) else built


@pytest.mark.parametrize(
    ("name", "num_groups", "heads"),
    [
        ("tiny-llama", 8, {(8, 4)}),
        ("tiny-gpt2", 8, {(8, 8)}),
        ("tiny-falcon", 4, {(8, 4)}),
        ("tiny-gpt-neox", 4, {(8, 8)}),
        ("tiny-phi3", 4, {(8, 4)}),
        ("tiny-t5", 10, {(8, 8)}),
        ("tiny-whisper", 10, {(4, 4), (8, 8)}),
        ("tiny-vit", 4, {(8, 8)}),
        ("fused", 6, {(7, 7)}),
        ("counted", 6, {(6, 3)}),
        ("relative", 4, {(5, 5)}),
        ("heads_4_1", 4, {(4, 1)}),
    ],
)
def test_groups_and_heads(name, num_groups, heads):
    anatomy = read_anatomy(build(name), 2)
    assert len(anatomy.seams) == num_groups
    assert set(anatomy.heads.values()) == heads
    assert not {name for name, role in anatomy.roles.items() if role == "whole" and "block" in name}


def test_every_block_gets_the_reading_of_the_one_that_stands_for_it():
    anatomy = read_anatomy(build("tiny-llama"), 2)
    for layer in range(4):
        roles = {name.rpartition(".")[2]: role for name, role in anatomy.roles.items() if name.startswith(f"model.layers.{layer}.")}
        assert roles == dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column") | dict.fromkeys(
            ("o_proj", "down_proj"), "row"
        )
    assert anatomy.vocabulary == ("lm_head", "model.embed_tokens")
    assert anatomy.num_layers == 4
    assert anatomy.ties == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_parameters_between_columns_and_rows():
    group = read_anatomy(build("counted"), 2).seams[0].group
    assert group.parameters["blocks.0.attention.temperature"] == (0, Split.even(6))
    assert group.parameters["blocks.0.attention.scale"] is None


def test_the_model_is_left_as_it_was():
    model = build("tiny-gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = list(model.transformer.h)
    counts = [layer.attn.num_heads for layer in layers]
    read_anatomy(model, 4)
    assert list(model.transformer.h) == layers
    assert [layer.attn.num_heads for layer in layers] == counts
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not module._forward_hooks and "forward" not in vars(module) for module in model.modules())


def test_heads_that_depend_on_each_other_stay_whole_and_say_why():
    anatomy = read_anatomy(build("tiny-olmo2"), 2)
    assert anatomy.heads == {}
    assert "depend on each other" in anatomy.whole["model.layers.0.self_attn.q_proj"]
    assert "model.layers.0.self_attn.o_proj" in anatomy.mixing


def test_more_parts_than_heads():
    anatomy = read_anatomy(build("heads_4_1"), 5)
    assert anatomy.heads == {}
    assert "4 heads for 5 ranks" in anatomy.whole["model.layers.1.self_attn.o_proj"]


def test_a_table_overrules_the_reading():
    anatomy = read_anatomy(build("tiny-gpt2"), 2, overrule={r".*\.mlp\.c_fc": "told so"})
    assert anatomy.whole["transformer.h.3.mlp.c_fc"] == "told so"
    assert {item.group.kind for item in anatomy.seams} == {"heads"}


def test_a_weight_that_is_read_elsewhere_is_not_split():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(11, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))

        def forward(self, tokens):
            x = self.tokens(tokens)
            for block in self.blocks:
                x = x + block(x)
            return x @ self.tokens.weight.T

    anatomy = read_anatomy(Tied(), 2)
    assert anatomy.vocabulary == ()
    assert len(anatomy.seams) == 2
    assert anatomy.whole["tokens"] == "its weight is read outside of it"


def test_a_wrong_split_is_not_believed():
    """The negative control of the proof: query heads in another order than their keys."""
    specimen = make_specimen(build("tiny-llama"), None)
    columns = {f"model.layers.0.self_attn.{name}_proj": Split.even(4, 8) for name in "q"}
    columns |= {f"model.layers.0.self_attn.{name}_proj": Split.from_owners([(3 - f // 4, 4 - f // 4) for f in range(16)]) for name in "kv"}
    found = Found([Group("heads", 4, 8, 1, ("model.layers.0.self_attn.o_proj",), columns)])
    assert proof.prove(specimen, found, 2) == []
    assert "something else" in found.reasons["model.layers.0.self_attn.o_proj"]


def test_a_model_whose_inputs_cannot_be_guessed():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))

        def forward(self, x, y):
            for block in self.blocks:
                x = x + block(x) * y
            return x

    with pytest.raises(Unrunnable):
        read_anatomy(TwoInputs(), 2)
    given = lambda model: model(torch.randn(2, 7, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64))  # noqa: E731
    assert len(read_anatomy(TwoInputs(), 2, given).seams) == 2
