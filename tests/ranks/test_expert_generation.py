"""Models with divided experts generate: ranks with other prompts run other numbers of passes, and get what one process does."""

import sys
from pathlib import Path

import pytest
import torch

import phalanx as px
from phalanx.testing import run_ranks
from phalanx.verify.batches import make_batch
from phalanx.verify.program import use_plain_experts
from phalanx.verify.tiny import build_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))


def start(name):
    torch.manual_seed(0)
    model, kind = build_tiny(name)
    use_plain_experts(model.double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model, make_batch(kind, model.config, 0)


def generated(model, index):
    """Prompts and lengths of each data index."""
    model.eval()
    return model.generate(torch.arange(3, 6 + index)[None], max_new_tokens=2 + 3 * index, do_sample=False).tolist()


def after_a_step(name, plan):
    model, batch = start(name)
    booster = px.Booster(plan)
    model, _, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, [batch, batch])
    losses, found = [], None
    for rows in loader:
        losses.append(float(booster.step(rows).loss))
        if found is None:
            found = generated(model, booster.mesh.index("dp"))
            model.train()
    return found, losses, booster.mesh.index("dp")


def alone(name):
    model, batch = start(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(**batch).loss.backward()
    optimizer.step()
    return [generated(model, index) for index in range(4)]


@pytest.mark.parametrize(
    ("name", "plan", "world"),
    [
        ("tiny-mixtral", "zero3+ep2", 2),
        ("tiny-deepseek-v3", "zero1+tp2+ep2", 4),
        pytest.param("tiny-gpt-oss", "ep4", 4, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "pp2+ep2", 4, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "tp2+sp+ep2", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_generate_what_one_process_does(name, plan, world):
    right = alone(name)
    results = run_ranks(after_a_step, world, name, plan)
    for found, losses, index in results:
        assert found == right[index]
        assert losses == pytest.approx(results[0][1])
        assert losses[1] != losses[0]  # experts came back, and learn


def user_outputs(plan):
    """What a person's own block computes inside of `gathered`, called a different number of times by each rank."""
    from user_mixture import Model, batch

    torch.manual_seed(0)
    booster = px.Booster(plan)
    model, *_ = booster.boost(Model().double())
    with booster.gathered(), torch.no_grad():
        for _ in range(1 + px.launch().rank):
            found = model(batch(0)["ids"])
    return found


def test_a_block_of_ones_own_can_be_called_while_all_experts_are_here():
    from user_mixture import Model, batch

    torch.manual_seed(0)
    right = Model().double()(batch(0)["ids"])
    for found in run_ranks(user_outputs, 2, "zero1+ep2"):
        torch.testing.assert_close(found, right)
