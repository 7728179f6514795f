"""2D, 2.5D and 3D tensor parallelism give the numbers of one process: loss, every gradient, norm, weights after three steps, in float64."""

import pytest
from tensor_check import check

from phalanx.errors import PlanError
from phalanx.plan import Plan

USER_MODELS = ("fused", "counted", "relative", "heads_6_2", "heads_6_3", "heads_12_3", "heads_4_1", "summed", "adapted")
FAMILIES = ("tiny-llama", "tiny-gpt2", "tiny-qwen3", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-opt", "tiny-phi3")
GRIDS = [("tp4:2d", 4), ("tp8:2.5d2", 8), ("tp8:3d", 8)]


# Every grid, ZeRO over data and over the depth, and what is hard to read or to share out.
COVER = [
    ("tiny-gpt2", "tp4:2d", 4),
    ("tiny-t5", "tp4:2d+acc2+recompute", 4),
    ("fused", "tp4:2d", 4),
    ("summed", "tp4:2d", 4),
    ("heads_6_3", "tp4:2d", 4),
    ("tiny-qwen3", "zero1+tp8:2.5d2", 8),
    ("tiny-gpt2", "zero3+tp4:2d", 8),
    ("heads_6_2", "tp8:3d", 8),
]


@pytest.mark.parametrize(("model", "plan", "world"), COVER)
def test_a_fixed_cover(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world"), GRIDS)
@pytest.mark.parametrize("model", FAMILIES + USER_MODELS)
def test_every_cell(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "world"), [("zero1+tp4:2d", 8), ("zero2+tp4:2d", 8), ("zero3+tp4:2d", 8), ("zero3+tp8:2.5d2", 8), ("zero3+tp8:3d", 16)]
)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "counted"])
def test_with_sharded_state(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp4:2d+bf16", "tp4:2d+selective", "tp9:2d"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_beside_other_terms(model, plan):
    check(model, plan, Plan.parse(plan).tp)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_keep": True}, {"tp_outputs_move": True}])
def test_the_options_of_the_file_form(options, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(Plan.from_table({"tp": 4, "tp_kind": "2d", **options}).to_toml())
    check("tiny-gpt2", str(plan), 4)


def test_what_shares_a_part_of_a_projection_is_refused():
    with pytest.raises(PlanError, match="query_key_value cannot be cut"):
        check("fused_4_1", "tp4:2d", 4)
