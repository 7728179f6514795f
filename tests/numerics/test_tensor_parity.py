"""1D tensor parallelism gives the numbers of one process: loss, every gradient, norm, weights after three steps, in float64."""

import pytest
from tensor_check import check

from phalanx.plan import Plan

USER_MODELS = ("fused", "counted", "relative", "heads_6_2", "heads_6_3", "heads_12_3", "heads_4_1", "fused_4_1", "adapted")
FAMILIES = tuple(
    f"tiny-{name}"
    for name in (
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3-text", "phi3", "gpt2", "opt", "bloom", "falcon", "gpt-neox"),
        *("bert", "vit", "t5", "whisper", "mixtral"),
    )
)


# Every kind of plan, the fewest and the most ranks, and what is hard to read or to share out.
COVER = [
    ("tiny-llama", "tp2", 2),
    ("tiny-llama", "zero3+tp2+sp", 4),
    ("tiny-gpt2", "tp3", 3),
    ("tiny-gpt2", "zero1+tp2+sp+acc2", 4),
    ("tiny-t5", "tp2+sp", 2),
    ("tiny-bloom", "tp2", 2),
    ("tiny-bert", "tp3+sp", 3),
    ("tiny-qwen3", "tp4", 4),
    ("fused", "tp3+sp", 3),
    ("counted", "tp4", 4),
    ("relative", "tp2", 2),
    ("heads_6_2", "tp4", 4),
    ("heads_6_3", "tp2+sp", 2),
    ("fused_4_1", "tp2", 2),
    ("adapted", "tp2+sp", 2),
    ("adapted", "zero3+tp2", 4),
]


@pytest.mark.parametrize(("model", "plan", "world"), COVER)
def test_a_fixed_cover(model, plan, world):
    check(model, plan, world)


PLANS = [("tp2", 2), ("tp3", 3), ("tp4", 4), ("tp2+sp", 2), ("zero1+tp2", 4), ("zero3+tp2", 4), ("zero3+tp2+sp", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world"), PLANS)
@pytest.mark.parametrize("model", FAMILIES + USER_MODELS)
def test_every_cell(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp2+recompute", "tp2+sp+recompute", "tp2+bf16", "zero2+tp2+sp+acc3"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-t5"])
def test_beside_other_terms(model, plan):
    check(model, plan, 4 if "zero" in plan else 2)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp2+ring2", "tp2+ulysses2", "tp2+sp+ring2", "tp2+pp2", "tp2+bf16"])
def test_beside_other_ways_to_cut(plan):
    check("tiny-llama", plan, 4)


@pytest.mark.parametrize(
    ("model", "terms", "world"),
    [
        ("tiny-gpt2", {"zero": 3}, 4),
        pytest.param("tiny-t5", {}, 2, marks=pytest.mark.slow),
        pytest.param("tiny-llama", {"recompute": "selective"}, 2, marks=pytest.mark.slow),
        pytest.param("tiny-llama", {"pp": 2, "schedule": "zb-h1"}, 4, marks=pytest.mark.slow),
        pytest.param("heads_6_2", {"tp": 4}, 4, marks=pytest.mark.slow),
    ],
)
def test_inputs_that_are_gathered_again(model, terms, world, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(Plan.from_table({"tp": 2, "sp": True, "tp_keep": False, **terms}).to_toml())
    check(model, str(plan), world)


@pytest.mark.parametrize("clip_norm", [0.1, 1e-7])
def test_clipping_counts_every_element_once(clip_norm):
    """A norm that each rank has whole, keys that two ranks share, and parts of all else."""
    check("heads_6_2", "tp4", 4, clip_norm=clip_norm)


@pytest.mark.parametrize("plan", ["tp3", "tp2+sp"])
def test_adapters_of_peft_go_in_like_any_other_module(plan):
    check("adapters_of_peft", plan, int(plan[2]))
