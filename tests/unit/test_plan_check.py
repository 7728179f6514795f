"""Bad plans: each is refused in one go, with what was found and one value that works, and no process is started."""

import math
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from phalanx.errors import PlanError
from phalanx.plan import LANDED, Plan, validate

# Text, world, what must be found, and the plan that the remedy leads to (on the same world).
BAD = [
    ("pp3", 8, ["world 8 does not fit pp3"], "pp2"),
    ("tp2+pp3", 8, ["world 8 does not fit pp3+tp2", "multiple of 6"], "tp2+pp2"),
    ("dp3+tp2", 8, ["world 8 is not dp3+tp2", "6 ranks"], "dp4+tp2"),
    ("dp2+pp3", 8, ["world 8 is not dp2+pp3"], "dp2+pp4"),
    ("dp1+tp2", 8, ["world 8 is not dp1+tp2"], "dp4+tp2"),
    ("dp16", 8, ["world 8 is not dp16"], "dp8"),
    ("cp16", 8, ["world 8 does not fit cp16"], "cp8"),
    ("tp9:2d+pp2", 8, ["world 8 does not fit pp2+tp9"], "tp4:2d+pp2"),
    ("tp3+sp", 8, ["world 8 does not fit tp3"], "tp2+sp"),
    ("ulysses4+ring4+pp2", 8, ["world 8 does not fit pp2+cp16"], "dp8"),
    ("sp", None, ["sp without tp"], "tp2+sp"),
    ("tp4:2d+sp", None, ["sp with tp:2d"], "tp4+sp"),
    ("ulysses2+ring2+cp3", None, ["cp3 with ulysses2+ring2", "cp = ulysses · ring"], "ulysses2+ring2"),
    ("cp4+ulysses1", None, ["cp4 with ulysses1"], "cp4"),
    ("cp1+ring2", None, ["cp1 with ring2"], "ring2"),
    ("pp2+1f1b+gpipe", None, ["two schedules, 1f1b and gpipe"], "pp2+1f1b"),
    ("pp2+interleaved2+zbv", None, ["two schedules, interleaved2 and zbv"], "pp2+interleaved2"),
    ("interleaved2", None, ["interleaved2 without pp"], "pp2+interleaved2"),
    ("gpipe", None, ["gpipe without pp"], "pp2+gpipe"),
    ("micro4", None, ["micro4 without pp"], "acc4"),
    ("bf16+fp16", None, ["bf16 and fp16 both choose the precision"], "bf16"),
    ("recompute+selective", None, ["recompute and selective both choose the recompute"], "recompute"),
    ("tp2+tp4", None, ["tp2 and tp4 both set tp"], "tp2"),
    ("zero1+zero1", None, ["zero1 is given twice"], "zero1"),
    ("zero1:2", None, ["zero1:2", "groups belong to zero3"], "zero3:2"),
    ("zero3:4", 6, ["groups of 4 do not divide the 6 ranks"], "zero3:3"),
    ("zero3:2", 1, ["groups of 2 do not divide the 1 ranks"], "zero0"),
    ("zero4", None, ["zero4 has no such stage", "zero0, zero1, zero2, zero3"], "zero3"),
    ("tp8:2d", None, ["tp8:2d is no grid", "a square"], "tp9:2d"),
    ("tp8:2.5d3", None, ["tp8:2.5d3 is no grid", "3 times a square"], "tp12:2.5d3"),
    ("tp9:3d", None, ["tp9:3d is no grid", "a cube"], "tp8:3d"),
    ("tp8:2.5d", None, ["tp8:2.5d has no depth"], "tp8:2.5d2"),
    ("tp4:4d", None, ["tp4:4d is no kind"], "tp4"),
    ("ep3", 4, ["ep3 does not divide dp · cp = 4"], "ep2"),
    ("fsdp+zero2", None, ["fsdp with zero2"], "fsdp"),
    ("fsdp+zero0", None, ["zero0 with fsdp"], "fsdp"),
    ("fsdp+tp2", None, ["fsdp with tp2"], "zero3+tp2"),
    ("gemini+zero1", None, ["gemini with zero1"], "gemini"),
    ("gemini+zero0", None, ["zero0 with gemini"], "gemini"),
    ("gemini+offload", None, ["gemini with offload"], "gemini"),
    ("tp", None, ["tp has no number"], "tp2"),
    ("dp0", None, ["dp0 has a size of 0"], "dp2"),
    ("recompute=1.5", None, ["recompute=1.5 is no fraction"], "recompute=0.5"),
    ("recompute=0", None, ["recompute=0 is no fraction"], "recompute=0.5"),
    ("pp2+recompute=0,0", None, ["recompute=0,0 is no fraction", "not all of them 0"], "recompute=0.5"),
    ("pp2+recompute=full,1.5", None, ["recompute=full,1.5 is no fraction", "0 to 1"], "recompute=0.5"),
    ("recompute=full,0", None, ["recompute for 2 stages without pp"], "recompute=0.5"),
    ("pp3+recompute=full,0", None, ["recompute for 2 stages with pp3", "3, one for each rank"], "pp3+recompute=full,0,0"),
    ("pp2+zbv+recompute=1,0,0", None, ["recompute for 3 stages", "or 4, one for each stage"], "pp2+recompute=full,0"),
    ("zer1", None, ["'zer1' is no term"], "zero1"),
    ("bf61", None, ["'bf61' is no term"], "bf16"),
    ("ZeRO2", None, ["'ZeRO2' is no term"], "zero2"),
    ("ulises4", None, ["'ulises4' is no term"], "ulysses4"),
    ("auto", None, ["auto has not landed"], "zero2+bf16"),
    ("selec", None, ["'selec' is no term"], "selective"),
    ("zero1,tp2", None, ["'zero1,tp2' is no term"], None),
    ("zero1++tp2", None, ["an empty term"], None),
    ("zero1-tp2", None, ["'zero1-tp2' is no term"], None),
    ("banana", None, ["'banana' is no term"], None),
    ("", None, ["empty"], "zero0"),
]


