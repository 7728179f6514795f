"""One process in half precision: masters stay in float32, and the tolerance comes from what the precision itself moves."""

import copy

import torch
from torch import nn

from phalanx.verify import choices
from phalanx.verify.choices import Choices, _nearly
from phalanx.verify.compare import compare, worst_of
from phalanx.verify.half import FLOOR, ROUNDOFF, half_reference, half_tolerances
from phalanx.verify.program import Functions, NamedModel
from phalanx.verify.reference import Run, reference

SOURCE, RUN = NamedModel("tiny-gpt2"), Run(steps=2)


def test_half_precision_stays_within_its_own_tolerance_and_moves_something():
    exact = reference(SOURCE, RUN)
    for precision in ("bf16", "fp16"):
        half = half_reference(SOURCE, RUN, precision, exact.choices)
        allowed = half_tolerances(exact, half, precision)
        moved = worst_of(compare(exact, half, FLOOR))
        assert all(moved[name] <= allowed[name] for name in moved)
        assert moved["gradient"] > ROUNDOFF[precision] / 4
        assert allowed["gradient"] < 0.2, "too wide to find a wrong count"
        assert all(value.dtype == torch.float32 for value in half.weights.values() if value.is_floating_point())


def test_updates_too_small_for_half_weights_reach_the_masters():
    trace = half_reference(SOURCE, Run(steps=1, lr=1e-5), "bf16", Choices())
    start = reference(SOURCE, Run(steps=1, lr=0.0)).weights
    changed = [name for name, value in trace.weights.items() if not torch.equal(value.double(), start[name])]
    assert "transformer.h.0.mlp.c_fc.weight" in changed


def test_a_wrong_count_is_outside_of_the_tolerance():
    exact, half = reference(SOURCE, RUN), half_reference(SOURCE, RUN, "bf16", Choices())
    allowed = half_tolerances(exact, half, "bf16")
    wrong = copy.deepcopy(half)
    wrong.gradients = [{name: 1.3 * value for name, value in gradients.items()} for gradients in wrong.gradients]
    assert worst_of(compare(half, wrong, FLOOR))["gradient"] > allowed["gradient"]


def test_gradients_that_overflow_lower_the_scale():
    source = Functions(lambda: nn.Linear(3, 1), lambda: torch.ones(4, 3), lambda output, batch: 200 * output.mean())
    half = half_reference(source, Run(steps=1), "fp16", Choices())  # 200 fits into fp16, 200 times the scale does not
    assert half.gradients[0]["weight"].tolist() == [[200.0] * 3]


def test_routers_in_half_precision_follow_the_exact_ones_where_scores_are_nearly_equal(monkeypatch):
    source, run = NamedModel("tiny-deepseek-v3"), Run(steps=3)
    exact = reference(source, run)

    def allowed():
        return half_tolerances(exact, half_reference(source, run, "bf16", exact.choices), "bf16")["gradient"]

    assert allowed() < 0.1, "too wide to find a missing cast"
    monkeypatch.setattr(choices, "NEARLY", -1.0)  # nothing is good enough to be followed
    assert allowed() > 0.3, "rounding turned no choice: the test shows nothing"


def test_choices_are_followed_only_where_they_are_nearly_as_good():
    scores = torch.tensor([[1.0, 0.5, 0.49, 0.0], [1.0, 0.9, 0.1, 0.0], [-torch.inf, 0.6, 0.61, 0.0]], requires_grad=True)
    own = scores.topk(2)
    values, chosen = _nearly(scores, own, torch.tensor([[0, 2], [0, 3], [0, 1]]))
    assert chosen.tolist() == [[0, 2], [0, 1], [2, 1]]
    assert torch.equal(values, scores.gather(1, chosen))
    values[:, 1].sum().backward()
    assert scores.grad.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
