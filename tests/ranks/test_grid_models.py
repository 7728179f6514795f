"""Whole models on grids of ranks: what each rank holds, sends and draws at random."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.booster import Booster
from phalanx.cluster.ledger import ledger
from phalanx.data import take_rows
from phalanx.layout import split_range
from phalanx.plan import Plan
from phalanx.testing import run_ranks
from phalanx.train.memory import TensorCount

ROWS, LENGTH, HIDDEN, HEADS = 4, 6, 32, 8
GRIDS = [("2d", 4), ("2.5d", 8), ("3d", 8)]


def model_of(num_layers: int, dropout: float = 0.0) -> nn.Module:
    """A classic block: four times the width inside of the MLP, as many key and value heads as heads."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, bos_token_id=0, eos_token_id=0, n_positions=16, n_embd=HIDDEN, n_layer=num_layers, n_head=HEADS, **rates)
    ).double()


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def plan_of(kind: str, world: int, **options: bool) -> Plan:
    return Plan(tp=world, tp_kind=kind, tp_depth=2 if kind == "2.5d" else 1, **options)


def _sent(kind: str, world: int, num_layers: int, options: dict[str, bool]) -> int:
    """The elements that this rank sends over the grid for one forward and backward."""
    booster = Booster(plan_of(kind, world, **options))
    model = model_of(num_layers)
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with ledger.record() as rows:
        booster.forward_backward(batch())
    return sum(row[4] for row in rows if row[1] in ("plane", "row", "col", "row.col")) // 8


def formula(kind: str, options: dict[str, bool]) -> int:
    """Elements of one layer, with its two norms: for each row of the features two numbers gathered, and two summed back."""
    q, x, weight = 2, ROWS * LENGTH * HIDDEN, 12 * HIDDEN**2
    rows = ROWS * LENGTH // (q * (2 if kind == "2.5d" else 1))
    parts = q * q if kind == "3d" else q
    norms = 2 * rows * (2 * (parts - 1) + 4 * (parts - 1) // parts)
    if kind == "3d":
        return (q - 1) * (2 * (16 * x + weight) if options.get("tp_keep") else 39 * x + 3 * weight) // q**3 + norms
    moved = 10 * x if options.get("tp_outputs_move") else 21 * x
    return (q - 1) * (moved // (2 if kind == "2.5d" else 1) + 3 * weight) // q**2 + norms


@pytest.mark.parametrize(
    ("kind", "world", "options"), [(*grid, {}) for grid in GRIDS] + [("3d", 8, {"tp_keep": True}), ("2d", 4, {"tp_outputs_move": True})]
)
def test_a_layer_sends_what_the_formula_says(kind, world, options):
    """Of two models that differ by one layer."""
    more, fewer = (run_ranks(_sent, world, kind, world, number, options) for number in (3, 2))
    assert [a - b for a, b in zip(more, fewer, strict=True)] == [formula(kind, options)] * world


def _held(kind: str, world: int) -> tuple[int, int]:
    """The elements of projections that this rank holds, and those of the model."""
    booster, model = Booster(plan_of(kind, world)), model_of(2)
    matrices = [(module, module.weight.numel()) for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return sum(module.weight.numel() for module, _ in matrices), sum(size for _, size in matrices)


def _held_between(kind: str, world: int, options: dict[str, bool]) -> float:
    """The bytes that a layer of this rank holds between its forward and its backward."""
    held = []
    for num_layers in (3, 2):
        booster = Booster(plan_of(kind, world, **options) if world > 1 else "zero0")
        booster.boost(model_of(num_layers))
        training = booster.trainings[0]
        booster.forward_backward(batch())
        rows = batch() if training.cut is None else take_rows(batch(), *split_range(ROWS, training.cut.size, training.cut.index), ROWS)
        with TensorCount() as count:
            loss, _ = training.objective(training.model, rows)
            held.append(count.now - count.kept)
            del loss
    return held[0] - held[1]


@pytest.mark.parametrize(("kind", "world"), GRIDS)
def test_a_rank_holds_its_part_of_the_activations(kind, world):
    """1/P of what one process holds, within the few numbers that norms keep of each row; with `tp_keep` what is gathered as well."""
    whole = run_ranks(_held_between, 1, kind, 1, {})[0]
    part, kept = (max(run_ranks(_held_between, world, kind, world, options)) for options in ({}, {"tp_keep": True}))
    assert 0.9 < part * world / whole < 1.1
    assert kept > 1.5 * part


@pytest.mark.parametrize(("kind", "world"), GRIDS)
def test_a_rank_holds_its_part_of_the_weights(kind, world):
    whole, parts = 24 * HIDDEN**2, 4 if kind == "2.5d" else world
    assert run_ranks(_held, world, kind, world) == [(whole // parts, whole)] * world


def _dropped() -> dict[str, torch.Tensor]:
    """Where the embeddings' dropout and that of a block have put zeros."""
    booster, model = Booster("tp4:2d"), model_of(2, dropout=0.4).train()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: dict[str, torch.Tensor] = {}
    for name in ("transformer.drop", "transformer.h.1.mlp.dropout"):
        model.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: found.update({name: output == 0}))
    booster.forward_backward(batch())
    return found


def test_draws_are_the_same_on_whole_activations_and_differ_on_split_ones():
    first, same_rows, other_rows, _ = run_ranks(_dropped, 4)
    outside, inside = "transformer.drop", "transformer.h.1.mlp.dropout"
    assert torch.equal(first[outside], same_rows[outside])
    assert not torch.equal(first[outside], other_rows[outside])
    assert not torch.equal(first[inside], same_rows[inside])
    assert not torch.equal(first[inside], other_rows[inside])
    assert 0.2 < float(first[inside].double().mean()) < 0.6


def _saved(kind: str, path: str) -> bool:
    """Saves a model that is cut, loads it again, and compares full weights with those it was built with."""
    booster, model = Booster(plan_of(kind, 8 if kind != "2d" else 4)), model_of(2)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    full = booster.full_state_dict()
    booster.save_model(path)
    booster.load_model(path)
    again = booster.full_state_dict()
    return all(torch.equal(full[name], start[name]) and torch.equal(again[name], start[name]) for name in full)


@pytest.mark.parametrize(("kind", "world"), GRIDS)
def test_a_cut_model_is_saved_and_loaded_bit_for_bit(kind, world, tmp_path):
    from transformers import GPT2LMHeadModel

    assert run_ranks(_saved, world, kind, str(tmp_path / "model")) == [True] * world
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model_of(2).state_dict().items())
