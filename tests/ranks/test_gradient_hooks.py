"""Hooks on parameters do what they do in one process, or are refused before anything starts."""

import pytest
import torch
from booster_programs import TOLERANCE, batch, boost, decoder, local, plain_step, sgd, weights, worst

import phalanx as px
from phalanx.errors import PlanError
from phalanx.testing import run_ranks


def mask(gradient):
    return gradient * (torch.arange(gradient.numel(), dtype=gradient.dtype).view(gradient.shape) % 3)


HOOKS = {"mask": mask, "nothing": lambda gradient: None, "scale": lambda gradient: -2.5 * gradient}
NOT_LINEAR = {
    "clamp": lambda gradient: gradient.clamp(-1, 1),
    "small clamp": lambda gradient: gradient.clamp(-1e-6, 1e-6),
    "norm": lambda gradient: gradient / gradient.norm(),
    "noise": lambda gradient: gradient + torch.randn_like(gradient),
    "shift": lambda gradient: gradient + 1e-3,
}


def hooked(hook):
    model = decoder(layers=2)
    model.blocks[0].up.weight.register_hook(hook)
    model.embed.weight.register_hook(hook)
    return model


def errors(plan):
    """Against a plain loop with the same hooks, after two steps."""
    found = []
    for hook in HOOKS.values():
        reference, model = hooked(hook), hooked(hook)
        plain = sgd(reference)
        booster, model, _ = boost(plan, model, sgd(model))
        for step in range(2):
            booster.step(local(batch(step)))
            plain_step(reference, plain, [batch(step)])
        found.append(worst(booster.full_state_dict(), weights(reference)))
    return found


@pytest.mark.parametrize("plan", ["zero0", "zero2+acc2", "zero3"])
def test_linear_hooks_give_the_numbers_of_one_process(plan):
    assert max(max(found) for found in run_ranks(errors, 2, plan)) < TOLERANCE


@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_other_hooks_are_refused(kind):
    with pytest.raises(PlanError, match=r"(embed|up)\.weight is not linear"):
        px.Booster("zero0").boost(hooked(NOT_LINEAR[kind]))


def test_hooks_for_later_and_on_parameters_to_come_are_refused():
    model = decoder(layers=2)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(PlanError, match=r"head\.weight has a hook for when its gradient is there"):
        px.Booster("zero0").boost(model)
    with px.lazy():
        model = decoder(layers=2)
    model.head.weight.register_hook(mask)
    with pytest.raises(PlanError, match=r"head\.weight .* under px.lazy"):
        px.Booster("zero0").boost(model)


def refusal(plan):
    try:
        boost(plan, hooked(mask), None)
    except PlanError as error:
        return str(error)


def test_hooks_on_parameters_that_are_cut_are_refused():
    assert all("or see in parts under pp2" in found for found in run_ranks(refusal, 2, "pp2"))
