"""Models of every make under every stage: frozen, adapted, mixed, tied, reused, unused, and what cannot be exact."""

import time

import pytest
import torch
from booster_programs import (
    STAGES,
    TOLERANCE,
    WIDTH,
    WORDS,
    Block,
    batch,
    boost,
    criterion,
    decoder,
    local,
    plain_step,
    replicas_differ,
    sgd,
    weights,
    worst,
)
from patience import patience
from torch import nn
from torch.nn import functional as F

from phalanx.errors import CommError, ConfigError, PlanError
from phalanx.memory import partition
from phalanx.testing import RankError, run_ranks


def error_of(plan, make, steps=3, change=lambda model, step: None, make_optimizer=sgd, rows=8, world=None):
    """Worst error of gradients, norm and weights over some steps; `change` is applied to both models before each."""
    reference, model = make(), make()
    plain, boosted = make_optimizer(reference), make_optimizer(model)
    booster, model, boosted = boost(plan, model, boosted)
    error = 0.0
    for step in range(steps):
        change(reference, step)
        change(model, step)
        loss, expected = plain_step(reference, plain, [batch(step, rows)])
        got = booster.forward_backward(local(batch(step, rows)))
        error = max(error, worst(booster.gradients(), expected), abs(got.loss / loss - 1))
        norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm().item()
        error = max(error, abs(boosted.step().grad_norm / norm - 1))
    full = booster.full_state_dict()
    error = max(error, worst(full, {**weights(reference), **dict(reference.named_buffers())}))
    assert not replicas_differ(full)
    return error, booster, model, boosted


# -- frozen and adapted ------------------------------------------------------------------------------------------------


def freeze(model, step):
    """Layers 0 and 2 and the embedding are frozen; layer 0 thaws after two steps."""
    if step == 0:
        for part in (model.embed, model.blocks[0], model.blocks[2]):
            part.requires_grad_(False)
    if step == 2:
        model.blocks[0].requires_grad_(True)


def frozen(plan):
    def make():
        model = decoder()
        freeze(model, 0)
        return model

    start = weights(make())
    errors = {}
    for kind in (sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)):
        error, booster, _model, optimizer = error_of(plan, make, 4, freeze, kind)
        full = booster.full_state_dict()
        for name in ("embed.weight", "blocks.2.up.weight"):
            assert torch.equal(full[name], start[name])
        assert not torch.equal(full["blocks.0.up.weight"], start["blocks.0.up.weight"])
        errors[type(optimizer.inner).__name__] = error
    with_state = {id(parameter) for parameter in optimizer.state if optimizer.state[parameter]}
    stateful = {slot.name for _, slot in booster.trainings[0].engine.shards() if id(slot.shard) in with_state}
    assert stateful
    assert not [name for name in stateful if name.startswith(("embed", "blocks.2"))]
    return errors


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of rank 2."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, inner.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(inner.out_features, 2))

    def forward(self, x):
        return self.inner(x) + x @ self.down.T @ self.up.T


def adapted():
    torch.manual_seed(0)
    model = decoder().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LowRank(block.up).double(), LowRank(block.down).double()
    return model


def adapters(plan):
    start = weights(adapted())
    error, booster, *_ = error_of(plan, adapted)
    full = booster.full_state_dict()
    changed = {name for name in full if not torch.equal(full[name], start[name])}
    assert changed == {name for name, parameter in adapted().named_parameters() if parameter.requires_grad}
    return error


@pytest.mark.parametrize(("plan", "world"), [("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero3:2", 4)])
def test_frozen_and_adapted(plan, world):
    for errors in run_ranks(frozen, world, plan):
        assert errors["SGD"] < TOLERANCE
        assert errors["AdamW"] < 1e-6
    assert max(run_ranks(adapters, world, plan)) < TOLERANCE


