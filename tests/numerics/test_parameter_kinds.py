"""Frozen and unfrozen parameters, mixed dtypes, foreign weights, and evaluation, under every ZeRO stage."""

import pytest
import torch
from test_gradient_sums import STAGES, build, close, data, own_rows, sum_and_count
from torch import nn

from phalanx.booster import Booster
from phalanx.cluster.pool import preload, run_ranks

preload("phalanx.booster", "pytest")
FROZEN = ("first", "blocks.1")


def freeze(model):
    for name in FROZEN:
        model.get_submodule(name).requires_grad_(False)
    return model


def partly_frozen(plan, optimizer_class, steps):
    booster = Booster(plan)
    model = freeze(build())
    model, optimizer, *_ = booster.boost(model, optimizer_class(model.parameters(), lr=0.1), sum_and_count)
    for step in range(steps):
        if step == 2:
            model.get_submodule("first").requires_grad_(True)
        booster.step(own_rows(booster, data(step)))
    elements = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    return booster.full_state_dict(), elements


def plain_partly_frozen(steps):
    model = freeze(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if step == 2:
            model.first.requires_grad_(True)
        optimizer.zero_grad()
        inputs, target = data(step)
        loss, count = sum_and_count(model(inputs), target)
        (loss / count).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("plan", STAGES)
def test_frozen_parameters_stay_and_unfrozen_ones_train(plan):
    start, expected = build().state_dict(), plain_partly_frozen(4)
    for weights, _ in run_ranks(partly_frozen, 2, plan, torch.optim.SGD, 4):
        close(weights, expected)
        assert torch.equal(weights["blocks.1.weight"], start["blocks.1.weight"])
        assert not torch.equal(weights["first.weight"], start["first.weight"])


@pytest.mark.parametrize("plan", STAGES)
def test_frozen_parameters_have_no_optimizer_state(plan):
    results = run_ranks(partly_frozen, 2, plan, torch.optim.Adam, 2)
    trained = sum(value.numel() for name, value in build().state_dict().items() if not name.startswith(FROZEN))
    whole = 2 if plan == "zero0" else 1
    assert sum(elements for _, elements in results) == 2 * trained * whole


def with_unused(plan, optimizer_class):
    booster = Booster(plan)
    model = build()
    model.unused = nn.Linear(3, 5).double()
    start = model.unused.weight.detach().clone()
    model, *_ = booster.boost(model, optimizer_class(model.parameters(), lr=0.1, weight_decay=0.5), sum_and_count)
    for step in range(2):
        booster.step(own_rows(booster, data(step)))
    return torch.equal(booster.full_state_dict()["unused.weight"], start)


@pytest.mark.parametrize("plan", STAGES)
def test_weight_decay_leaves_alone_what_no_rank_used(plan):
    for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
        assert run_ranks(with_unused, 2, plan, optimizer_class) == [True, True]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(3, 7, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([nn.Linear(7, 7, dtype=torch.bfloat16) for _ in range(2)])
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.three = nn.Parameter(torch.ones(3))
        self.register_buffer("number", torch.tensor([5, 6]))

    def forward(self, x):
        x = self.matrix(x.bfloat16())
        for block in self.blocks:
            x = x + block(x)
        return (self.norm(x.float()) * self.three.sum()).double() * self.scale + self.empty.sum()


def mixed(plan, lr):
    torch.manual_seed(0)
    booster, model = Booster(plan), Mixed()
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=lr), sum_of_squares)
    for step in range(3):
        booster.step(own_rows(booster, (data(step, rows=9)[0], torch.ones(9, 7, dtype=torch.float64))))
    return booster.full_state_dict()


def sum_of_squares(output, target):
    return (output - target).square().sum(), len(target)


def plain_mixed(lr):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(3):
        optimizer.zero_grad()
        loss, count = sum_of_squares(model(data(step, rows=9)[0]), torch.ones(9, 7, dtype=torch.float64))
        (loss / count).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
def test_every_parameter_keeps_its_dtype_and_is_updated_in_it(plan):
    lr, torch_start = 1e-4, None
    torch.manual_seed(0)
    torch_start = Mixed().state_dict()
    expected = plain_mixed(lr)
    for weights in run_ranks(mixed, 4, plan, lr):
        assert {name: value.dtype for name, value in weights.items()} == {name: value.dtype for name, value in expected.items()}
        for name in ("norm.weight", "norm.bias", "scale", "three"):
            moved, right = weights[name] - torch_start[name], expected[name] - torch_start[name]
            assert moved.abs().max() > 0
            close({name: moved}, {name: right}, 2e-2)  # their gradients come through bf16 activations
        close(weights, {name: value for name, value in expected.items() if value.dtype == torch.bfloat16}, 2e-2)
        assert torch.equal(weights["number"], expected["number"])
        assert weights["empty"].shape == (0,)


def foreign_weights(plan, path):
    booster = Booster(plan)
    model = build(torch.float32)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0), sum_and_count)
    start = {name: value.clone() for name, value in booster.full_state_dict().items()}
    booster.save_model(path)
    for step in range(2):
        booster.step(own_rows(booster, data(step, rows=8, dtype=torch.float32)))
    trained = {name: value.clone() for name, value in booster.full_state_dict().items()}
    booster.load_model(path)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    booster.step(own_rows(booster, data(2, rows=8, dtype=torch.float32)))
    return start, trained, booster.full_state_dict()


@pytest.mark.parametrize("precision", ["", "+bf16"])
@pytest.mark.parametrize("plan", STAGES)
def test_weights_loaded_alone_replace_the_masters_too(plan, precision, tmp_path):
    for start, trained, after in run_ranks(foreign_weights, 2, plan + precision, str(tmp_path / "weights")):
        assert all(torch.equal(after[name], value) for name, value in start.items())
        assert not torch.equal(trained["first.weight"], start["first.weight"])


def train_and_evaluate(plan):
    booster = Booster(plan)
    model = build()
    start = model.state_dict()
    start = {name: value.clone() for name, value in start.items()}
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), sum_and_count)
    same = all(torch.equal(value, start[name]) for name, value in booster.full_state_dict().items())
    batch = own_rows(booster, data(0))
    return same, booster.evaluate(batch).loss, booster.step(batch).loss


@pytest.mark.parametrize("plan", [*STAGES, "fsdp"])
def test_the_first_loss_is_that_of_the_weights_that_were_given(plan):
    inputs, target = data(0)
    loss, count = sum_and_count(build()(inputs), target)
    for same, evaluated, trained in run_ranks(train_and_evaluate, 2, plan):
        assert same
        assert evaluated == pytest.approx(loss.item() / count, rel=1e-12)
        assert trained == pytest.approx(loss.item() / count, rel=1e-12)
