"""Random models, budgets and plans: no budget is ever exceeded, bytes are as foreseen, and the smallest budget is the smallest."""

import random

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import CapacityError

VOCABULARY = 23


class Layer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A stack of unequal layers between a large embedding and a head, which may share their weight."""

    def __init__(self, rng):
        super().__init__()
        width, vocabulary = rng.choice([5, 8, 13]), rng.choice([VOCABULARY, 9000])
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, rng.choice([7, 16, 33])) for _ in range(rng.randint(1, 6)))
        self.head = nn.Linear(width, vocabulary, bias=rng.random() < 0.5)
        if rng.random() < 0.3:
            self.head.weight = self.embed.weight
        for layer in self.layers:
            if rng.random() < 0.2:
                layer.requires_grad_(False)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def criterion(logits, batch):
    labels = batch["labels"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def train(seed, table, dtype, fields, rows, optimizer, clip_norm, steps=3):
    torch.manual_seed(seed)
    model = Model(random.Random(seed)).to(dtype)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    booster = px.Booster({**fields, **({"gemini": table} if table else {})}, clip_norm=clip_norm)
    model, *_ = booster.boost(model, optimizer(learning, lr=0.01), criterion)
    tiers = booster.trainings[0].engine.tiers
    words = torch.randint(VOCABULARY, (steps, rows, 6), generator=torch.Generator().manual_seed(seed))
    losses, moved = [], []
    for batch in words:
        before = tiers.moved() if tiers else {}
        losses.append(booster.step({"words": batch, "labels": batch.roll(-1, 1)}).loss)
        moved.append({link: count - before[link] for link, count in tiers.moved().items()} if tiers else {})
    return losses, booster.full_state_dict(), tiers, moved


def one_setting(seed, folder):
    rng = random.Random(seed)
    dtype, precision = rng.choice([(torch.float64, "fp32"), (torch.float32, "bf16"), (torch.float32, "fp32")])
    fields = {"acc": rng.choice([1, 1, 2, 3]), "precision": precision}
    common = (
        dtype,
        fields,
        rng.randint(3, 8),
        rng.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]),
        rng.choice([None, 0.5]),
    )
    losses, weights, *_ = train(seed, None, *common)
    _, _, roomy, _ = train(seed, {"device": "1GB", "host": "1GB", "placement": "host"}, *common, steps=1)
    smallest, host = roomy.plan.smallest, roomy.host.budget.peak
    table = {"device": smallest + int(rng.choice([0, rng.random(), 3 * rng.random()]) * host), "host": "1GB"}
    table["placement"] = rng.choice(["auto", "auto", "static", "host"])
    if rng.random() < 0.5:
        staging = max(chunk.sizes().optimizer + chunk.sizes().gradient_shard for chunk in roomy.chunks)
        table |= {"host": staging + int(rng.random() * host), "disk": "1GB", "disk_path": str(folder)}
    found, found_weights, tiers, moved = train(seed, table, *common)
    assert found == losses
    assert all(torch.equal(found_weights[name], value) for name, value in weights.items())
    assert moved[1] == moved[2] == tiers.plan.moved
    assert tiers.arena.budget.peak <= table["device"]
    assert tiers.host.budget.peak <= tiers.sizes.host
    train(seed, table | {"device": smallest}, *common, steps=1)
    with pytest.raises(CapacityError, match=f"a step needs {smallest} bytes"):
        train(seed, table | {"device": smallest - 1}, *common, steps=1)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_settings(tmp_path, seed):
    one_setting(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10, 310, 30))
def test_three_hundred_settings(tmp_path, start):
    for seed in range(start, start + 30):
        one_setting(seed, tmp_path)
