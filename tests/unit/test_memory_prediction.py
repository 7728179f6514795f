"""Predicted state bytes: the closed forms per parameter, and what ragged chunks add to them."""

import pytest

from phalanx.errors import ConfigError, PlanError
from phalanx.plan import Plan
from phalanx.planner.memory import predict, scale_activations

STATE = ("parameter", "gradient", "optimizer")


def per_parameter(text, data_size, moments=2):
    found = predict(1200, [300] * 4, Plan.parse(text), data_size, moments)
    return sum(found[name] for name in STATE) / 1200


@pytest.mark.parametrize(
    ("text", "bytes_on"),
    [
        ("zero0", lambda n: 16),
        ("zero1", lambda n: 8 + 8 / n),
        ("zero2", lambda n: 4 + 12 / n),
        ("zero3", lambda n: 16 / n),
        ("fsdp", lambda n: 16 / n),
        ("zero0+bf16", lambda n: 18),
        ("zero1+bf16", lambda n: 6 + 12 / n),
        ("zero2+fp16", lambda n: 2 + 16 / n),
        ("zero3+bf16", lambda n: 18 / n),
        ("fsdp+bf16", lambda n: 16 / n),
    ],
)
@pytest.mark.parametrize("data_size", [1, 2, 3, 4, 100])
def test_bytes_per_parameter(text, bytes_on, data_size):
    assert per_parameter(text, data_size) == pytest.approx(bytes_on(data_size), rel=1e-12)


def test_groups_and_moments():
    assert per_parameter("zero3:2", 8) == per_parameter("zero3", 2)
    assert per_parameter("zero0", 2, moments=0) == 8
    assert per_parameter("zero1+bf16", 2, moments=1) == 2 + 4 + 4 / 2 + 4 / 2


def test_what_is_in_flight():
    sizes = [100, 300, 200, 50]
    three = predict(660, sizes, Plan.parse("zero3+bf16"), 2, kept_sizes=[10], activation_bytes=7)
    assert three["gathered_parameters"] == (300 + 200) * 2
    assert three["parameter"] == (650 // 2 + 10) * 2, "what stays gathered is held whole"
    assert three["optimizer"] == 660 // 2 * 12
    assert three["gathered_gradient"] == 300 * 4
    assert three["total"] == sum(three[name] for name in three if name != "total")
    assert three["activation"] == 7
    two = predict(650, sizes, Plan.parse("zero2"), 2)
    assert (two["gathered_parameters"], two["gathered_gradient"]) == (0, 300 * 4)
    for text, data_size in (("zero1", 2), ("zero3", 1)):
        found = predict(650, sizes, Plan.parse(text), data_size)
        assert found["gathered_parameters"] == found["gathered_gradient"] == 0
    assert predict(100, [100], Plan.parse("zero3"), 2)["gathered_parameters"] == 400
    kept = predict(660, sizes, Plan(zero=3, pp=2, pp_keep=True, precision="bf16"), 2, kept_sizes=[10])
    assert (kept["gathered_parameters"], kept["gathered_gradient"]) == (650 * 2, 660 * 4)


def test_shards_of_chunks_that_do_not_divide_are_rounded_up_each():
    assert predict(4, [1, 3], Plan.parse("zero3"), 2)["parameter"] == (1 + 2) * 4
    assert predict(0, [0], Plan.parse("zero3"), 2)["total"] == 0


def test_activations_grow_with_the_rows_of_the_largest_pass():
    assert scale_activations(1000, 4, 16, Plan(), 2) == 2000
    assert scale_activations(1000, 4, 16, Plan(acc=2), 2) == 1000
    assert scale_activations(1000, 4, 9, Plan(acc=2), 2) == 750
    with pytest.raises(ConfigError, match="0 rows"):
        scale_activations(1000, 0, 16, Plan(), 2)


def test_what_has_no_closed_form_is_refused():
    for text in ("gemini", "zero1+offload", "fp8"):
        with pytest.raises(PlanError, match="no closed form"):
            predict(10, [10], Plan.parse(text), 2)
    with pytest.raises(ConfigError, match="chunks of 9 elements for 10 parameters"):
        predict(10, [9], Plan(), 2)
