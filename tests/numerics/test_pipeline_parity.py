"""Pipelines give the numbers of one process: every schedule, number of stages and micro-batches, and kind of model.

Each comparison is in float64 to 1e-9, with SGD and without dropout, on rows of very different lengths.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.plan import Plan
from phalanx.verify import verify_named

USER_FILE = Path(__file__).with_name("user_program.py")
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-gpt2", "tiny-bert", "tiny-vit", "tiny-t5", "tiny-whisper", "user-module")
SCHEDULES = ("1f1b", "gpipe", "interleaved2", "zb-h1", "zbv", "dualpipev", "auto-schedule")


def check(model, plan, world, keeps=False, **options):
    plan = replace(Plan.parse(plan), pp_keep=keeps)
    name = f"{USER_FILE}:build" if model == "user-module" else model
    report = verify_named(name, plan, world, **options)
    assert report.ok, str(report)
    assert report.worst_relative_error < 1e-9


# Every model, schedule, number of stages, relation of micro-batches to stages, and stage of ZeRO at least once.
COVER = [
    ("tiny-llama", "pp2", 2),
    ("tiny-llama", "zero1+pp2+zb-h1+micro3", 4),
    ("tiny-gpt2", "pp4+micro2", 4),
    ("tiny-gpt2", "pp2+interleaved2+micro3", 2),
    ("tiny-gpt2", "zero3+pp2+acc3", 4),
    ("tiny-llama", "pp3+gpipe", 3),
    ("tiny-gpt2", "pp2+zbv+micro2", 2),
    ("tiny-llama", "zero2+pp2+dualpipev", 4),
    ("tiny-llama", "pp4+auto-schedule", 4),
    ("tiny-t5", "pp4+zb-h1+micro3", 4),
    ("tiny-whisper", "pp2+zbv", 2),
    ("tiny-whisper", "pp3", 3),
    ("tiny-bert", "pp2", 2),
    ("tiny-vit", "pp2+zb-h1", 2),
    ("tiny-qwen3", "pp2+micro1", 2),
    ("user-module", "pp3+zb-h1", 3),
    ("user-module", "zero3+pp2", 4),
    ("tiny-gpt2", "pp2+zb-h1+recompute=0.5", 2),
    ("tiny-llama", "pp2+zb-h1+recompute=full,0", 2),
]


@pytest.mark.parametrize(("model", "plan", "world"), COVER)
def test_a_fixed_cover(model, plan, world):
    check(model, plan, world)


@pytest.mark.parametrize(("plan", "rows"), [("pp2+micro8", 3), ("zero1+pp2", 1), ("pp2+micro2+acc4", 8), ("pp2+micro4+acc2", 8)])
def test_batches_with_fewer_rows_than_micro_batches_and_other_cuts(plan, rows):
    check("tiny-gpt2", plan, 4 if "zero" in plan else 2, rows=rows)


def test_clipping_counts_the_tied_weight_once():
    check("tiny-gpt2", "pp3", 3, clip_norm=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision):
    report = verify_named("tiny-llama", f"pp2+{precision}", 2)  # its rotary angles take the dtype of embeddings that are elsewhere
    assert report.ok, str(report)


def cells():
    layers = {"tiny-llama": 4, "tiny-gpt2": 4, "tiny-t5": 4, "tiny-whisper": 4, "user-module": 3}
    for model in MODELS:
        for schedule in SCHEDULES:
            chunks = 2 if schedule in ("interleaved2", "zbv", "dualpipev") else 1
            for stages in (2, 3, 4):
                if stages * chunks <= layers.get(model, 2):
                    for micro in {1, stages, 2 * stages + 1}:
                        for acc in (1, 3):
                            yield model, f"pp{stages}+{schedule}+micro{micro}+acc{acc}", stages


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world"), list(cells()))
def test_every_cell(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("extra", ["", "+recompute", "+selective", "+acc2"])
def test_every_stage_of_zero(zero, schedule, extra):
    check("tiny-llama", f"zero{zero}+pp2+{schedule}{extra}", 4)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("extra", ["recompute=full,0", "recompute=0,selective+acc2", "recompute=0.5,full+micro3"])
@pytest.mark.parametrize("model", ["tiny-llama"])
def test_recompute_that_differs_by_rank(model, zero, schedule, extra):
    check(model, f"zero{zero}+pp2+{schedule}+{extra}", 4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved2", "zbv", "dualpipev"])
@pytest.mark.parametrize("model", ["tiny-gpt2"])
def test_recompute_that_differs_by_stage(model, schedule):
    check(model, f"pp2+{schedule}+recompute=full,0,selective,0", 2)


@pytest.mark.parametrize(("model", "plan"), [("tiny-gpt2", "zero3+pp2+zb-h1+acc2")])
def test_state_that_stays_for_a_step(model, plan):
    check(model, plan, 4, keeps=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [f"zero{n}+pp2+{name}{more}" for n in (2, 3) for name in SCHEDULES for more in ("", "+recompute+acc3+micro3")]
)
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-t5"])
def test_state_that_stays_for_a_step_under_every_schedule(model, plan):
    check(model, plan, 4, keeps=True)


FAMILIES = ("mistral", "qwen2", "gemma", "gemma2", "gemma3-text", "opt", "bloom", "phi", "phi3", "gpt-neox", "gpt-neo", "olmo2")
OTHER_FAMILIES = ("stablelm", "starcoder2", "granite", "cohere", "falcon", "roberta", "distilbert", "electra", "deit", "bart")


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world"), [("tp2+pp2+micro3", 4), ("tp4+pp2", 8), ("zero3+tp2+pp2", 8)])
@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_a_vocabulary_that_does_not_divide(model, plan, world):
    """37 words, as a head of its own and tied to the embedding of another stage."""
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES + OTHER_FAMILIES)
def test_more_families(model):
    check(f"tiny-{model}", "pp2+zb-h1", 2)