@pytest.mark.parametrize(("text", "world", "found", "remedy"), BAD, ids=[repr(row[0]) for row in BAD])
def test_a_bad_plan_is_refused_with_a_remedy_that_works(text, world, found, remedy):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text).require(None, world)
    for words in found:
        assert words in str(caught.value)
    assert "Try: " in str(caught.value)
    first = validate(text, world=world)[0]
    assert all(words in first for words in found)
    if remedy:
        offered = first.partition("Try: ")[2]
        assert any(term in offered for term in re.split(r"\+", remedy)), offered
        assert Plan.parse(remedy).check(world=world) == []


def test_there_are_enough_bad_plans():
    assert len(BAD) >= 25


def test_all_faults_come_at_once():
    with pytest.raises(PlanError) as caught:
        Plan.parse("zero5+sp+bf61+micro4+gpipe+cp3+ulysses2")
    message = str(caught.value)
    for words in ("zero5", "sp without tp", "'bf61'", "micro4 without pp", "gpipe without pp", "cp3 with ulysses2"):
        assert words in message
    assert "has 6 faults" in message
    assert len(Plan.parse("sp+micro4+zero2:3+ep5+pp1+fsdp").check(world=7)) == 7


def test_a_fitting_plan_has_no_conflict():
    for text, world in [("zero1+tp2+pp4", 16), ("zero3:2", 4), ("tp8:2.5d2", 8), ("tp27:3d", 27), ("ep4", 8), ("zero3:2+tp8:2.5d2", 8)]:
        assert Plan.parse(text).check(world=world) == []


def test_the_axis_that_is_offered_for_a_world_fits_it():
    source = random.Random(5)
    sizes = (1, 2, 3, 4, 5, 6, 8)
    offers = 0
    for _ in range(2000):
        text = "+".join(f"{name}{source.choice(sizes)}" for name in ("dp", "pp", "cp", "tp") if source.random() < 0.6) or "zero0"
        world = source.randrange(1, 65)
        faults = Plan.parse(text).check(world=world)
        product = math.prod(int(size) for size in re.findall("[0-9]+", text)) if text != "zero0" else 1
        assert bool(faults) == (world != product if "dp" in text else world % product != 0), (text, world)
        if faults and (offer := re.search("Try: ([a-z0-9]+) in place of ([a-z0-9]+)", faults[0])):
            offers += 1
            assert math.prod(Plan.parse(text.replace(offer[2], offer[1])).sizes(world).values()) == world
    assert offers > 500


