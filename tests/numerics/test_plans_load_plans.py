"""A run that was saved under one plan goes on under another: the same bits of weights and moments, then the same steps.

All checkpoints of a model hold one state: one process makes it, and each plan has loaded and saved it. What a plan loads it saves
again, and every tensor of that is compared, bit by bit, with the first one. `pytest --load-table=docs/checkpoints.md` writes the table.
"""

from contextlib import nullcontext

import pytest
import torch

import phalanx as px
from phalanx.checkpoint import manifest
from phalanx.checkpoint.files import Files
from phalanx.checkpoint.stored import read_whole
from phalanx.data import take_rows
from phalanx.layout import split_range
from phalanx.precision import lift_to_float64
from phalanx.testing import run_ranks

STEPS, ROWS, TOLERANCE, TOLERANCE_32 = 3, 5, 1e-9, 1e-4
TIERS = {"device": "300KB", "host": "150KB", "disk": "100MB"}
PLANS = {
    "one process": ("zero0", 1),
    "dp2+tp2+zero1": ("dp2+tp2+zero1", 4),
    "tp4": ("tp4", 4),
    "dp2+pp2": ("dp2+pp2", 4),
    "zero3 on 3": ("zero3", 3),
    "tp8:2.5d2": ("tp8:2.5d2", 8),
    "ep2": ("dp2+ep2", 2),
    "ulysses2": ("ulysses2", 2),
    "gemini with disk": ("gemini", 2),
    "zero3:2": ("zero3:2", 4),
    "zero2+bf16": ("zero2+bf16", 2),
    "pp2+tp2+sp": ("pp2+tp2+sp", 4),
}
LOADING = ["one process", "dp2+tp2+zero1", "tp4", "dp2+pp2", "zero3 on 3", "ulysses2"]
DEFAULT = [("dp2+tp2+zero1", "one process"), ("one process", "zero3 on 3"), ("zero3 on 3", "dp2+tp2+zero1")]


def kind_of(*plans):
    """The model for plans that meet: experts where one divides them, half of the precision where one computes in half."""
    return ("mixture" if "ep2" in plans else "dense") + ("32" if "zero2+bf16" in plans else "")


def model_of(kind):
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "use_cache": False}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16}
    if kind.startswith("mixture"):
        config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = "eager"  # the default cannot multiply in float64
        model = MixtralForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return model if kind.endswith("32") else model.double()


def rows_of(step, booster):
    """This data index's rows of a global batch of odd size and uneven rows."""
    words = torch.randint(0, 37, (ROWS, 11), generator=torch.Generator().manual_seed(step))
    labels = words.clone()
    for row in range(ROWS):
        labels[row, 11 - 2 * row :] = -100
    axis = booster.mesh.axis("dp")
    return take_rows({"input_ids": words, "labels": labels}, *split_range(ROWS, axis.size, axis.index), ROWS)


def in_one_precision(kind):
    """Models in float64 have parts that compute in float32, where a sum in another order is another number: no such casts here."""
    return nullcontext() if kind.endswith("32") else lift_to_float64()


def boosted(name, kind, root):
    text, _ = PLANS[name]
    plan = {"gemini": TIERS | {"disk_path": str(root / "tiers")}} if text == "gemini" else text
    booster, model = px.Booster(plan, clip_norm=0.5, seed=3), model_of(kind)
    # A gradient that is nearly zero differs by rounding alone; a small eps would make a step of it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    with in_one_precision(kind):
        booster.boost(model, optimizer, None, None, schedule)
    return booster


def go_on(booster, kind):
    """The losses of the next steps, and what the weights are then, on the first rank."""
    with in_one_precision(kind):
        losses = torch.tensor([booster.step(rows_of(2 + step, booster)).loss for step in range(STEPS)], dtype=torch.float64)
    weights = booster.full_state_dict()
    return {"losses": losses, **weights} if booster.world.rank == 0 else None


def begin(kinds, root):
    """One process makes the state of each model and saves it; what its next steps give."""
    found = {}
    for kind in kinds:
        booster = boosted("one process", kind, root)
        with in_one_precision(kind):
            for step in range(2):
                booster.step(rows_of(step, booster))
        booster.save(root / kind / "first")
        found[kind] = go_on(booster, kind)
    return found


