"""Tiny models, ragged batches, the plain one-process loop, and how their numbers are compared with a boosted run."""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.data import take_rows
from phalanx.layout import split_range

STAGES = ("zero0", "zero1", "zero2", "zero3")
WORDS, WIDTH, LENGTHS = 37, 12, (12, 11, 10, 9, 6, 4, 3, 2)
TOLERANCE = 1e-9


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.drop = nn.Dropout(dropout)
        nn.init.normal_(self.norm.weight, 1.0, 0.2)

    def forward(self, x):
        mixed = torch.cumsum(x, 1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.drop(self.down(F.gelu(self.up(self.norm(mixed)))))


class Decoder(nn.Module):
    """A next-word model of four blocks; returns logits."""

    def __init__(self, *, tied=False, dropout=0.0, layers=4):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return Decoder(**options).to(dtype)


def batch(seed=1, rows=8):
    """Rows of very different lengths; what lies behind the end is labelled -100."""
    words = torch.randint(0, WORDS, (rows, 12), generator=torch.Generator().manual_seed(seed))
    labels = words.roll(-1, 1)
    for row in range(rows):
        labels[row, LENGTHS[(row + seed) % 8] - 1 :] = -100
    return {"words": words, "labels": labels}


def criterion(logits, rows):
    """(sum, count) over the labels that are not -100."""
    labels = rows["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def local(full):
    """The rows of a global batch that this rank hands in."""
    world = px.cluster.launch.world()
    total = len(next(iter(full.values())))
    return take_rows(full, *split_range(total, world.size, world.rank), total)


def plain_step(model, optimizer, batches, criterion=criterion):
    """One optimizer step of one process on all rows of `batches`: the loss, and every gradient."""
    totals = [criterion(model(rows["words"]), rows) for rows in batches]
    loss = sum(total for total, _ in totals) / sum(count for _, count in totals)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def worst(found, expected):
    """The largest relative error over all tensors: difference over the larger of a tensor's largest magnitude and 1e-6 of the model's."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    found, expected = ({name: wide(tensor) for name, tensor in tensors.items()} for tensors in (found, expected))
    largest = max((tensor.abs().max().item() for tensor in expected.values() if tensor.numel()), default=1.0)
    error = 0.0
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        if tensor.numel():
            scale = max(tensor.abs().max().item(), 1e-6 * largest, 1e-300)
            difference = (found[name] - tensor).abs().max().item() / scale
            error = max(error, difference if difference == difference else float("inf"))
    return error


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def boost(plan, model, optimizer=None, criterion=criterion, **options):
    """A Booster, and the model and optimizer that it gives back."""
    booster = px.Booster(plan, **options)
    model, optimizer, *_ = booster.boost(model, optimizer, criterion)
    return booster, model, optimizer


def replicas_differ(tensors):
    """Names of tensors that are not equal, bit for bit, on all ranks."""
    axis = px.cluster.mesh.Mesh({"dp": px.cluster.launch.world().size, "pp": 1, "cp": 1, "tp": 1}).world
    mine = {name: tensor.detach().cpu().numpy().tobytes() for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16}
    everyone = px.cluster.comm.gather_objects(mine, axis)
    return sorted(name for name in mine if any(other[name] != mine[name] for other in everyone))
