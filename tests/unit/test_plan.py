"""The text form of a plan: what it reads, its one print, and the sizes that follow."""

import dataclasses
import math
import random
import tomllib

import pytest

from phalanx.errors import PlanError
from phalanx.plan import Plan
from phalanx.plan import text as plan_text
from phalanx.plan.text import overruled, read

SIZES = (1, 2, 3, 4, 8, 64)


def random_terms(source: random.Random) -> list[str]:
    """A random choice of terms, at most one of each family, in the order of a shuffle."""
    size = source.choice
    families = [[f"{name}{size(SIZES)}"] for name in ("dp", "pp", "cp", "ep", "acc", "micro", "ulysses", "ring")]
    families += [
        [f"tp{size(SIZES)}", f"tp{size(SIZES)}:2d", f"tp{size(SIZES)}:2.5d{size(SIZES)}", f"tp{size(SIZES)}:3d"],
        [*(f"zero{stage}" for stage in range(4)), f"zero{source.randrange(4)}:{size(SIZES)}"],
        ["1f1b", "gpipe", "zb-h1", "zbv", "dualpipev", "auto-schedule", f"interleaved{size(SIZES)}"],
        ["fp32", "bf16", "fp16", "fp8"],
        [
            "recompute",
            "selective",
            f"recompute={source.random() or 1!r}",
            "recompute=1",
            "recompute=1e-07",
            "recompute=full,0",
            "recompute=0,0.5,selective,1",
        ],
        ["sp"],
        ["offload"],
        ["gemini"],
        ["fsdp"],
    ]
    terms = [source.choice(family) for family in families if source.random() < 0.4]
    source.shuffle(terms)
    return terms or ["zero0"]


def random_plans(seed: int, count: int):
    source = random.Random(seed)
    while count:
        terms = random_terms(source)
        joined = "".join(term + source.choice(["+", " + ", " ", "\n"]) for term in terms[:-1]) + terms[-1]
        if any(overruled(read(joined)[0])):
            continue
        count -= 1
        yield terms, joined


def test_the_print_of_every_plan_reads_back_as_that_plan():
    printed = {}
    for terms, joined in random_plans(seed=2, count=3000):
        plan = Plan.parse(joined)
        assert Plan.parse(str(plan)) == plan, joined
        assert str(Plan.parse(str(plan))) == str(plan)
        assert Plan.parse("+".join(reversed(terms))) == plan, "the order of terms means nothing"
        assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
        assert printed.setdefault(str(plan), plan) == plan, "two plans with one print"
    assert len(printed) > 2000


def test_a_print_that_forgets_a_term_is_noticed(monkeypatch):
    whole = plan_text.terms
    monkeypatch.setattr(plan_text, "terms", lambda plan: [term for term in whole(plan) if term[0] != "acc"])
    assert any(Plan.parse(str(plan)) != plan for plan in (Plan.parse(joined) for _, joined in random_plans(seed=2, count=50)))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("zero1+tp2+pp4", {"zero": 1, "tp": 2, "pp": 4}),
        ("zero3:4", {"zero": 3, "zero_group": 4}),
        ("tp8:2.5d2", {"tp": 8, "tp_kind": "2.5d", "tp_depth": 2}),
        ("tp4:2d", {"tp": 4, "tp_kind": "2d"}),
        ("tp8:3d", {"tp": 8, "tp_kind": "3d"}),
        ("ulysses2+ring2", {"cp": 4, "ulysses": 2, "ring": 2}),
        ("ring2", {"cp": 2, "ulysses": 1, "ring": 2}),
        ("cp4", {"cp": 4, "ulysses": None, "ring": None}),
        ("ulysses1", {}),
        ("gemini", {"gemini": True, "zero": 3}),
        ("pp2+interleaved2+micro8", {"pp": 2, "interleaved": 2, "micro": 8}),
        ("pp2+auto-schedule", {"pp": 2, "schedule": "auto-schedule"}),
        ("zb-h1", {"schedule": "zb-h1"}),
        ("recompute", {"recompute": "full"}),
        ("recompute=1.0", {"recompute": "full"}),
        ("selective", {"recompute": "selective"}),
        ("pp2+recompute=1,0.5", {"pp": 2, "recompute": ("full", 0.5)}),
        ("pp3+recompute=selective,0,.25", {"pp": 3, "recompute": ("selective", 0.0, 0.25)}),
        ("recompute=0.25", {"recompute": 0.25}),
        ("zero0 fp32 1f1b acc1", {}),
        ("dp1", {"dp": 1}),
        ("  zero2 \t bf16\n", {"zero": 2, "precision": "bf16"}),
    ],
)
def test_a_text_sets_these_fields(text, fields):
    assert Plan.parse(text) == Plan(**fields)
    unlike = {name: value for name, value in dataclasses.asdict(Plan(**fields)).items() if value != getattr(Plan(), name)}
    assert unlike == {name: value for name, value in fields.items() if value is not None and value != getattr(Plan(), name)}


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("pp4 tp2 zero1", "zero1+tp2+pp4"),
        ("ring2+ulysses2", "ulysses2+ring2"),
        ("ulysses1+ring4", "ring4"),
        ("zero3+gemini", "gemini"),
        ("zero3:2+gemini", "zero3:2+gemini"),
        ("fp32", "zero0"),
        ("recompute=.50", "recompute=0.5"),
        ("recompute=full", "recompute"),
        ("pp3+recompute=1.0,.50,0.0", "pp3+recompute=full,0.5,0"),
    ],
)
def test_one_print(text, printed):
    assert str(Plan.parse(text)) == printed