def test_nothing_but_a_plan_error_comes_of_any_text():
    source = random.Random(7)
    letters = "abcdeghimnoprstuvz0123456789:=.+- \n²_"
    for _ in range(3000):
        text = "".join(source.choice(letters) for _ in range(source.randrange(12)))
        if source.random() < 0.5:
            text = source.choice(["tp", "zero", "recompute=", "tp4:2.5d", "interleaved", "dp1"]) + text
        try:
            Plan.parse(text).check(world=source.randrange(-1, 9))
        except PlanError:
            continue


def test_the_model_is_checked_too():
    anatomy = SimpleNamespace(num_layers=6, num_experts=4)
    assert Plan.parse("pp3+interleaved2+ep4").check(anatomy) == []
    assert "a pipeline of 8 chunks for 6 layers" in Plan.parse("pp4+interleaved2").check(anatomy)[0]
    assert "ep8 for 4 experts" in Plan.parse("ep8").check(anatomy)[0]
    dense = SimpleNamespace(num_layers=0, num_experts=0)
    assert "without experts" in Plan.parse("ep8").check(dense)[0]
    assert "without a stack of layers" in Plan.parse("recompute").check(dense)[0]
    assert Plan.parse("pp4+recompute").check(object()) == []


LANDED_TEXTS = [
    "zero0",
    "gemini+bf16",
    "dp2+acc4",
    "zero1+bf16",
    "zero2+fp16",
    "zero3+recompute",
    "zero3:2+selective",
    "zero1+ep2",
    "fsdp+bf16+recompute=0.5",
    "zero1+cp2",
    "ulysses2+ring2",
    "tp2",
    "zero1+tp3+sp",
    "tp4:2d",
    "zero1+tp8:2.5d2",
    "tp8:3d",
]
MISSING_TEXTS = ["offload", "fp8"]


@pytest.mark.parametrize("text", LANDED_TEXTS)
def test_landed_terms_can_be_used(text):
    Plan.parse(text).require(None, None)


@pytest.mark.parametrize("text", MISSING_TEXTS)
def test_terms_that_have_not_landed_are_read_and_checked_but_not_used(text):
    plan = Plan.parse(text)
    assert plan.check() == []
    term = text.split("+")[-1]
    with pytest.raises(PlanError, match=f"{term} has not landed. Try: "):
        plan.require(None, None)


def test_landing_a_strategy_is_one_line(monkeypatch):
    monkeypatch.setattr("phalanx.plan.landed.LANDED", LANDED | {"gemini"})
    Plan.parse("gemini").require(None, 2)
    with pytest.raises(PlanError, match="offload has not landed"):
        Plan.parse("offload").require(None, 2)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"tp": True}, "tp is True"),
        ({"dp": -1}, "dp is -1"),
        ({"pp": 2.0}, "pp is 2.0"),
        ({"zero": 4}, "zero is 4"),
        ({"zero": 1.0}, "zero is 1.0"),
        ({"zero": True}, "zero is True"),
        ({"precision": "fp17"}, "precision is 'fp17'.*Try: precision fp16"),
        ({"sp": 1}, "sp is 1"),
        ({"recompute": 0}, "recompute is 0"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"pp": 2, "recompute": []}, r"recompute is \[\]"),
        ({"pp": 2, "recompute": [1]}, r"recompute is \[1\]"),
        ({"pp": 2, "recompute": [True, 0]}, r"recompute is \[True, 0\]"),
        ({"pp": 2, "recompute": ["full", None]}, r"recompute is \['full', None\]"),
        ({"pp": 2, "recompute": ["full", [0.5]]}, r"recompute is \['full', \[0.5\]\]"),
        ({"tp_depth": 2}, "tp_depth 2 with tp_kind 1d"),
        ({"schedule": "zbv", "interleaved": 2}, "two schedules"),
        ({"tp": 0, "zero": 7}, "2 faults"),
    ],
)
def test_a_field_takes_only_what_it_can_have(fields, found):
    with pytest.raises(PlanError, match=found):
        Plan(**fields)


def test_a_check_needs_neither_torch_nor_processes():
    """The plan is pure: reading and refusing one imports no framework and starts nothing."""
    code = "import sys; from phalanx.plan import validate; print(len(validate('pp3+sp', world=8)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
