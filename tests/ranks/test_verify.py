"""`verify` inside a world that is already there: every rank calls it and every rank gets the same report."""

import os

import pytest
import torch
from torch import nn

from phalanx.cluster.pool import preload, run_ranks
from phalanx.errors import ConfigError, PlanError
from phalanx.verify import verify, verify_named

preload("phalanx.verify", "pytest", "transformers.models.gpt2.modeling_gpt2")


def verify_here(plan, world):
    report = verify_named("tiny-gpt2", plan, world, 2)
    return report.ok, report.world, report.worst_relative_error, len(report.comparisons), report.comparisons[0].shares


def test_the_ranks_that_a_launcher_started_are_used():
    first, second = run_ranks(verify_here, 2, "zero1+bf16", None)
    assert first == second
    ok, world, worst, comparisons, shares = first
    assert ok
    assert len(shares) == 2
    assert all(share.computes == 1.0 and 0.4 < share.updates < 0.6 for share in shares)
    assert (world, comparisons) == (2, 2)
    assert worst < 1e-9


def refused_here(world):
    with pytest.raises(PlanError, match="world 3 was asked for and 2 ranks were launched"):
        verify_named("tiny-gpt2", "zero1", world)
    return True


def test_another_world_than_the_launched_one_is_refused():
    assert run_ranks(refused_here, 2, 3) == [True, True]


def test_impossible_plans_are_refused_before_a_process_starts():
    with pytest.raises(PlanError, match="dp3"):
        verify_named("tiny-gpt2", "dp3+zero1", 4)


def inputs():
    return torch.ones(4, 3)


def square(output, batch):
    return output.square().sum(), len(output)


def batch_norm():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def linear():
    return nn.Linear(3, 4)


def never_the_same():
    torch.manual_seed(os.getpid())
    return linear()


def test_a_refusal_on_the_ranks_comes_back_as_it_was():
    with pytest.raises(PlanError, match=r"1: BatchNorm1d.*2 pieces"):
        verify(batch_norm, inputs, "zero1", 2, criterion=square)


def test_functions_that_cannot_travel_are_refused():
    with pytest.raises(ConfigError, match="cannot be handed to other processes"):
        verify(lambda: linear(), inputs, "zero1", 2, criterion=square)


def test_functions_of_a_module_are_verified():
    report = verify(linear, inputs, "zero3", 2, criterion=square)
    assert report.ok, str(report)
    assert report.model == "linear"


def test_builds_that_differ_are_told_apart_from_faults():
    with pytest.raises(ConfigError, match="differ in weight before the first step"):
        verify(never_the_same, inputs, "zero1", 2, criterion=square)


def test_what_is_not_a_model_is_refused():
    with pytest.raises(ConfigError, match=r"inputs\(\) returned a Tensor"):
        verify(inputs, inputs, "zero1", 2, criterion=square)
