"""Precision terms: the machinery equals one process in float64, and the plan equals one process in its own precision."""

from pathlib import Path

import pytest

from phalanx.verify import verify_named

FOLDER = Path(__file__).parent

COVER = [
    ("tiny-llama", "zero1+bf16", 2),
    ("tiny-bert", "zero2+acc3+bf16", 3),
    ("tiny-vit", "zero0+fp16", 2),
    ("tiny-gpt2", "zero3+fp16", 4),
    ("user-module", "zero3+bf16", 2),
    ("tiny-deepseek-v3", "zero3+ep2+bf16", 2),
]
MORE = [
    (model, f"{stage}+{precision}", 3)
    for model in ("tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-vit", "user-module")
    for stage in ("zero0", "zero1", "zero2", "zero3")
    for precision in ("bf16", "fp16")
]
MIXTURES = [
    (model, f"{plan}+{precision}", 4)
    for model in ("tiny-mixtral", "tiny-qwen3-moe", "tiny-olmoe", "tiny-gpt-oss", "tiny-deepseek-v2", "tiny-deepseek-v3", "user-mixture")
    for plan in ("zero3+ep2", "zero1+pp2+ep2", "zero1+ulysses2+ep2+recompute")
    for precision in ("bf16", "fp16")
    if "ulysses" not in plan or model not in ("tiny-gpt-oss", "user-mixture")  # whose sequences cannot be cut
]
BUILDERS = {"user-module": f"{FOLDER}/user_program.py:build", "user-mixture": f"{FOLDER}/user_mixture.py:build"}


def check(model, plan, world):
    report = verify_named(BUILDERS.get(model, model), plan, world)
    assert report.ok, str(report)
    assert [comparison.precision for comparison in report.comparisons] == ["float64", plan[-4:]]


@pytest.mark.parametrize(("model", "plan", "world"), COVER)
def test_a_fixed_cover(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world"), [*MORE, *MIXTURES])
def test_every_stage(model, plan, world):
    check(model, plan, world)
