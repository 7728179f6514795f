"""Layer stacks, ties, the loss seam and batch dependence of models, read without running them."""

import torch
import transformers
from torch import nn

from phalanx.anatomy import execution_blocks, is_batch_dependent, layer_stacks, own_loss, replace_causal_loss, tie_groups
from phalanx.verify import tiny
from phalanx.verify.batches import make_batch


def names(model):
    return [name for name, _ in layer_stacks(model)]


def test_stacks_are_the_blocks_of_repeated_containers_in_order():
    model, _ = tiny.build_tiny("tiny-llama")
    assert names(model) == [f"model.layers.{index}" for index in range(4)]
    model, _ = tiny.build_tiny("tiny-t5")
    assert names(model) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_the_outermost_container_wins_and_odd_children_are_left_out():
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # noqa: E731
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleList([block(), block()]), nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert names(model) == ["1.0", "1.1"]


def test_a_block_that_is_listed_twice_appears_once():
    shared = nn.Linear(2, 2)
    assert names(nn.ModuleList([shared, nn.Linear(2, 2), shared])) == ["0", "1"]


def test_a_model_without_repetition_has_no_stack():
    assert names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Embedding(3, 2))) == []


def test_experts_are_no_layers_and_a_mixture_runs_as_one():
    mixture = nn.ModuleDict({"router": nn.Linear(2, 3), "experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    model = nn.ModuleDict({"mixture": mixture, "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    assert names(model) == ["layers.0", "layers.1"]
    assert [name for name, _ in execution_blocks(model)] == ["layers.0", "layers.1", "mixture"]


def test_ties_are_found_by_identity_not_by_value():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["c"].weight = model["a"].weight
    model["b"].load_state_dict(model["a"].state_dict())
    assert tie_groups(model) == [("a.weight", "c.weight")]
    model, _ = tiny.build_tiny("tiny-gpt2")
    assert tie_groups(model) == [("transformer.wte.weight", "lm_head.weight")]


def test_what_mixes_rows_is_named():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3))
    assert [reason.split(":")[0] for reason in is_batch_dependent(model)] == ["0", "2"]
    config = tiny.make_config(transformers.MixtralConfig, {"output_router_logits": True})
    assert is_batch_dependent(transformers.MixtralForCausalLM(config)) == []  # its balance loss is formed over all ranks
    model = nn.Sequential(nn.LayerNorm(3))
    model.config = config
    assert any("router" in reason for reason in is_batch_dependent(model))
    config.output_router_logits = False
    assert is_batch_dependent(model) == []


def test_the_loss_seam_is_called_as_the_model_calls_its_own():
    model, _ = tiny.build_tiny("tiny-llama")
    batch = make_batch("causal", model.config, 0)
    seen = {}

    def loss(logits, labels, vocab_size, **keywords):
        seen.update(keywords, vocab_size=vocab_size, shape=tuple(logits.shape))
        return original(logits=logits, labels=labels, vocab_size=vocab_size, **keywords)

    before = model(**batch).loss
    original = replace_causal_loss(model, loss)
    assert torch.equal(model(**batch).loss, before)
    assert seen["vocab_size"] == 37
    assert seen["shape"] == (8, 12, 37)
    model(**batch, num_items_in_batch=torch.tensor(7))
    assert seen["num_items_in_batch"] == 7
    assert own_loss(model).takes_num_items, "a replaced loss is still known by the one it replaces"


def test_models_without_a_causal_loss_have_no_such_seam():
    for model in (tiny.build_tiny("tiny-bert")[0], tiny.build_tiny("tiny-vit")[0], nn.Linear(2, 2)):
        assert replace_causal_loss(model, lambda *arguments, **keywords: None) is None
        assert "_loss_function" not in vars(model)
