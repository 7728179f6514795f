"""What `verify` calls equal, and where it says that two runs part; on made-up runs."""

import json
import math

import pytest
import torch

from phalanx.verify.compare import QUANTITIES, compare, unequal_replicas, unequal_start
from phalanx.verify.report import Comparison, Report
from phalanx.verify.trace import Share, Trace, digest


def trace(**changes):
    """Two steps of a model with a large weight, a bias whose gradient is 0, an empty weight and an integer buffer."""
    gradient = {"big": torch.tensor([100.0, 1.0]), "bias": torch.zeros(2), "empty": torch.zeros(0), "late": torch.tensor([0.5])}
    weights = {**{name: value + 1 for name, value in gradient.items()}, "steps": torch.tensor([3])}
    run = Trace(
        losses=[2.0, 1.0],
        norms=[100.0, 50.0],
        gradients=[{k: v.double() for k, v in gradient.items()} for _ in range(2)],
        weights={k: v.double() if v.is_floating_point() else v for k, v in weights.items()},
        order=["late", "big", "bias", "empty"],
    )
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def judge(found, **keywords):
    return Comparison.of(compare(trace(), found), precision="float64", tolerance=dict.fromkeys(QUANTITIES, 1e-9), **keywords)


def test_equal_runs_are_equal():
    result = judge(trace())
    assert result.ok
    assert result.worst_relative_error == 0.0
    assert result.first_difference is None
    assert set(result.worst) == {"loss", "gradient", "norm", "weights"}


def test_an_error_is_relative_to_the_tensors_largest_magnitude():
    found = trace()
    found.gradients[1]["big"][1] += 1e-6  # an element of 1 in a tensor whose largest is 100
    result = judge(found)
    assert not result.ok
    assert result.worst["gradient"] == pytest.approx(1e-8)
    assert result.first_difference == "gradient of big (step 2)"


def test_tensors_of_zeros_are_measured_by_the_largest_of_the_model():
    found = trace()
    found.gradients[0]["bias"] += 1e-14  # rounding where the true gradient is 0: 1e-14 / (1e-6 * 100)
    assert judge(found).worst["gradient"] == pytest.approx(1e-10)
    assert judge(found).ok
    found.gradients[0]["bias"] += 1e-5
    assert not judge(found).ok


def test_the_first_difference_is_in_execution_order_not_in_the_order_of_names():
    found = trace()
    for name in ("big", "late"):
        found.gradients[0][name] += 1.0
    assert judge(found).first_difference == "gradient of late (step 1)"


@pytest.mark.parametrize("quantity", ["losses", "norms"])
def test_losses_and_norms_are_compared(quantity):
    found = trace(**{quantity: [getattr(trace(), quantity)[0], 1.0001]})
    result = judge(found)
    assert not result.ok
    assert result.first_difference.endswith("(step 2)")
    assert not judge(trace(**{quantity: []})).ok


def test_weights_and_buffers_are_compared():
    found = trace()
    found.weights["late"] += 1e-6
    assert judge(found).first_difference == "weight late (after the last step)"
    found = trace()
    found.weights["steps"] += 1
    assert judge(found).first_difference == "weight steps (after the last step): integers differ"


def test_missing_misshapen_and_not_finite_tensors_are_different():
    found = trace()
    del found.weights["big"]
    assert "missing" in judge(found).first_difference
    found = trace()
    found.gradients[0]["big"] = torch.zeros(3).double()
    assert "shape (3,) where (2,) is right" in judge(found).first_difference
    found = trace()
    found.gradients[0]["big"][0] = math.nan
    result = judge(found)
    assert not result.ok
    assert result.worst_relative_error == math.inf


def test_a_missing_gradient_is_one_of_zeros():
    found, expected = trace(), trace()
    for run in (found, expected):
        del run.gradients[0]["bias"]
    found.gradients[0]["bias"] = torch.zeros(2).double()
    assert Comparison.of(compare(expected, found), precision="float64", tolerance=dict.fromkeys(QUANTITIES, 1e-9)).ok
    del found.gradients[0]["big"]
    assert not Comparison.of(compare(expected, found), precision="float64", tolerance=dict.fromkeys(QUANTITIES, 1e-9)).ok


def test_replicas_must_agree_bit_for_bit():
    ranks = [trace().seal(), trace().seal().only_digests()]
    assert unequal_replicas(ranks) is None
    other = trace()
    other.weights["big"][0] = torch.nextafter(other.weights["big"][0], torch.tensor(1e9).double())
    ranks.append(other.seal().only_digests())
    assert unequal_replicas(ranks) == "weight big differs between rank 0 and rank 2"
    result = judge(trace(), replicas=unequal_replicas(ranks))
    assert not result.ok
    assert result.first_difference == result.replicas


def test_a_digest_covers_every_bit_the_shape_and_the_dtype():
    zero = torch.zeros(2, 3)
    others = [zero.T.contiguous(), zero.double(), -zero, zero.bfloat16(), torch.zeros(0), torch.zeros(())]
    assert len({digest(value) for value in [zero, *others]}) == 1 + len(others)
    assert digest(zero) == digest(torch.zeros(3, 2).T.contiguous())
    assert unequal_start({"a": digest(zero)}, {"a": digest(-zero)}) == "a"


def report(**changes):
    fields = {"model": "tiny-llama", "plan": "zero1", "world": 2, "steps": 3, "seconds": 1.5, "comparisons": (judge(trace()),)}
    return Report(**{**fields, **changes})


def test_the_report_is_one_json_object():
    values = json.loads(report().to_json())
    assert values["ok"] is True
    assert {"ok", "worst_relative_error", "first_difference", "model", "plan", "world"} <= set(values)
    found = trace()
    found.gradients[0]["big"][0] = math.inf
    values = json.loads(report(comparisons=(judge(found),)).to_json(), parse_constant=pytest.fail)
    assert values["ok"] is False
    assert values["worst_relative_error"] is None
    assert values["first_difference"] == "gradient of big (step 1): not finite"


def test_the_report_for_people_names_the_first_difference():
    assert "equal to one process" in str(report())
    found = trace(losses=[2.0, 1.5])
    text = str(report(comparisons=(judge(trace()), judge(found))))
    assert "NOT equal" in text
    assert "first difference: loss (step 2)" in text


def test_the_report_tells_what_ranks_hold():
    text = str(report(comparisons=(judge(trace(), shares=[Share(0.5, 0.25), Share(0.51, 0.25)]),)))
    assert "a rank computes with 50 to 51 % of the parameters and updates 25 %" in text
