"""Criteria of every make, and what is done to a model between boost and step: exact under a cut, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.errors import ConfigError
from phalanx.layout import split_range
from phalanx.testing import run_ranks

NUM_ROWS, NUM_CLASSES, PENALTY = 7, 3, 0.01
WEIGHTS = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def with_penalty(model):
    def criterion(output, labels):
        penalty = PENALTY * sum(parameter.pow(2).sum() for parameter in model.parameters())
        return F.cross_entropy(output, labels, reduction="sum") + labels.numel() * penalty, labels.numel()

    return criterion


CRITERIA = {
    "mean": lambda model: nn.CrossEntropyLoss(),
    "own ignored label": lambda model: nn.CrossEntropyLoss(ignore_index=0),
    "class weights": lambda model: nn.CrossEntropyLoss(weight=WEIGHTS),
    "sum": lambda model: nn.CrossEntropyLoss(reduction="sum"),
    "weights by hand": lambda model: lambda output, labels: F.cross_entropy(output, labels, weight=WEIGHTS),
    "sum by hand": lambda model: lambda output, labels: F.cross_entropy(output, labels, reduction="sum"),
    "penalty on the weights": with_penalty,
}


def make():
    torch.manual_seed(0)
    model = Classifier().double()
    x, labels = torch.randn(NUM_ROWS, 8, dtype=torch.float64), torch.randint(0, NUM_CLASSES, (NUM_ROWS,))
    labels[0] = 0
    return model, x, labels


def plain_gradients(name):
    model, x, labels = make()
    loss = CRITERIA[name](model)(model(x), labels)
    (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def boosted(name, plan):
    model, x, labels = make()
    booster = px.Booster(plan)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), CRITERIA[name](model))
    start, stop = split_range(NUM_ROWS, booster.world.size, booster.world.rank)
    return booster, model, optimizer, (x[start:stop], labels[start:stop])


def gradient_error(name, plan):
    booster, _, optimizer, rows = boosted(name, plan)
    booster.forward_backward(rows)
    gradients, expected = booster.gradients(), plain_gradients(name)
    error = max(float((gradients[key] - value).abs().max()) for key, value in expected.items())
    return error, optimizer.step().skipped


@pytest.mark.parametrize("plan", ["zero1", "zero3", "zero0+acc2"])
@pytest.mark.parametrize("name", ["mean", "own ignored label", "penalty on the weights"])
def test_a_criterion_that_adds_up_is_exact(name, plan):
    for error, skipped in run_ranks(gradient_error, 2, name, plan):
        assert error < 1e-12
        assert not skipped


def refusal(name, plan):
    try:
        booster, _, _, rows = boosted(name, plan)
        booster.step(rows)
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("name", ["class weights", "sum", "weights by hand", "sum by hand"])
def test_a_criterion_that_does_not_add_up_is_refused_where_the_batch_is_cut(name):
    (message,) = run_ranks(refusal, 1, name, "zero0+acc2")
    assert "mean" in message
    assert "count" in message
    assert run_ranks(refusal, 1, name, "zero0") == ["accepted"]  # one piece needs no count


def changed_after_boost(plan):
    messages = []
    booster, model, _, rows = boosted("mean", plan)
    weights = Classifier().double().state_dict()
    for change in (lambda: model.load_state_dict(weights), lambda: (model.float(), booster.step((rows[0].float(), rows[1])))):
        try:
            change()
            messages.append("accepted")
        except ConfigError as error:
            messages.append(str(error))
        except RuntimeError:
            messages.append("refused by PyTorch")
    return messages


def test_weights_that_would_be_lost_are_refused():
    for load, conversion in run_ranks(changed_after_boost, 2, "zero3"):
        assert "load_model" in load
        assert conversion != "accepted"
    for load, conversion in run_ranks(changed_after_boost, 2, "zero1"):
        assert load == "accepted"  # the model's tensors are what the optimizer updates
        assert "after boost" in conversion
