"""A block of a person's own runs twice around one exchange: what it draws, notes and counts is that of one run."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
import user_mixture
from user_mixture import WIDTH, Mixture


class Noting(Mixture):
    """Drops some of its tokens' features before its experts see them, as these do inside, and notes what it does in every way."""

    def __init__(self, drop):
        super().__init__(num_experts=4)
        self.drop = drop
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(drop), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))
        self.total, self.runs, self.notes, self.by_name = torch.zeros(()), 0, [], {"calls": 0}

    def forward(self, x):
        x = F.dropout(x, self.drop, self.training)
        out = super().forward(x)
        self.in_place += 1
        self.anew = self.anew + 1
        self.total += 1
        self.runs += 1
        self.late = getattr(self, "late", 0) + 1
        self.by_name["calls"] += 1
        self.notes.append(x.detach().clone())
        return out

    def counts(self):
        return [
            float(value) for value in (self.in_place, self.anew, self.total, self.runs, self.late, self.by_name["calls"], len(self.notes))
        ]


def boosted(plan, drop):
    torch.manual_seed(0)
    model = user_mixture.Model()
    for layer in model.layers:
        layer.mixture = Noting(drop)
    booster = px.Booster(plan)
    model, _, _, loader, _ = booster.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), user_mixture.criterion, [user_mixture.batch(step) for step in range(2)]
    )
    return booster, model, loader


def what_blocks_note(plan):
    booster, model, loader = boosted(plan, 0.0)
    for batch in loader:
        booster.step(batch)
        with torch.inference_mode():
            booster.evaluate(batch)
    return [layer.mixture.counts() for layer in model.layers], [load.chosen for load in booster.expert_loads()]


def test_what_a_block_notes_is_noted_once_and_loads_are_those_of_undivided_experts():
    notes, loads = what_blocks_note("zero0")
    assert all(counts == [4.0] * 7 for counts in notes)
    assert [sum(chosen) for chosen in loads] == [2 * 2 * 7 * 9] * 3
    for found in run_ranks(what_blocks_note, 2, "ep2"):
        assert found == (notes, loads)


def rows_asked(plan):
    """The rows that each expert's place was called with in the two runs of each block."""
    from phalanx.parallel.expert.listed import StandIn

    booster, _, loader = boosted(plan, 0.5)
    asked, forward = [], StandIn.forward
    StandIn.forward = lambda stand_in, x: asked.append((stand_in.number, x.detach().clone())) or forward(stand_in, x)
    booster.step(next(iter(loader)))
    return asked


@pytest.mark.parametrize("plan", [pytest.param("ep2", marks=pytest.mark.slow), "ep2+recompute"])
def test_a_block_that_draws_draws_the_same_again(plan):
    for asked in run_ranks(rows_asked, 2, plan):
        while asked:
            number, rows = asked.pop(0)
            at = next(at for at, (other, seen) in enumerate(asked) if other == number and torch.equal(seen, rows))
            asked.pop(at)
