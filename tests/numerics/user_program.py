"""A program as a person writes it, with what engines trip over: odd and empty parameters, ties, buffers, a module used twice."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, ROWS = 11, 7, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 5)
        self.outer = nn.Linear(5, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return x + self.gain * self.outer(torch.tanh(self.inner(x))) + self.empty.sum()


class UserModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.three = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 3)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.shift.type_as(x)
        x = self.twice(x)
        for block in self.blocks:
            x = block(x)
        x = torch.tanh(self.twice(x)) + self.frozen(x)
        return self.head(self.norm(x) * (self.scalar + self.three.sum()))


def cross_entropy(logits, labels):
    """Sum and count, so that rows of different lengths weigh by their labels."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def batch(step):
    """Rows whose lengths are 9 8 7 ... 2, as (tokens, labels)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS, 9), generator=generator)
    ends = torch.arange(9, 9 - ROWS, -1)[:, None]
    return tokens, torch.roll(tokens, -1, 1).masked_fill(torch.arange(9)[None] >= ends, -100)


def build():
    return UserModel(), cross_entropy, batch


def mean_square(output, target):
    return F.mse_loss(output, target)


def build_mean_over_rows():
    """A criterion that returns a mean: Phalanx counts rows, because the targets are not integers."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    inputs = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    return model, mean_square, (inputs, inputs.sum(1, keepdim=True))
