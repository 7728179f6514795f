"""What a person calls beside `booster.step` means what it means in one process, or is refused."""

import copy
import pickle

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, batch, boost, criterion, decoder, local, plain_step, sgd, weights, worst
from torch import nn

from phalanx.data import take_rows
from phalanx.errors import ConfigError
from phalanx.layout import split_range
from phalanx.testing import run_ranks


def rows_here(booster, full):
    """The rows of this rank's data index, of which a pipeline has several ranks."""
    axis, total = booster.mesh.axis("dp"), len(full["words"])
    return take_rows(full, *split_range(total, axis.size, axis.index), total)


def gradients_of_the_last_batch(plan, forget):
    """The error of the gradients after those of another batch were left from before boost, or forgotten after it."""
    reference, model = decoder(), decoder()
    _, expected = plain_step(reference, sgd(reference), [batch(4)])
    if forget == "before":
        criterion(model(batch(3)["words"]), batch(3))[0].backward()
    booster, model, optimizer = boost(plan, model, sgd(model))
    if forget != "before":
        booster.forward_backward(rows_here(booster, batch(3)))
    if forget == "model":
        model.zero_grad()
    elif forget == "optimizer":
        optimizer.zero_grad(set_to_none=False)
    booster.forward_backward(rows_here(booster, batch(4)))
    return worst(booster.gradients(), expected)


FORGETTING = [
    ("zero0", 1, "before"),
    ("zero0", 1, "model"),
    ("zero1", 2, "before"),
    ("zero3", 2, "optimizer"),
    ("zero1+pp2+dp2", 4, "model"),
]


@pytest.mark.parametrize(("plan", "world", "forget"), FORGETTING)
def test_gradients_are_forgotten(plan, world, forget):
    assert max(run_ranks(gradients_of_the_last_batch, world, plan, forget)) < TOLERANCE


def test_gradients_that_are_not_forgotten_are_found():
    assert min(run_ranks(gradients_of_the_last_batch, 2, "zero1", "nothing")) > 0.1


def modes_after_evaluation(plan):
    model = decoder(dropout=0.3)
    booster, model, _ = boost(plan, model, sgd(model))
    model.train()
    model.blocks[1].eval()
    booster.evaluate(local(batch()))
    return [module.training for module in (model, model.blocks[0].drop, model.blocks[1].drop, model.blocks[2].drop)]


def test_evaluation_leaves_every_module_in_its_mode():
    assert run_ranks(modes_after_evaluation, 1, "zero0") == [[True, True, False, True]]


def copied(plan):
    """What copies of a boosted model, of what holds it, and of what shares a part of it, tell."""
    model = decoder()
    booster, model, _ = boost(plan, model, sgd(model))
    told = []
    around, beside = nn.Sequential(model, nn.Linear(3, 1)), nn.Sequential(model.embed, nn.Linear(3, 1))
    attempts = (copy.deepcopy, lambda model: copy.deepcopy([model]), copy.copy, pickle.dumps)
    for attempt in (*attempts, lambda _: booster.boost(around), lambda _: booster.boost(beside)):
        with pytest.raises(ConfigError) as caught:
            attempt(model)
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize("plan", ["zero0", STAGES[-1]])
def test_copies_of_a_boosted_model_are_refused(plan):
    for told in run_ranks(copied, 2, plan):
        assert all("was copied or pickled" in message for message in told[:4])
        assert all("a part of this model was boosted already" in message for message in told[4:])


def clipped_by_hand(plan, edit):
    """What a step tells after a person's code worked on `.grad`; and that the gradients of the next one are right."""
    reference, model = decoder(), decoder()
    booster, model, optimizer = boost(plan, model, sgd(model))
    rows = local(batch())
    loss, count = criterion(model(rows["words"]), rows)
    booster.backward(loss / count, optimizer, count=count)
    try:
        EDITS[edit](model)
        optimizer.step()
    except (ConfigError, RuntimeError) as error:
        told = str(error)
    optimizer.zero_grad()
    for _ in range(2):
        booster.forward_backward(local(batch()))
    found = booster.gradients()
    optimizer.step()
    _, expected = plain_step(reference, sgd(reference), [batch()])
    return told, worst(found, expected), worst(booster.full_state_dict(), weights(reference))


def replace_gradient(model):
    model.head.weight.grad = torch.ones_like(model.head.weight)


EDITS = {"clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), "replace": replace_gradient}


@pytest.mark.parametrize(
    ("plan", "world", "edit"), [("zero0", 1, "clip"), ("zero0", 1, "replace"), ("zero1", 2, "replace"), ("zero3", 2, "clip")]
)
def test_a_gradient_that_is_changed_by_hand_is_refused(plan, world, edit):
    for told, *errors in run_ranks(clipped_by_hand, world, plan, edit):
        is_refused_by_torch = edit == "clip" and world > 1  # NaN shown in every place cannot be written to
        assert ("single memory location" if is_refused_by_torch else "was changed by hand") in told
        assert max(errors) < TOLERANCE
