"""Gradients that are collected by hand, in half precision, clipped, or not finite: each a fault that users of such systems met."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from phalanx.booster import Booster
from phalanx.cluster.pool import preload, run_ranks
from phalanx.data import take_rows
from phalanx.layout import split_range

preload("phalanx.booster", "pytest")
STAGES = ["zero0", "zero1", "zero2", "zero3"]


class Net(nn.Module):
    """Two repeated blocks between odd-sized layers; `poison` makes the next backward not finite."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.last = nn.Linear(7, 1)
        self.poison = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.last(x)
        if self.poison:
            x.register_hook(lambda gradient: gradient * torch.inf)
        return x


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def data(number, rows=None, dtype=torch.float64):
    """Batch `number` has its own number of rows, so that a mean of means is far off."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows or (7, 2, 5, 3)[number % 4], 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), (3 * inputs.sum(1, keepdim=True)).to(dtype)


def own_rows(booster, batch):
    axis = booster.mesh.axis("dp")
    return take_rows(batch, *split_range(len(batch[0]), axis.size, axis.index))


def sum_and_count(output, target):
    return ((output - target) ** 2).sum(), len(target)


def close(found, expected, limit=1e-12):
    for name, value in expected.items():
        scale = max(float(value.abs().max()), 1e-300)
        assert float((found[name].double() - value.double()).abs().max()) <= limit * scale, name


# -- gradients of several backward calls -------------------------------------------------------------------------------


def backward_by_hand(plan, holds_back, numbers, steps_after):
    booster = Booster(plan)
    model = build()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gradients = []
    for index, number in enumerate(numbers):
        inputs, target = own_rows(booster, data(number))
        is_end = index + 1 in steps_after
        with booster.no_sync() if holds_back and not is_end else nullcontext():
            loss = ((model(inputs) - target) ** 2).sum() / max(len(inputs), 1)
            booster.backward(loss, optimizer, count=len(inputs))
        if is_end:
            gradients.append(booster.gradients())
            optimizer.step()
    return gradients, booster.full_state_dict()


def plain_by_hand(numbers, steps_after):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, total, count = [], 0.0, 0
    for index, number in enumerate(numbers):
        inputs, target = data(number)
        loss, rows = sum_and_count(model(inputs), target)
        total, count = total + loss, count + rows
        if index + 1 in steps_after:
            optimizer.zero_grad()
            (total / count).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            total, count = 0.0, 0
    return gradients, model.state_dict()


@pytest.mark.parametrize("holds_back", [False, True])
@pytest.mark.parametrize("plan", STAGES)
def test_backward_calls_add_up_in_every_stage(plan, holds_back):
    numbers, ends = [0, 1, 2, 3, 0, 1], [3, 6]
    expected_gradients, expected_weights = plain_by_hand(numbers, ends)
    for gradients, weights in run_ranks(backward_by_hand, 2, plan, holds_back, numbers, ends):
        assert len(gradients) == 2
        for found, expected in zip(gradients, expected_gradients):
            close(found, expected)
        close(weights, expected_weights)


def test_a_last_window_that_is_shorter_weighs_by_its_own_rows():
    numbers, ends = list(range(10)), [4, 8, 10]
    _, expected = plain_by_hand(numbers, ends)
    for _, weights in run_ranks(backward_by_hand, 2, "zero2", True, numbers, ends):
        close(weights, expected)


# -- sums in half precision --------------------------------------------------------------------------------------------


def many_passes(plan):
    booster = Booster(plan)
    model = build(torch.float32)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sum_and_count)
    booster.forward_backward(own_rows(booster, data(0, rows=128, dtype=torch.float32)))
    return booster.gradients(), booster.precision.for_parameter(torch.float32).gradient


def half_gradients(sum_dtype):
    """Gradients of 128 rows, each computed in bf16 by itself, added up in `sum_dtype`."""
    model = build(torch.bfloat16)
    sums = {name: torch.zeros_like(p, dtype=sum_dtype) for name, p in model.named_parameters()}
    inputs, target = data(0, rows=128, dtype=torch.float32)
    for row in range(128):
        model.zero_grad()
        sum_and_count(model(inputs[row : row + 1].bfloat16()), target[row : row + 1])[0].backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad
    return {name: value.double() / 128 for name, value in sums.items()}


@pytest.mark.parametrize("plan", STAGES)
def test_many_half_gradients_are_added_in_float32(plan):
    expected = half_gradients(torch.float32)
    for gradients, dtype in run_ranks(many_passes, 2, f"{plan}+acc64+bf16"):
        assert dtype == torch.float32
        close(gradients, expected, 1e-3)


def test_that_bound_would_notice_sums_in_bf16():
    with pytest.raises(AssertionError):
        close(half_gradients(torch.bfloat16), half_gradients(torch.float32), 1e-3)


# -- norm and clipping -------------------------------------------------------------------------------------------------


def clipped_step(plan, clip_norm, norm_type, factor):
    booster = Booster(plan, clip_norm=clip_norm, norm_type=norm_type)
    model = build()
    criterion = lambda output, target: (factor * (output - target).square().sum(), len(target))  # noqa: E731
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0), criterion)
    result = booster.step(own_rows(booster, data(0)))
    return result.grad_norm, result.clip_factor, booster.full_state_dict()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("plan", [*STAGES, "zero3:2"])
def test_the_norm_is_one_number_before_clipping_in_every_stage(plan, norm_type):
    """The loss is so small that the epsilon under the division counts."""
    factor, model = 1e-7, build()
    inputs, target = data(0)
    (factor * (model(inputs) - target).square().sum() / len(target)).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = float(torch.linalg.vector_norm(whole, norm_type))
    limit = norm / 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)
    with torch.no_grad():
        expected = {name: p - p.grad for name, p in model.named_parameters()}
        moved = {name: p.grad for name, p in model.named_parameters()}
    results = run_ranks(clipped_step, 4, plan, limit, norm_type, factor)
    for found_norm, clip_factor, weights in results:
        assert found_norm == pytest.approx(norm, rel=1e-12)
        assert clip_factor == pytest.approx(limit / (norm + 1e-6), rel=1e-12)
        start = build().state_dict()
        close({name: start[name] - weights[name] for name in moved}, moved, 1e-6)
        close(weights, expected)
    assert len({(found_norm, clip_factor) for found_norm, clip_factor, _ in results}) == 1


# -- gradients that are not finite -------------------------------------------------------------------------------------


def poisoned_step(plan):
    booster = Booster(plan)
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    # Small enough that fp16 does not overflow before it is made to.
    criterion = lambda output, target: (0.01 * (output - target).square().sum(), len(target))  # noqa: E731
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, criterion, None, scheduler)
    seen = []
    for step in range(3):
        model.poison = step == 1 and booster.mesh.index("dp") == 1
        before = state_of(booster, optimizer)
        result = booster.step(own_rows(booster, data(step, rows=8, dtype=torch.float32)))
        unchanged = all(torch.equal(value, before[name]) for name, value in state_of(booster, optimizer).items() if name in before)
        seen.append((result.skipped, result.skipped_total, unchanged, result.lr))
    return seen


def state_of(booster, optimizer):
    values = {name: value.clone() for name, value in booster.full_state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        values |= {f"{number} {key}": value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    return values


@pytest.mark.parametrize("precision", ["", "+bf16", "+fp16"])
@pytest.mark.parametrize("plan", STAGES)
def test_one_bad_gradient_on_one_rank_skips_the_step_on_all(plan, precision):
    for seen in run_ranks(poisoned_step, 2, plan + precision):
        assert [skipped for skipped, *_ in seen] == [False, True, False]
        assert [total for _, total, *_ in seen] == [0, 1, 1]
        assert [unchanged for _, _, unchanged, _ in seen] == [False, True, False]
        assert [lr for *_, lr in seen] == [0.01, 0.005, 0.005], "the schedule moves with steps that happened"
