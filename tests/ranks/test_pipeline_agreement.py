"""What the ranks of a pipeline agree on: how the model is cut, the times it is cut by, and which way each batch takes through it."""

import pytest
import torch
from booster_programs import TOLERANCE, WIDTH, WORDS, Block, batch, boost, criterion, decoder, sgd, worst
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.pipeline import run
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.testing import RankError, run_ranks


class Conditioned(Block):
    def forward(self, x, mask=None, condition=None):
        x = x if condition is None else x * (1 + condition)
        return super().forward(x if mask is None else x * mask[..., None])


class Conditional(nn.Module):
    """A mask and a learned condition reach its layers where a batch has them, and move the places at which the others are called."""

    def __init__(self):
        super().__init__()
        self.embed, self.condition = nn.Embedding(WORDS, WIDTH), nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Conditioned() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words, condition=None, mask=None):
        x, given = self.embed(words), {}
        if condition is not None:
            given["condition"] = self.condition(condition)[:, None]
        if mask is not None:
            given["mask"] = mask
        for block in self.blocks:
            x = block(**given, x=x)
        return self.head(self.norm(x))


def conditional(frozen):
    torch.manual_seed(0)
    model = Conditional().double()
    model.embed.requires_grad_(not frozen)
    model.condition.requires_grad_(not frozen)
    return model


def conditional_batches():
    plain, conditioned, masked = batch(0), batch(1), batch(2)
    draws = torch.Generator().manual_seed(0)
    conditioned["condition"] = torch.randn(8, 3, dtype=torch.float64, generator=draws)
    masked["mask"] = (torch.rand(8, 12, generator=draws) > 0.3).double()
    return [plain, conditioned, masked, conditioned | {"mask": masked["mask"]}, plain]


def call(model, rows):
    return model(**{name: value for name, value in rows.items() if name != "labels"})


def evaluated(frozen):
    """The losses without gradients of batches of different kinds, and the gradients of all of them added up."""
    model = conditional(frozen)
    booster, *_ = boost("pp2+zb-h1+micro3", model, sgd(model), forward=call)
    losses = []
    for rows in conditional_batches():
        booster.forward_backward(rows)
        losses.append(booster.evaluate(rows).loss)
    return losses, booster.gradients()


def without_arrangements(frozen):
    """A fault on purpose: what the first batch hands on is taken to be what all do."""
    run.arrangement = lambda rows: None
    return evaluated(frozen)[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_what_only_some_batches_have_reaches_every_stage(frozen):
    model, losses = conditional(frozen), []
    pairs = [criterion(call(model, rows), rows) for rows in conditional_batches()]
    losses = [(loss / count).item() for loss, count in pairs]
    (sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for found, gradients in run_ranks(evaluated, 2, frozen):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert worst(gradients, expected) < TOLERANCE
    if frozen:
        broken = run_ranks(without_arrangements, 2, frozen)[0]
        assert broken != pytest.approx(losses, rel=TOLERANCE)


def cut_by_rank(options):
    boost("pp2", decoder(), **options[px.cluster.launch.world().rank])


def test_ranks_that_would_cut_in_different_ways_are_refused():
    rising = tuple(float(layer) for layer in range(1, 5))
    costs = [LayerCosts(forward=row, input=row, weight=row, activation_bytes=row) for row in (rising, rising[::-1])]
    for options in ([{"stage_sizes": (3, 1)}, {"stage_sizes": (2, 2)}], [{"layer_costs": one} for one in costs]):
        with pytest.raises(RankError, match=r"rank 0 has stages of \[3, 1\] layers, rank 1 of") as caught:
            run_ranks(cut_by_rank, 2, options)
        assert isinstance(caught.value.__cause__, PlanError)


def cut_by_the_record():
    model = decoder()
    booster, model, _ = boost("pp2", model, sgd(model))
    booster.step(local_rows(booster))
    _, record = booster.traced_step(local_rows(booster))
    again = decoder()
    booster, *_ = boost("pp2", again, sgd(again), layer_costs=record)
    return record, booster.step(local_rows(booster)).loss


def local_rows(booster):
    rows, axis = batch(1), booster.mesh.axis("dp")
    return {name: value[axis.index :: axis.size] for name, value in rows.items()}


def test_pipelines_side_by_side_are_cut_by_the_times_of_the_first():
    ranks = run_ranks(cut_by_the_record, 4)
    assert {str(found) for found in ranks} == {str(ranks[0])}
    assert {span[0] for span in ranks[0][0]["spans"]} == {0, 1}


def backward_by_hand():
    model = decoder(tied=True)
    booster, model, optimizer = boost("pp2", model, sgd(model))
    with booster.gathered():
        loss, count = criterion(model(batch(0)["words"]), batch(0))
    booster.backward(loss / count, optimizer, count=count)


def unfreeze():
    model = decoder()
    model.embed.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    booster, model, _ = boost("pp2", model, sgd(model))
    booster.step(batch(0))
    model.requires_grad_(True)
    booster.step(batch(1))


def cut_without_stages():
    boost("zero1", decoder(), stage_sizes=(2, 2))


@pytest.mark.parametrize(
    ("program", "kind", "found"),
    [
        (backward_by_hand, ConfigError, "hand-written forward"),
        (unfreeze, PlanError, "frozen or unfrozen"),
        (cut_without_stages, ConfigError, "no stages"),
    ],
)
def test_what_stages_cannot_do_is_refused(program, kind, found):
    with pytest.raises(RankError, match=found) as caught:
        run_ranks(program, 2)
    assert isinstance(caught.value.__cause__, kind)
