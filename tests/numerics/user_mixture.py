"""A language model as a person writes it, with a block of their own: a router, and a list of experts that its forward calls."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH = 31, 16


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, num_experts=5, num_choices=2):
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.num_choices = num_choices
        self.push = 0.0

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = (self.router(tokens) + self.push).softmax(-1).topk(self.num_choices, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out.index_add_(0, token, weights[token, choice, None] * expert(tokens[token]))
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixture, self.mix = nn.LayerNorm(WIDTH), Mixture(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.mixture(self.norm(x + self.mix(before)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, push=None):
        x = self.embedding(ids)
        for layer in self.layers:
            layer.mixture.push = 0.0 if push is None else push
            x = layer(x)
        return self.head(x)


def criterion(logits, batch):
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"), (labels != -100).sum()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (7, 9), generator=generator)
    labels = ids.roll(-1, 1)
    for row, length in enumerate((9, 8, 7, 6, 4, 2, 1)):
        labels[row, length:] = -100
    return {"ids": ids, "labels": labels}


def build():
    return Model(), criterion, batch


def pushed_batch(step):
    """In step 1 no token chooses the last two experts, in step 2 every token does."""
    push = torch.zeros(5)
    push[3:] = (0.0, -50.0, 50.0)[step]
    return {**batch(step), "push": push}


def build_pushed():
    return Model(), criterion, pushed_batch


class ByRow(Model):
    """`push` has a row for each row of the batch."""

    def forward(self, ids, push):
        return super().forward(ids, push.repeat_interleave(ids.shape[1], 0))


def batch_by_row(step):
    """The first two rows choose freely, the others the first and the last expert: ranks call other experts."""
    push = torch.zeros(7, 5)
    push[2:, 1:4] = -50.0
    return {**batch(step), "push": push}


def build_by_row():
    model = ByRow()
    model.layers.extend([Layer() for _ in range(3)])
    return model, criterion, batch_by_row


class Sharing(Mixture):
    """Experts that are one module, and so one weight, at several places of the list."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([self.experts[at] for at in (0, 1, 0, 2, 1)])


def build_sharing():
    model = Model()
    for layer in model.layers:
        layer.mixture = Sharing()
    return model, criterion, batch


class Scaling(Mixture):
    """Weights scale what goes into an expert as well as what it gives out."""

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.num_choices, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            weight = weights[token, choice, None]
            out = out.index_add(0, token, weight * expert(weight * tokens[token]))
        return out.view_as(x)


def build_scaling():
    model = Model()
    for layer in model.layers:
        layer.mixture = Scaling()
    return model, criterion, batch


class Alone(nn.Module):
    """One mixture that stands in no stack of layers, with experts large enough to be gathered one by one."""

    def __init__(self, width=256):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.router = nn.Linear(width, 5, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(5))

    def forward(self, ids, push):
        x = self.embedding(ids)
        tokens = x.flatten(0, 1)
        weights, chosen = (self.router(tokens) + push.repeat_interleave(ids.shape[1], 0)).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            if len(token := (chosen == number).nonzero()[:, 0]):
                tokens = tokens.index_add(0, token, weights[token, None] * expert(tokens[token]))
        return self.head(tokens.view_as(x))


def build_alone():
    return Alone(), criterion, batch_by_row


def build_balanced(num_choices=2, **config):
    """A stock model with its own balance loss, weighted so that it cannot be overlooked."""
    from transformers import MixtralConfig

    from phalanx.verify.tiny import build_from_config, make_config

    own = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "num_local_experts": 4, "num_experts_per_tok": num_choices}
    return build_from_config(make_config(MixtralConfig, {**own, **config}))[0]


def build_balanced_alone():
    """With one choice whose weight is 1, the balance loss is all that trains the router."""
    return build_balanced(num_choices=1)