def hand_on(name, kinds, root):
    """A plan loads the state of each model and saves it."""
    for kind in kinds:
        booster = boosted(name, kind, root)
        booster.load(root / kind / "first")
        booster.save(root / kind / name)


def take_up(name, sources, root):
    """What a plan's next steps give, from the checkpoint of each other plan, which it saves again."""
    found = []
    for source in sources:
        kind = kind_of(name, source)
        booster = boosted(name, kind, root)
        booster.load(root / kind / source)
        booster.save(root / f"{kind}-again" / f"{name} from {source}")
        found.append(go_on(booster, kind))
    return found


def worst_of(found, expected):
    """The largest difference of any tensor, over its largest magnitude."""
    assert found.keys() == expected.keys()
    return max(((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-300)).item() for name, value in expected.items())


def tensors_of(path):
    saved = manifest.read(path)
    with Files(path, saved) as files:
        return {name: read_whole(tensor, files) for name, tensor in saved.tensors.items()}


def differing(path, first):
    """The tensors of a checkpoint that are not, bit by bit, those of the first one."""
    found, expected = tensors_of(path), tensors_of(first)
    assert any(name.startswith("optimizer/") for name in expected)
    return sorted(
        {name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])} | found.keys() ^ expected.keys()
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where checkpoints are, made when they are asked for, and what the steps of one process give."""
    root, made, given = tmp_path_factory.mktemp("plans"), set(), {}

    def make(name, kinds):
        new = [kind for kind in kinds if kind not in given]
        if new:
            given.update(run_ranks(begin, 1, new, root)[0])
        lacking = [kind for kind in kinds if (kind, name) not in made]
        if lacking:
            run_ranks(hand_on, PLANS[name][1], name, lacking, root)
            made.update((kind, name) for kind in lacking)
        return root, given

    return make


def fault_of(name, source, outcome, root, given):
    """What is wrong with what a plan made of another one's checkpoint; empty where nothing is."""
    kind = kind_of(name, source)
    wrong = differing(root / f"{kind}-again" / f"{name} from {source}", root / kind / "first")
    if wrong:
        return f"other bits in {wrong[0]} and {len(wrong) - 1} more"
    error = worst_of(outcome, given[kind])
    return "" if error < (TOLERANCE_32 if kind.endswith("32") else TOLERANCE) else f"the next steps differ by {error:.1e}"


def load_from(sources, name, saved):
    """source -> what is wrong with what the plan `name` made of its checkpoint; empty where nothing is."""
    for source in sources:
        root, given = saved(source, [kind_of(name, source)])
    outcomes = run_ranks(take_up, PLANS[name][1], name, sources, root, timeout_s=600)[0]
    return {source: fault_of(name, source, outcome, root, given) for source, outcome in zip(sources, outcomes, strict=True)}


@pytest.mark.parametrize(("source", "name"), DEFAULT)
def test_a_plan_loads_what_another_saved(saved, source, name):
    assert load_from([source], name, saved) == {source: ""}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADING)
def test_a_plan_loads_what_every_plan_saved(saved, name, record_property):
    faults = load_from(list(PLANS), name, saved)
    record_property("loads", (name, faults))
    assert faults == dict.fromkeys(PLANS, "")


def test_an_element_in_another_place_and_a_step_more_are_found(saved, tmp_path):
    """The comparison sees a moment that moved, and the steps of a state that is one step older."""
    root, given = saved("one process", ["dense"])
    [outcome] = run_ranks(take_up_later, 1, root, tmp_path)
    assert differing(tmp_path / "moved", root / "dense" / "first") == ["optimizer/model.norm.weight/exp_avg"]
    assert worst_of(outcome, given["dense"]) > 1e-6


def take_up_later(root, folder):
    booster = boosted("one process", "dense", root)
    booster.load(root / "dense" / "first")
    optimizer = booster.trainings[0].optimizer
    names = {id(slot.shard): slot.name for _, slot in booster.trainings[0].engine.shards()}
    moment = next(state["exp_avg"] for shard, state in optimizer.state.items() if names[id(shard)] == "model.norm.weight")
    moment[:2] = moment[:2].flip(0).clone()
    booster.save(folder / "moved")
    with in_one_precision("dense"):
        booster.step(rows_of(1, booster))
    return go_on(booster, "dense")
