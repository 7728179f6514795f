"""Logits in parts of the vocabulary on ranks: no model's own loss makes them travel, and the gradients are those of one process."""

import pytest
import torch
from torch.nn import functional as F

import phalanx as px
from phalanx.cluster import comm
from phalanx.data import take_rows
from phalanx.errors import PlanError
from phalanx.layout import split_range
from phalanx.parallel.tensor import SplitLogits
from phalanx.plan import Plan
from phalanx.testing import run_ranks
from phalanx.train.memory import TensorCount
from phalanx.verify.batches import make_batch
from phalanx.verify.tiny import build_tiny

ROWS, LENGTH, WIDTH, SIZE, MANY = 4, 13, 8, 997, 8
# Masked tokens, an encoder with its own loss, a bias over the vocabulary, and a cap on logits.
MODELS = ("tiny-bert", "tiny-t5", "tiny-whisper", "tiny-bart", "tiny-gemma2")


def operations(names, plan="tp2", always_whole=False):
    """The operations over the tensor axis of a step of each model."""
    if always_whole:
        SplitLogits.can_stand_in = lambda self, size: False
    found = {}
    for name in names:
        torch.manual_seed(0)
        model, kind = build_tiny(name)
        booster = px.Booster(plan)
        booster.boost(model)
        with comm.ledger.record() as rows:
            booster.forward_backward(make_batch(kind, model.config, 0))
        found[name] = {operation for operation, axis, _, _, wire in rows if axis == "tp" and wire}
    return found


def test_no_family_gathers_its_logits():
    for name, found in run_ranks(operations, 2, MODELS)[0].items():
        assert found == {"all_reduce"}, name


def test_gathered_logits_would_be_seen():
    assert run_ranks(operations, 2, MODELS[:1], "tp2", True)[0] == {"tiny-bert": {"all_reduce", "all_to_all"}}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 12), torch.nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tagger(torch.nn.Module):
    """A stack with a head and no loss of its own."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(SIZE, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, SIZE)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tags():
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(SIZE, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[1:, 7:] = -100
    return tokens, labels


def usual(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels)


def by_hand(logits, labels):
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(chosen * (labels != -100)).sum(), (labels != -100).sum()


def boosted(plan, criterion):
    torch.manual_seed(0)
    booster = px.Booster(plan)
    booster.boost(Tagger().double(), None, criterion, [tags()])
    rows = booster.trainings[0].cut
    booster.tags = tags() if rows is None else take_rows(tags(), *split_range(ROWS, rows.size, rows.index), ROWS)
    return booster


def gradients(plan, criterion):
    booster = boosted(plan, criterion)
    with comm.ledger.record() as rows:
        loss = float(booster.forward_backward(tags()).loss)
    largest = max(wire for operation, axis, _, _, wire in rows if axis in ("tp", "col"))
    return loss, booster.gradients(), largest


@pytest.mark.parametrize(("plan", "world"), [("tp3", 3), ("tp4:2d", 4)])
@pytest.mark.parametrize(("criterion", "travel"), [(usual, False), (by_hand, True)])
def test_a_criterion_sees_the_logits_it_asks_for(plan, world, criterion, travel):
    torch.manual_seed(0)
    model = Tagger().double()
    tokens, labels = tags()
    expected = usual(model(tokens), labels)
    expected.backward()
    loss, found, largest = run_ranks(gradients, world, plan, criterion)[0]
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() < 1e-9 * parameter.grad.abs().max(), name
    assert (largest >= ROWS * LENGTH * SIZE * 8 // 4 // 2) == travel


# -- logits a few tokens at a time ---------------------------------------------------------------------------------------


def rise(plan):
    """The most bytes that a forward takes above what was there."""
    from phalanx.kernels import linear_cross_entropy

    linear_cross_entropy.CPU_CHUNK_BYTES = 8 * SIZE  # one token
    booster = boosted(plan, usual)
    training = booster.trainings[0]
    booster.forward_backward(tags())
    many = tuple(part.repeat(1, MANY) for part in booster.tags)
    with TensorCount() as count:
        loss, _ = training.objective(training.model, many)
        del loss
    return count.peak - count.kept


@pytest.mark.parametrize("terms", [{}, {"tp": 2}, {"tp": 4, "tp_kind": "2d"}, {"zero": 3, "dp": 2}])
def test_a_chunked_loss_keeps_no_logits(terms):
    """What it keeps instead is the gradient of the head, which the backward needs anyway."""
    split, rows = terms.get("tp", 1), 2 if terms.get("tp_kind") else 1
    split //= rows
    logits = 8 * ROWS * LENGTH * MANY * SIZE // split // rows
    plans = [Plan.from_table({**terms, "chunked_loss": chunked}) for chunked in (True, False)]
    chunked, plain = (max(run_ranks(rise, split * rows * terms.get("dp", 1), plan)) for plan in plans)
    assert plain > logits
    assert chunked < logits / 3


def refusal(criterion):
    booster = boosted(Plan(tp=2, chunked_loss=True), criterion)
    try:
        booster.forward_backward(tags())
    except PlanError as error:
        return str(error)
    return ""


def without_head():
    try:
        px.Booster(Plan(chunked_loss=True)).boost(
            torch.nn.Sequential(torch.nn.Linear(3, 3)), None, usual, [(torch.ones(2, 3), torch.ones(2))]
        )
    except PlanError as error:
        return str(error)
    return ""


def test_a_chunked_loss_that_cannot_be_is_refused():
    assert all("asks for them (log_softmax)" in found for found in run_ranks(refusal, 2, by_hand))
    assert "chunked_loss finds no projections to logits in Sequential" in run_ranks(without_head, 1)[0]
