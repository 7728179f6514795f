"""One process in half precision: masters stay in float32, and the tolerance comes from what the precision itself moves."""

import copy

import torch
from torch import nn

from phalanx.verify.compare import compare, worst_of
from phalanx.verify.half import FLOOR, ROUNDOFF, half_reference, half_tolerances
from phalanx.verify.program import Functions, NamedModel
from phalanx.verify.reference import Run, reference

SOURCE, RUN = NamedModel("tiny-gpt2"), Run(steps=2)


def test_half_precision_stays_within_its_own_tolerance_and_moves_something():
    exact = reference(SOURCE, RUN)
    for precision in ("bf16", "fp16"):
        half = half_reference(SOURCE, RUN, precision)
        allowed = half_tolerances(exact, half, precision)
        moved = worst_of(compare(exact, half, FLOOR))
        assert all(moved[name] <= allowed[name] for name in moved)
        assert moved["gradient"] > ROUNDOFF[precision] / 4
        assert allowed["gradient"] < 0.2, "too wide to find a wrong count"
        assert all(value.dtype == torch.float32 for value in half.weights.values() if value.is_floating_point())


def test_updates_too_small_for_half_weights_reach_the_masters():
    trace = half_reference(SOURCE, Run(steps=1, lr=1e-5), "bf16")
    start = reference(SOURCE, Run(steps=1, lr=0.0)).weights
    changed = [name for name, value in trace.weights.items() if not torch.equal(value.double(), start[name])]
    assert "transformer.h.0.mlp.c_fc.weight" in changed


def test_a_wrong_count_is_outside_of_the_tolerance():
    exact, half = reference(SOURCE, RUN), half_reference(SOURCE, RUN, "bf16")
    allowed = half_tolerances(exact, half, "bf16")
    wrong = copy.deepcopy(half)
    wrong.gradients = [{name: 1.3 * value for name, value in gradients.items()} for gradients in wrong.gradients]
    assert worst_of(compare(half, wrong, FLOOR))["gradient"] > allowed["gradient"]


def test_gradients_that_overflow_lower_the_scale():
    source = Functions(lambda: nn.Linear(3, 1), lambda: torch.ones(4, 3), lambda output, batch: 200 * output.mean())
    half = half_reference(source, Run(steps=1), "fp16")  # 200 fits into fp16, 200 times the scale does not
    assert half.gradients[0]["weight"].tolist() == [[200.0] * 3]
