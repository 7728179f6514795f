"""Optimizers on shards: their groups, settings and schedules, the kinds that work, and the kinds that are refused."""

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, batch, boost, criterion, decoder, local, plain_step, replicas_differ, sgd, weights, worst
from torch.optim import lr_scheduler

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.testing import run_ranks

KINDS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
}


def kinds_match(plan):
    """Worst error of the weights after three steps, and whether the replicas are equal, per kind of optimizer."""
    errors = {}
    for name, make in KINDS.items():
        reference, model = decoder(layers=2), decoder(layers=2)
        plain = make(reference.parameters())
        booster, model, _boosted = boost(plan, model, make(model.parameters()))
        for step in range(3):
            plain_step(reference, plain, [batch(step)])
            booster.step(local(batch(step)))
        full = booster.full_state_dict()
        errors[name] = worst(full, weights(reference)) + len(replicas_differ(full))
    return errors


@pytest.mark.parametrize(("plan", "world"), [("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero0", 1)])
def test_elementwise_optimizers(plan, world):
    for errors in run_ranks(kinds_match, world, plan):
        # These divide by roots of gradients, which magnifies rounding where a gradient is nearly zero.
        assert max(errors.values()) < 1e-6, errors


class RowScaled(torch.optim.Optimizer):
    """Divides each gradient by its tensor's norm: looks elementwise, is not."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


def whole_matrix_kinds(plan):
    """What happens to each optimizer that looks at more than one element: the refusal, or the error against the plain loop."""
    kinds = {
        "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        "Muon": lambda model: torch.optim.Muon([p for p in model.blocks.parameters() if p.dim() == 2], lr=1e-2),
        "RowScaled": lambda model: RowScaled(model.parameters()),
        "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    }
    outcome = {}
    for name, make in kinds.items():
        reference, model = decoder(layers=2), decoder(layers=2)
        try:
            booster, model, _boosted = boost(plan, model, make(model))
            plain = make(reference)
            for step in range(2):
                booster.step(local(batch(step)))
                plain_step(reference, plain, [batch(step)])
            outcome[name] = worst(booster.full_state_dict(), weights(reference))
        except (ConfigError, TypeError) as error:
            outcome[name] = f"{type(error).__name__}: {error}"
    return outcome


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_optimizers_that_need_whole_matrices_are_refused_on_shards(plan):
    for outcome in run_ranks(whole_matrix_kinds, 2, plan):
        for name in ("Adafactor", "Muon", "RowScaled"):
            assert str(outcome[name]).startswith(f"ConfigError: {name} cannot be sharded"), outcome[name]
        assert outcome["LBFGS"].startswith("ConfigError: LBFGS.step needs a closure"), outcome["LBFGS"]


def test_optimizers_that_need_whole_matrices_work_on_whole_ones():
    for outcome in run_ranks(whole_matrix_kinds, 2, "zero0"):
        assert max(outcome[name] for name in ("Adafactor", "Muon", "RowScaled")) < 1e-6, outcome
        assert outcome["LBFGS"].startswith("ConfigError: LBFGS.step needs a closure"), outcome["LBFGS"]


def groups_of(model):
    """Decayed matrices, undecayed rest, an empty group, and a fast embedding."""
    blocks = list(model.blocks.named_parameters())
    return [
        {"params": [p for name, p in blocks if p.dim() == 2], "weight_decay": 0.3},
        {"params": []},
        {"params": [p for name, p in blocks if p.dim() < 2] + list(model.norm.parameters()) + list(model.head.parameters())},
        {"params": list(model.embed.parameters()), "lr": 0.5, "momentum": 0.5},
    ]


def groups_match(plan):
    """Groups keep their settings, and changes of them by hand between steps take effect."""
    reference, model = decoder(), decoder()
    plain = torch.optim.SGD(groups_of(reference), lr=0.1)
    booster, model, boosted = boost(plan, model, torch.optim.SGD(groups_of(model), lr=0.1))
    for step in range(4):
        for optimizer in (plain, boosted):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            if step == 2:
                optimizer.param_groups[2]["weight_decay"] = 0.2
                optimizer.param_groups[3]["lr"] *= 3
        plain_step(reference, plain, [batch(step)])
        result = booster.step(local(batch(step)))
    assert result.lr == 0.1 / 4
    assert [len(group["params"]) for group in plain.param_groups][1] == len(boosted.param_groups[1]["params"]) == 0
    return worst(booster.full_state_dict(), weights(reference))


@pytest.mark.parametrize("plan", [*STAGES, "zero0+fp32+acc2"])
def test_groups_and_changes_by_hand(plan):
    assert max(run_ranks(groups_match, 3, plan)) < TOLERANCE


SCHEDULES = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3)),
    "OneCycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8),
    "Cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "Plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "Sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.7)], milestones=[2]
    ),
}


def schedules_match(plan):
    """Whether the settings after each step are the same function of the number of steps as in the plain loop."""
    same = {}
    losses = (3.0, 2.0, 2.5, 2.6, 1.0, 1.5)
    for name, make in SCHEDULES.items():
        for by_hand in (False, True):
            reference, model = decoder(layers=1), decoder(layers=1)
            plain, boosted = sgd(reference, momentum=0.9), sgd(model, momentum=0.9)
            plain_schedule, schedule = make(plain), make(boosted)
            booster = px.Booster(plan)
            model, boosted, _, _, schedule = booster.boost(model, boosted, criterion, None, schedule)
            seen = []
            for number, loss in enumerate(losses):
                plain_step(reference, plain, [batch(number, rows=4)])
                plain_schedule.step(*([loss] if name == "Plateau" else []))
                if by_hand:
                    booster.forward_backward(local(batch(number, rows=4)))
                    boosted.step()
                else:
                    booster.step(local(batch(number, rows=4)))
                if name == "Plateau":
                    schedule.step(loss)
                elif by_hand:
                    schedule.step()
                seen.append((plain.param_groups[0]["lr"], boosted.param_groups[0]["lr"]))
            assert len({lr for lr, _ in seen}) > 1  # the schedule does something
            settings = [{key: group[key] for key in ("lr", "momentum")} for group in (plain.param_groups[0], boosted.param_groups[0])]
            same[f"{name}, by hand: {by_hand}"] = all(a == b for a, b in seen) and settings[0] == settings[1]
            if not by_hand and name != "Plateau":
                with pytest.raises(ConfigError, match="has advanced it already"):
                    schedule.step()
    return same


@pytest.mark.parametrize(("plan", "world"), [("zero0+acc2", 1), ("zero1+acc2", 2), ("zero3", 4)])
def test_schedules_step_once_per_optimizer_step(plan, world):
    for same in run_ranks(schedules_match, world, plan):
        assert all(same.values()), same


def moments_move_along(plan):
    """An optimizer that has stepped before boost keeps its moments; a foreign parameter and a late group are refused."""
    reference, model = decoder(layers=2), decoder(layers=2)
    plain, boosted = (KINDS["AdamW"](net.parameters()) for net in (reference, model))
    for net, optimizer in ((reference, plain), (model, boosted)):
        plain_step(net, optimizer, [batch(0)])
    booster, model, boosted = boost(plan, model, boosted)
    for step in range(1, 3):
        plain_step(reference, plain, [batch(step)])
        booster.step(local(batch(step)))
    with pytest.raises(ConfigError, match="group was added after boost"):
        boosted.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="got a closure"):
        boosted.step(lambda: None)
    other = decoder()
    with pytest.raises(ConfigError, match="that the model does not have"):
        boost(plan, other, torch.optim.SGD([*other.parameters(), torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    return worst(booster.full_state_dict(), weights(reference))


@pytest.mark.parametrize("plan", STAGES)
def test_moments_from_before_boost(plan):
    assert max(run_ranks(moments_move_along, 2, plan)) < 1e-6
