"""Data parallelism and ZeRO 0 to 3 give the numbers of one process: loss, every gradient, norm, weights after three steps.

Each comparison is in float64 to 1e-9, with SGD and without dropout, on rows of very different lengths.
"""

import itertools
from pathlib import Path

import pytest

from phalanx.verify import verify_named

USER_FILE = Path(__file__).with_name("user_program.py")
MODELS = ("tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-vit", "user-module")
STAGES = ("zero0", "zero1", "zero2", "zero3")


def check(model, plan, world, rows=None):
    name = f"{USER_FILE}:build" if model == "user-module" else model
    report = verify_named(name, plan, world, rows=rows)
    assert report.ok, str(report)
    assert report.worst_relative_error < 1e-9


def cells():
    """Every (plan, world, rows): with and without accumulation, the whole batch of 8 rows, and fewer rows than ranks."""
    for stage, acc, world in itertools.product(STAGES, (1, 3), (2, 3, 4)):
        plan = stage if acc == 1 else f"{stage}+acc{acc}"
        yield plan, world, None
        yield plan, world, world - 1
    for plan in ("zero3:2", "zero3:2+acc3"):
        yield plan, 4, None
        yield plan, 4, 3


# Every model, stage, world, accumulation and kind of batch at least once, and each stage with the most and the least friendly model.
COVER = [
    ("tiny-llama", "zero0+acc3", 3, 2),
    ("tiny-llama", "zero1", 2, None),
    ("tiny-llama", "zero2+acc3", 2, None),
    ("tiny-llama", "zero3+acc3", 3, None),
    ("tiny-llama", "zero3:2", 4, None),
    ("tiny-gpt2", "zero0", 2, None),
    ("tiny-gpt2", "zero2", 3, None),
    ("tiny-gpt2", "zero3", 4, 3),
    ("tiny-bert", "zero1+acc3", 3, None),
    ("tiny-bert", "zero3", 2, None),
    ("tiny-vit", "zero0+acc3", 4, 3),
    ("tiny-vit", "zero2", 2, 1),
    ("tiny-vit", "zero3:2+acc3", 4, None),
    ("user-module", "zero0", 2, 1),
    ("user-module", "zero1+acc3", 4, None),
    ("user-module", "zero2", 3, 2),
    ("user-module", "zero3+acc3", 2, None),
    ("user-module", "zero3", 4, 3),
    ("user-module", "zero3:2", 4, None),
]


@pytest.mark.parametrize(("model", "plan", "world", "rows"), COVER)
def test_a_fixed_cover(model, plan, world, rows):
    check(model, plan, world, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world", "rows"), list(cells()))
@pytest.mark.parametrize("model", MODELS)
def test_every_cell(model, plan, world, rows):
    check(model, plan, world, rows)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
@pytest.mark.parametrize(
    "model",
    [
        "tiny-mistral",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-gemma2",
        "tiny-opt",
        "tiny-bloom",
        "tiny-gpt-neox",
        "tiny-t5",
        "tiny-bart",
        "tiny-whisper",
    ],
)
def test_more_families(model, plan):
    check(model, plan, 2)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_mean_over_rows_is_counted_by_rows(plan):
    report = verify_named(f"{USER_FILE}:build_mean_over_rows", plan, 3)
    assert report.ok, str(report)


@pytest.mark.parametrize("clip_norm", [0.1, 1e-7])
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "zero3:2"])
def test_clipping_changes_the_update_as_torch_does(plan, clip_norm):
    """Far below the norm of about 1; the smaller limit makes the epsilon under the division count."""
    report = verify_named("tiny-gpt2", plan, 4, clip_norm=clip_norm)
    assert report.ok, str(report)