# -- dtypes and sizes --------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """bfloat16 matrices, float32 norms, a float64 scalar, an integer buffer, and parameters of 0, 1, 3 and 7 elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.none, self.one = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(1))
        self.three, self.seven = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, words):
        self.calls += 1
        x = self.embed(words) * self.one + self.none.sum()
        x = x + F.pad(self.three, (0, 9)) + F.pad(self.seven, (5, 0))
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x).to(block.weight.dtype)).to(x.dtype)
        return self.head(x) * self.scale


def mixed(plan):
    reference, model = Mixed(), Mixed()
    dtypes = {name: parameter.dtype for name, parameter in reference.named_parameters()}
    plain, boosted = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (reference, model))
    booster, model, boosted = boost(plan, model, boosted)
    for step in range(3):
        plain_step(reference, plain, [batch(step)])
        booster.step(local(batch(step)))
    assert model.calls.dtype == torch.int64
    full, expected = booster.full_state_dict(), weights(reference)
    assert not replicas_differ(full)
    if "bf16" not in plan:
        assert {name: full[name].dtype for name in dtypes} == dtypes
    held = {slot.name: slot.shard.dtype for _, slot in booster.trainings[0].engine.shards()}
    assert all(held[name] == torch.float32 for name in held if name.startswith("norms"))
    assert held.get("scale", torch.float64) == torch.float64
    return max((full[name].double() - value.double()).abs().max().item() for name, value in expected.items() if value.numel())


@pytest.mark.parametrize("plan", [*STAGES, "zero3:2", "zero0+bf16", "zero1+bf16", "zero3+bf16"])
def test_mixed_dtypes_and_tiny_parameters(plan):
    # AdamW moves each weight by at most 1e-2 a step: what has lost a gradient differs by 3e-2, rounding in bfloat16 by far less.
    assert max(run_ranks(mixed, 4, plan)) < 1.2e-2


# -- shapes of the graph -----------------------------------------------------------------------------------------------


class Reused(nn.Module):
    """A block that runs three times, one that never runs, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.idle = nn.Linear(WIDTH, 300)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        for index in (0, 1, 0, 0):  # block 2 is never reached
            x = self.blocks[index](x)
        return self.head(x)


class ReadsElsewhere(nn.Module):
    """The head is the embedding's weight, read in the parent's forward; so is a block's bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return F.linear(x + self.blocks[1].down.bias, self.embed.weight)


class Alternating(nn.Module):
    """Other blocks in odd steps than in even ones, the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.step = 0

    def forward(self, words):
        x = self.embed(words)
        for index in ((0, 1, 3), (2, 1, 0))[self.step % 2]:
            x = self.blocks[index](x)
        return self.head(x)


class Wrapped(nn.Module):
    """Blocks that hand on tuples and mappings, keyword inputs, an output without gradient, and lists in between."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, *, state):
            x, rest = state["x"], state["rest"]
            return {"x": self.block(x), "rest": (*rest, x.detach())}

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, words):
        state = {"x": self.embed(words), "rest": ()}
        for layer in self.layers:
            state = layer(state=state)
        return self.head(state["x"] + 0.1 * sum(state["rest"]))


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def tell_step(model, step):
    model.step = step


def shapes(plan, streamed):
    partition.STREAMED_ELEMENTS = streamed  # 1: every embedding and every linear layer comes and goes
    kinds = (Reused, ReadsElsewhere, Alternating, Wrapped)
    errors = {}
    for kind in kinds:
        errors[kind.__name__] = error_of(plan, lambda kind=kind: build(kind), 4, tell_step)[0]
    errors["tied"] = error_of(plan, lambda: decoder(tied=True))[0]
    return errors


@pytest.mark.parametrize(
    ("plan", "world", "streamed"),
    [*((stage, 2, 1 << 16) for stage in STAGES), ("zero3", 2, 1), ("zero3", 3, 1), ("zero3:2", 4, 1), ("zero3+acc3", 2, 1)],
)
def test_modules_reused_unused_tied_and_read_elsewhere(plan, world, streamed):
    for errors in run_ranks(shapes, world, plan, streamed):
        assert max(errors.values()) < TOLERANCE, errors


