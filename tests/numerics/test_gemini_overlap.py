"""On a slow link whose transfer fits beside the work, a step takes about as long as the work."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.booster import booster as booster_module

LAYERS, WIDTH, WORK_S = 8, 256, 0.03


class Work(torch.autograd.Function):
    """Stands for work of a known time, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(WORK_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(WORK_S)
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Work.apply(torch.tanh(self.inner(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


def shortest_step(monkeypatch, bytes_per_s, device="100MB"):
    """The shortest of some steps after the second, which is the first with a timed plan; and the plan."""
    sizes = booster_module.tier_sizes
    monkeypatch.setattr(
        booster_module, "tier_sizes", lambda *a: replace(sizes(*a), bytes_per_s={"host": bytes_per_s} if bytes_per_s else {})
    )
    torch.manual_seed(0)
    booster = px.Booster({"gemini": {"device": device, "host": "1GB", "placement": "host"}})
    model = Stack()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    monkeypatch.undo()
    times, batch = [], torch.randn(4, WIDTH)
    for _ in range(6):
        begin = time.perf_counter()
        booster.step((batch,))
        times.append(time.perf_counter() - begin)
    return min(times[2:]), booster.trainings[0].engine.tiers.plan


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_transfer_that_can_hide_does(monkeypatch, share):
    work_s, _ = shortest_step(monkeypatch, None)
    bytes_per_s = 4 * WIDTH * (WIDTH + 1) / (WORK_S * share)
    step_s, plan = shortest_step(monkeypatch, bytes_per_s)
    assert plan.lags, "gradients leave beside the work"
    assert step_s <= 1.15 * max(work_s, max(plan.moved.values()) / bytes_per_s)
    on_demand_s, plan = shortest_step(monkeypatch, bytes_per_s, device=plan.smallest)
    assert not plan.lags
    assert on_demand_s > work_s + 0.2 * share * LAYERS * 3 * WORK_S, "a negative control: with no room to spare every move is waited for"