@pytest.mark.parametrize(
    ("text", "world", "sizes"),
    [
        ("zero1", 3, (3, 1, 1, 1)),
        ("zero1+tp2+pp4", 16, (2, 4, 1, 2)),
        ("ulysses2+ring2+tp2", 8, (1, 1, 4, 2)),
        ("dp2+ep2", 2, (2, 1, 1, 1)),
        ("dp2+pp2", 4, (2, 2, 1, 1)),
        ("zero0", 1, (1, 1, 1, 1)),
    ],
)
def test_the_axes_fill_the_world(text, world, sizes):
    found = Plan.parse(text).sizes(world)
    assert list(found) == ["dp", "pp", "cp", "tp"]
    assert tuple(found.values()) == sizes


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("tp2", {"tp": 2}),
        ("tp4:2d", {"row": 2, "col": 2}),
        ("tp8:2.5d2", {"depth": 2, "row": 2, "col": 2}),
        ("tp8:3d", {"plane": 2, "row": 2, "col": 2}),
    ],
)
def test_the_axes_of_a_grid(text, axes):
    sizes, parts = Plan.parse(text).axes(16)
    assert {name: sizes[name] for name in parts["tp"]} == axes
    assert sizes["dp"] * math.prod(axes.values()) == 16


@pytest.mark.parametrize(("text", "world"), [("pp3", 8), ("dp3+tp2", 8), ("tp4", 2), ("dp2", 4), ("zero1", 0)])
def test_a_world_that_does_not_fit_has_no_sizes(text, world):
    with pytest.raises(PlanError, match="world"):
        Plan.parse(text).sizes(world)


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("zero0", 2),
        ("zero2", 2),
        ("fsdp", 2),
        ("tp2", 2),
        ("zero1+tp2+pp2", 8),
        ("dp3", 3),
        ("zero3:2", 4),
        ("zero3:4+cp2", 8),
        ("ep4", 4),
        ("ep2+zero1", 2),
        ("zero3:3+ep2", 6),
    ],
)
def test_the_default_world_gives_every_term_something_to_do(text, world):
    plan = Plan.parse(text)
    assert plan.default_world() == world
    assert plan.check(world=world) == []


def test_micro_batches_and_chunks_by_default():
    assert Plan.parse("zero1").num_micro == 1
    assert Plan.parse("pp4").num_micro == 8
    assert Plan.parse("pp4+micro3").num_micro == 3
    assert [Plan.parse(f"pp2+{name}").num_chunks for name in ("1f1b", "interleaved3", "zbv", "dualpipev")] == [1, 3, 2, 2]


def test_cp_alone_chooses_ulysses_as_far_as_heads_go():
    assert Plan.parse("cp4").context_grid(num_heads=8) == (4, 1)
    assert Plan.parse("cp4").context_grid(num_heads=2) == (2, 2)
    assert Plan.parse("cp4+tp2").context_grid(num_heads=4) == (2, 2)
    assert Plan.parse("cp6").context_grid(num_heads=3) == (3, 2)
    assert Plan.parse("cp4").context_grid() == (1, 4)
    assert Plan.parse("ulysses1+ring4").context_grid(num_heads=8) == (1, 4)


def test_a_plan_is_given_in_any_form():
    plan = Plan(zero=1, precision="bf16")
    assert Plan.of(plan) is plan
    assert Plan.of("zero1+bf16") == Plan.of({"zero": 1, "precision": "bf16"}) == plan
    assert len({plan, Plan.parse("bf16+zero1")}) == 1
    with pytest.raises(PlanError, match="given as int"):
        Plan.of(3)


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().zero = 1
