"""The file form of a plan: TOML that says the same, and what the text cannot say."""

import pytest

from phalanx.errors import PlanError
from phalanx.plan import Budgets, Plan, validate
from phalanx.plan.file import parse_bytes


def write(folder, text):
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_the_text_says(tmp_path):
    for text in (
        "zero1+tp2+pp4",
        "zero3:4+bf16",
        "tp8:2.5d2+recompute=0.5",
        "pp3+recompute=full,0.5,0",
        "ulysses2+ring2",
        "pp2+interleaved2+micro5",
        "gemini",
        "zero0",
    ):
        plan = Plan.parse(text)
        assert Plan.from_toml(write(tmp_path, plan.to_toml())) == plan


def test_budgets_are_only_in_the_file(tmp_path):
    path = write(
        tmp_path, 'tp = 2\n[gemini]\ndevice = "30GB"\nhost = "60GiB"\ndisk = 500\ndisk_path = "/a \\"b\\"\\u007f"\nplacement = "static"\n'
    )
    plan = Plan.from_toml(path)
    assert plan.budgets == Budgets(device=30 * 10**9, host=60 * 2**30, disk=500, disk_path='/a "b"\x7f', placement="static")
    assert str(plan) == "gemini+tp2"
    assert Plan.from_toml(write(tmp_path, plan.to_toml())) == plan
    assert plan != Plan.parse("gemini+tp2"), "an equal plan has equal budgets"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("zeroo = 1", "no key 'zeroo'.*Try: zero"),
        ("precison = 'bf16'", "no key 'precison'.*Try: precision"),
        ("[gemini]\ndevise = '3GB'", "gemini has no key 'devise'.*Try: device"),
        ("[gemini]\ndevice = '3 potatoes'", "'3 potatoes' is no amount of memory"),
        ("[gemini]\ndevice = -1", "-1 is no amount"),
        ("[gemini]\ndevice = true", "True is no amount"),
        ("[gemini]\ndisk = '3GB'", "both a size and a path"),
        ("[gemini]\nplacement = 'moon'", "placement is 'moon'"),
        ("[budgets]\ndevice = '3GB'", "no key 'budgets'"),
        ("zero = 'two'", "zero is 'two'"),
        ("zero = [1]", r"zero is \[1\]"),
        ("gemini = 1", "gemini is 1"),
        ("fsdp = true\nzero = 0", "zero0 with fsdp"),
        ("cp = 3\nulysses = 2", None),
        ("zero = ", "is no TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, found):
    path = write(tmp_path, text)
    if found is None:
        assert "cp3 with ulysses2" in Plan.from_toml(path).check()[0]
        return
    with pytest.raises(PlanError, match=found):
        Plan.from_toml(path)


def test_a_file_is_given_by_its_path(tmp_path):
    path = write(tmp_path, "zero = 2")
    assert Plan.of(path) == Plan.of(str(path)) == Plan(zero=2)
    write(tmp_path, "sp = true\nzeroo = 1")
    with pytest.raises(PlanError, match=r"(?s)the plan of .*plan\.toml has 2 faults"):
        Plan.of(path)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        Plan.from_toml(tmp_path / "none.toml")
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is no TOML"):
        Plan.from_toml(tmp_path / "plan.toml")


def test_all_faults_of_a_table_come_at_once():
    faults = validate({"zeroo": 1, "sp": True, "gemini": {"hots": 1}})
    assert len(faults) == 3
    assert "zeroo" in faults[0]
    assert "hots" in faults[1]
    assert "sp without tp" in faults[2]


@pytest.mark.parametrize(
    ("text", "size"),
    [("30GB", 30 * 10**9), ("1.5 KiB", 1536), ("7", 7), (8, 8), ("2tb", 2 * 10**12), ("123456789012345678B", 123456789012345678)],
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "0", "3XB", "3 G B", None, 1.5e300, "1e3"])
def test_no_amounts_of_memory(text):
    with pytest.raises(PlanError, match="is no amount of memory"):
        parse_bytes(text)
