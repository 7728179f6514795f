"""Experts divided among ranks give the numbers of one process: loss, every gradient, norm, weights after three steps.

Each comparison is in float64 to 1e-9, with SGD and without dropout, on rows of very different lengths.
"""

from pathlib import Path

import pytest

from phalanx.errors import PlanError
from phalanx.verify import verify_named

USER_FILE = Path(__file__).with_name("user_mixture.py")
TINY = ("tiny-mixtral", "tiny-qwen3-moe", "tiny-olmoe", "tiny-gpt-oss", "tiny-deepseek-v2", "tiny-deepseek-v3")
PLANS = [
    ("ep2", 2),
    ("zero1+ep2", 4),
    ("zero3+ep2", 4),
    ("zero3+ep4", 4),
    ("zero2+ep3+acc2", 3),
    ("ep2+recompute", 2),
    ("ep2+selective", 2),
]
PLANS += [("zero1+tp2+ep2", 4), ("pp2+ep2", 4), ("zero1+pp2+zb-h1+ep2", 4)]
CUT_PLANS = [("ulysses2+ep2", 2), ("zero3+ring2+ep2", 4)]
WHOLE = ("tiny-gpt-oss", "user-mixture", "user-mixture-pushed")  # whose sequences cannot be cut

BUILDERS = {
    "user-mixture": "build",
    "user-mixture-pushed": "build_pushed",
    "user-mixture-by-row": "build_by_row",
    "user-mixture-sharing": "build_sharing",
    "user-mixture-alone": "build_alone",
    "mixtral-balance-loss": "build_balanced",
    "mixtral-balance-loss-top-1": "build_balanced_alone",
}


def check(model, plan, world, **options):
    name = f"{USER_FILE}:{BUILDERS[model]}" if model in BUILDERS else model
    report = verify_named(name, plan, world, **options)
    assert report.ok, str(report)
    assert report.worst_relative_error < 1e-9


# Each family once, each plan once, the least even routing under every stage that shards.
COVER = [
    ("tiny-mixtral", "zero3+ep4", 4),
    ("tiny-olmoe", "ep2+recompute", 2),
    ("tiny-gpt-oss", "zero3+ep2", 4),
    ("tiny-deepseek-v2", "ep2", 2),
    ("tiny-deepseek-v3", "zero2+ep3+acc2", 3),
    ("user-mixture", "zero2+ep3+acc2", 3),
    ("user-mixture-pushed", "zero1+ep2", 2),
    ("user-mixture-pushed", "zero3+ep2", 4),
    ("tiny-qwen3-moe", "zero1+ulysses2+ep2", 4),
    ("tiny-deepseek-v3", "zero3+ring2+ep4", 4),
    ("tiny-gpt-oss", "zero1+tp2+ep2", 4),
    ("tiny-qwen3-moe", "tp2+sp+ep2", 4),
    ("tiny-mixtral", "zero3+tp2+sp+ep2", 4),
    ("user-mixture", "tp2+ep2", 4),
    ("tiny-deepseek-v3", "zero1+pp2+zb-h1+ep2", 4),
    ("user-mixture-pushed", "pp2+ep2", 4),
    ("user-mixture-by-row", "zero3", 4),
    ("user-mixture-sharing", "zero2+ep3", 3),
    ("user-mixture-alone", "zero3+ep2", 4),
    ("mixtral-balance-loss", "tp2+sp+ep2", 4),
    ("mixtral-balance-loss", "ulysses2+ep2", 4),
    ("mixtral-balance-loss", "zero0", 1),
    ("mixtral-balance-loss", "zero3", 3),
    ("mixtral-balance-loss-top-1", "zero1+ep2", 4),
]


@pytest.mark.parametrize(("model", "plan", "world"), COVER)
def test_a_fixed_cover(model, plan, world):
    check(model, plan, world)


def test_clipping_is_that_of_one_process():
    check("tiny-mixtral", "zero1+ep2", 4, clip_norm=0.5)


def test_ranks_without_rows_take_part():
    check("tiny-mixtral", "ep2", 4, rows=3)


def test_a_balance_loss_of_ranks_without_rows():
    check("mixtral-balance-loss", "ep2", 4, rows=3)


@pytest.mark.parametrize("plan", ["acc2", "ep2+acc3", "pp2"])
def test_a_balance_loss_that_would_be_that_of_a_piece_is_refused(plan):
    with pytest.raises(PlanError, match="means over the whole batch"):
        check("mixtral-balance-loss", plan, 2)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3+ep2", "zero2+ep2+acc2", "zero1+pp2+ep2", "zero3+tp2+ep2"])
@pytest.mark.parametrize("model", ["user-mixture-by-row", "user-mixture-sharing"])
def test_experts_that_only_some_ranks_call(model, plan):
    check(model, plan, 4)


CELLS = [(model, *plan) for model in [*TINY, *WHOLE[1:]] for plan in [*PLANS, *(CUT_PLANS if model not in WHOLE else ())]]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan", "world"), CELLS)
def test_every_cell(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize("model", WHOLE)
def test_sequences_of_others_are_refused(model):
    with pytest.raises(PlanError, match=r"does not cut the sequence|a plan without cp"):
        check(model, *CUT_PLANS[0])
