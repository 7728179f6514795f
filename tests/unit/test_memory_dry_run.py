"""What a pass without data may do, and what becomes of a model that needs numbers or keeps tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError

TABLE = {"device": "1GB", "host": "1GB", "placement": "host"}


class Model(nn.Module):
    """Two layers, between which a person's own function may do what it likes."""

    def __init__(self, between):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.between = between

    def forward(self, x):
        return self.layers[1](self.between(self.layers[0](x)))


def boosted(between):
    torch.manual_seed(0)
    model = Model(between)
    booster = px.Booster({"gemini": TABLE})
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda output, batch: (output.square().sum(), torch.tensor(3.0)))
    return booster


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * (2 if x.sum() > 0 else 3),
        lambda x: x[x.sum(1) > -1e9],
        lambda x: x + torch.from_numpy(x.detach().numpy()),
    ],
    ids=["branches", "selects", "numpy"],
)
def test_a_pass_that_needs_numbers_is_served_on_demand_and_says_so(between, monkeypatch):
    said = []
    monkeypatch.setattr("phalanx.memory.gemini.get_logger", lambda: SimpleNamespace(warning=said.append))
    booster = boosted(between)
    booster.step(torch.ones(3, 4))
    assert booster.trainings[0].engine.tiers.plan is None
    assert len(said) == 1
    assert "cannot be found without running it" in said[0]


def test_an_error_of_the_model_itself_is_not_taken_for_that():
    def broken(x):
        raise RuntimeError("the person's own")

    with pytest.raises(RuntimeError, match="the person's own"):
        boosted(broken).step(torch.ones(3, 4))


def test_a_tensor_kept_from_the_pass_without_data_is_found():
    kept = {}

    def caches(x):
        return x * kept.setdefault("scale", torch.full((4,), 2.0))

    with pytest.raises(ConfigError, match="a tensor without data, which the model has kept"):
        boosted(caches).step(torch.ones(3, 4))
