"""Every pair of strategies, and larger plans drawn by a seed, give the numbers of one process on 4 to 16 ranks.

`pytest --plan-seed 7` draws other plans. What the plan itself refuses is no cell.
"""

import itertools
import random

import pytest

from phalanx.plan import Plan, validate
from phalanx.verify import verify_named

NUM_DRAWN, MOST_RANKS = 40, 16
STATE = ("zero0", "zero1", "zero2", "zero3")
TENSOR = ("", "tp2", "tp2+sp")
CONTEXT = ("", "ulysses2", "ring2")
PIPELINE = ("", "pp2", "pp2+gpipe", "pp2+interleaved2", "pp2+zb-h1", "pp2+zbv", "pp2+dualpipev", "pp2+auto-schedule", "pp4")
PASSES = ("", "acc2")
PRECISION = ("", "bf16", "fp16")
RECOMPUTE = ("", "recompute", "selective")
KINDS = (STATE, TENSOR, CONTEXT, PIPELINE, PASSES, PRECISION, RECOMPUTE)


def world_of(terms):
    """Ranks of the smallest world in which every cell has at least two ranks to shard over."""
    plan = Plan.parse("+".join(filter(None, terms)))
    return plan.model_size * (1 if plan.zero == 0 or plan.cp > 1 else 2)


def text_of(terms):
    return "+".join(filter(None, terms))


def is_a_cell(terms):
    """Whether the plan contradicts nothing, and has something to do on a world of 2 to 16 ranks."""
    return not validate(text_of(terms)) and 2 <= world_of(terms) <= MOST_RANKS and not validate(text_of(terms), world=world_of(terms))


def pairs():
    """Two strategies at a time, all others at their default; each pair once."""
    for (first, left), (second, right) in itertools.combinations(enumerate(KINDS), 2):
        for one, other in itertools.product(left[1:], right[1:]):
            terms = ["zero0", "", "", "", "", "", ""]
            terms[first], terms[second] = one, other
            if is_a_cell(terms):
                yield text_of(terms), world_of(terms)


def drawn(seed):
    """Larger plans: every kind of strategy is drawn, and a plan has at least three."""
    draw, found = random.Random(seed), {}
    while len(found) < NUM_DRAWN:
        terms = [draw.choice(choices) for choices in KINDS]
        if sum(term not in ("", "zero0") for term in terms) >= 3 and is_a_cell(terms) and world_of(terms) >= 4:
            found.setdefault(text_of(terms), world_of(terms))
    return list(found.items())


# Of every strategy one plan that combines it with two others.
COVER = [
    ("zero1+tp2+pp2+zb-h1", 8),
    ("zero3+tp2+pp2+acc2", 8),
    ("zero2+pp2+interleaved2+recompute", 4),
    ("zero1+pp4+bf16", 8),
    ("tp2+sp+pp2+interleaved2+selective", 4),
    ("ring2+pp2+recompute", 4),
    ("ulysses2+pp2+zb-h1+acc2", 4),
]


def check(model, plan, world):
    report = verify_named(model, plan, world, timeout_s=120)
    assert report.ok, str(report)


@pytest.mark.parametrize(("plan", "world"), COVER)
@pytest.mark.parametrize("model", ["tiny-llama"])
def test_a_fixed_cover(model, plan, world):
    check(model, plan, world)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "world"), list(pairs()))
@pytest.mark.parametrize("model", ["tiny-llama"])
def test_every_pair(model, plan, world):
    check(model, plan, world)


def pytest_generate_tests(metafunc):
    if metafunc.function is test_drawn_plans:
        metafunc.parametrize(("plan", "world"), drawn(metafunc.config.getoption("--plan-seed")))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-gpt2"])
def test_drawn_plans(model, plan, world):
    check(model, plan, world)
