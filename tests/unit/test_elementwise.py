"""Which optimizers may work on shards: every elementwise one, in all its settings, and none that looks at more than one element."""

import pytest
import torch
from torch import nn, optim

from phalanx.errors import ConfigError
from phalanx.optim.elementwise import refuse_closure, require_elementwise

ELEMENTWISE = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, lr as a tensor": lambda p: optim.SGD(p, lr=torch.tensor(0.1)),
    "Adam, amsgrad": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p),
    "AdamW, foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad, fused": lambda p: optim.Adagrad(p, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Rprop": lambda p: optim.Rprop(p),
    "ASGD": lambda p: optim.ASGD(p),
}


class Descent(optim.Optimizer):
    """Plain descent along a direction that is made of the gradient; a group may set what its kind looks at."""

    def __init__(self, parameters, lr=0.1, **options):
        super().__init__(parameters, {"lr": lr, "special": False})
        self.special = False

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * self.direction(parameter, group)

    def direction(self, parameter, group):
        return parameter.grad


class ByGroup(Descent):
    def direction(self, parameter, group):
        return parameter.grad / parameter.grad.norm() if group["special"] else parameter.grad


class ByAttribute(Descent):
    def __init__(self, parameters, special=False):
        super().__init__(parameters)
        self.special = special

    def direction(self, parameter, group):
        return parameter.grad / parameter.grad.norm() if self.special else parameter.grad


class OfFilters(Descent):
    def direction(self, parameter, group):
        return parameter.grad + 0.1 * parameter if parameter.ndim > 2 else parameter.grad


class OfScalars(Descent):
    def direction(self, parameter, group):
        return parameter.grad.sign() if parameter.ndim == 0 else parameter.grad


class OfVectors(Descent):
    """Whole vectors differ from matrices, and so would the flat shards of matrices."""

    def direction(self, parameter, group):
        return parameter.grad + 0.1 * parameter if parameter.ndim > 1 else parameter.grad


class AllAtOnce(Descent):
    """Divides by the norm of all its gradients: halves that are seen together have the norm of the whole."""

    def direction(self, parameter, group):
        squares = sum((other.grad**2).sum() for each in self.param_groups for other in each["params"])
        return parameter.grad / squares.sqrt()


def parameters(*shapes):
    return [nn.Parameter(torch.randn(shape)) for shape in shapes or ((4, 3), (3,))]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name):
    require_elementwise(ELEMENTWISE[name](parameters()))
    first, second = parameters()
    require_elementwise(ELEMENTWISE[name]([{"params": [first], "maximize": True}, {"params": [second], "lr": 0.3}, {"params": []}]))
    require_elementwise(ELEMENTWISE[name](nn.Linear(2, 2).named_parameters()))


def test_settings_that_only_groups_hold_are_accepted():
    first, second = parameters()
    # The constructor would refuse nesterov without momentum; of groups it asks nothing.
    groups = [{"params": [first], "momentum": 0.0, "note": "no default"}, {"params": [second], "note": None}]
    require_elementwise(optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True))
    require_elementwise(ByGroup(parameters()))
    require_elementwise(ByAttribute(parameters()))


def with_special_group():
    first, second = parameters()
    return ByGroup([{"params": [second]}, {"params": [first], "special": True}])


def with_one_special_group():
    return ByGroup([{"params": parameters(), "special": True}])


def in_a_warm_up():
    optimizer = with_one_special_group()
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    assert optimizer.param_groups[0]["lr"] == 0.0
    return optimizer


NOT_ELEMENTWISE = {
    "one group of two": with_special_group,
    "the only group": with_one_special_group,
    "in a warm-up": in_a_warm_up,
    "lr of 0": lambda: ByGroup([{"params": parameters(), "special": True, "lr": 0.0}]),
    "an attribute": lambda: ByAttribute(parameters(), special=True),
    "more than two dimensions": lambda: OfFilters(parameters()),
    "no dimension": lambda: OfScalars(parameters()),
    "more than one dimension": lambda: OfVectors(parameters()),
    "all parameters together": lambda: AllAtOnce(parameters()),
    "Adafactor": lambda: optim.Adafactor(parameters()),
    "Muon": lambda: optim.Muon(parameters((4, 3))),
    "SparseAdam": lambda: optim.SparseAdam(parameters()),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_what_looks_at_more_than_one_element_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be sharded"):
        require_elementwise(NOT_ELEMENTWISE[name]())


def test_a_closure_is_refused():
    with pytest.raises(ConfigError, match="needs a closure"):
        refuse_closure(optim.LBFGS(parameters()))


def test_the_optimizer_and_the_random_state_are_left_alone():
    first, second = parameters()
    optimizer = optim.Adam([{"params": [first], "lr": torch.tensor(0.1)}, {"params": [second], "betas": (0.8, 0.9)}], lr=0.2)
    before, state = [first.clone(), second.clone()], torch.get_rng_state()
    require_elementwise(optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [[first], [second]]
    assert [float(group["lr"]) for group in optimizer.param_groups] == [pytest.approx(0.1), 0.2]
    assert not optimizer.state
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert torch.equal(torch.get_rng_state(), state)