# -- ranks that do different things ------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Rows that begin with a low word take another branch: a rank may run a block that others do not."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words):
        x = self.embed(words)
        low = words[:, 0] < 10
        parts = torch.zeros_like(x)
        if low.any():
            parts = parts.index_put((low.nonzero()[:, 0],), self.blocks[0](x[low]))
        if not low.all():
            parts = parts.index_put(((~low).nonzero()[:, 0],), self.blocks[1](self.blocks[2](x[~low])))
        return self.head(parts)


def sorted_batch(step):
    """The first rows take one branch and the last rows the other."""
    full = batch(step)
    full["words"][:, 0] = torch.tensor([1, 2, 3, 4, 30, 31, 32, 33])
    return full


def branching(plan):
    reference, model = build(Branching), build(Branching)
    plain, boosted = sgd(reference), sgd(model)
    booster, model, boosted = boost(plan, model, boosted)
    start, error = time.monotonic(), 0.0
    try:
        for step in range(3):
            _, expected = plain_step(reference, plain, [sorted_batch(step)])
            booster.forward_backward(local(sorted_batch(step)))
            error = max(error, worst(booster.gradients(), expected))
            boosted.step()
    except CommError as failure:
        return f"{failure}", time.monotonic() - start
    return max(error, worst(booster.full_state_dict(), weights(reference))), time.monotonic() - start


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2"])
def test_a_module_that_only_some_ranks_run(plan):
    assert max(error for error, _ in run_ranks(branching, 2, plan)) < TOLERANCE


def test_a_module_that_only_some_ranks_run_is_one_clear_error_where_parameters_are_sharded():
    start = time.monotonic()
    try:
        outcomes = run_ranks(branching, 3, "zero3")
    except RankError as failure:
        outcomes = [(str(failure), 0.0)]
    assert time.monotonic() - start < patience(30)
    for message, seconds in outcomes:
        assert "zero2" in str(message), message
        assert seconds < patience(20)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.first(x))


def refused(plan):
    """The messages of what cannot be exact."""
    messages = {}
    try:
        boost(plan, Normed())
    except PlanError as error:
        messages["batch norm"] = str(error)
    model = build(Reused)
    model.embed.sparse = True
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    try:
        booster, model, _optimizer = boost(plan, model, sgd(model))
        booster.step(local(batch()))
    except ConfigError as error:
        messages["sparse"] = str(error)
    return messages


@pytest.mark.parametrize(("plan", "world"), [("zero0", 2), ("zero2", 2), ("zero3", 2), ("zero0+acc2", 1)])
def test_what_cannot_be_exact_is_refused_by_name(plan, world):
    for messages in run_ranks(refused, world, plan):
        assert "norm" in messages["batch norm"]
        assert "BatchNorm1d" in messages["batch norm"]
        assert "embed.weight" in messages["sparse"]
        assert "sparse=False" in messages["sparse"]


def penalty_of(model, rows):
    """Cross entropy and the squared gradient of the loss with respect to the embedded words."""
    x = model.embed(rows["words"])
    y = x
    for block in model.blocks:
        y = block(y)
    loss, count = criterion(model.head(y), rows)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.pow(2).sum(), count


class Penalised(Reused):
    def forward(self, rows):
        return penalty_of(self, rows)


def double_backward(plan):
    reference, model = build(Penalised), build(Penalised)
    total, count = reference(batch())
    (total / count).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    booster, model, optimizer = boost(plan, model, sgd(model))
    try:
        total, count = model(local(batch()))
        booster.backward(total / count, optimizer, count=count)
        return worst(booster.gradients(), expected)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("plan", STAGES)
def test_double_backward_is_exact_or_refused(plan):
    for outcome in run_ranks(double_backward, 2, plan):
        assert "double backward" in outcome if isinstance(outcome, str) else outcome < TOLERANCE
