"""Breaks one thing on the ranks at a time and wants `verify` to say so: a check that passes everything proves nothing."""

import pytest
import torch

from phalanx.booster.training import Training
from phalanx.cluster import comm, pool
from phalanx.cluster.pool import RankError, run_ranks
from phalanx.memory.chunk import Chunk
from phalanx.plan import Plan
from phalanx.verify.compare import QUANTITIES, compare, unequal_replicas
from phalanx.verify.program import NamedModel
from phalanx.verify.ranks import trace_plan
from phalanx.verify.reference import Run, reference
from phalanx.verify.report import Comparison

# Imported once by the ranks' server instead of by every rank.
pool.preload("phalanx.verify.ranks", "pytest", "transformers.models.gpt2.modeling_gpt2")
SOURCE, RUN = NamedModel("tiny-gpt2"), Run(steps=2)


def skip_one_reduction(monkeypatch):
    """The chunk of layer 1 keeps this rank's own gradient; ranks still meet."""
    whole = Chunk.start_reduce

    def start_reduce(self):
        if "h.1" not in self.name:
            return whole(self)
        return comm.all_reduce(self._complete_gradient().clone(), self.reduce_axis, wait=False)

    monkeypatch.setattr(Chunk, "start_reduce", start_reduce)


def mean_of_means(monkeypatch):
    """Each rank divides by its own count, and the quotients are averaged."""
    whole = Training.backward

    def backward(self, loss_sum, count, synchronise):
        local = count.clamp(min=1)
        return whole(self, loss_sum / local, torch.ones_like(count), synchronise)

    monkeypatch.setattr(Training, "backward", backward)


def count_twice(monkeypatch):
    """A constant factor, which an optimizer such as Adam would hide."""
    whole = Training.backward
    monkeypatch.setattr(Training, "backward", lambda self, loss, count, synchronise: whole(self, loss * 2, count, synchronise))


def keep_only_the_last_pass(monkeypatch):
    whole = Chunk.add_gradient

    def add_gradient(self, slot, gradient):
        slot.written = False
        whole(self, slot, gradient)

    monkeypatch.setattr(Chunk, "add_gradient", add_gradient)


def drift_on_one_rank(monkeypatch):
    """Rank 1 rounds one weight differently after the step."""
    whole = Training._update

    def update(self, factor):
        whole(self, factor)
        if self.world.index == 1:
            with torch.no_grad():
                weight = next(self.model.parameters())
                weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(1e9, dtype=weight.dtype))

    monkeypatch.setattr(Training, "_update", update)


def broken_trace(fault, plan):
    """Runs on a rank: the fault is in this process alone and ends with it."""
    fault(pytest.MonkeyPatch())
    return trace_plan(SOURCE, Plan.parse(plan), RUN, {})


def verdict(fault, plan):
    traces = run_ranks(broken_trace, 2, fault, plan)
    differences = compare(reference(SOURCE, RUN), traces[0])
    return Comparison.of(differences, precision="float64", tolerance=dict.fromkeys(QUANTITIES, 1e-9), replicas=unequal_replicas(traces))


def no_fault(monkeypatch):
    pass


def test_without_a_fault_the_same_path_passes():
    assert verdict(no_fault, "zero0+acc2").ok


def test_a_reduction_too_few_is_found_and_named():
    result = verdict(skip_one_reduction, "zero0")
    assert not result.ok
    assert "gradient of transformer.h.1." in result.first_difference
    assert result.worst["gradient"] > 1e-3


@pytest.mark.parametrize("fault", [mean_of_means, count_twice])
def test_a_wrong_count_is_found(fault):
    result = verdict(fault, "zero0")
    assert not result.ok
    assert result.worst["gradient"] > 1e-3


def test_a_lost_pass_is_found():
    assert verdict(keep_only_the_last_pass, "zero1+acc3").worst["gradient"] > 1e-3


def test_ranks_that_drift_apart_are_found_by_their_last_bit():
    result = verdict(drift_on_one_rank, "zero0")
    assert not result.ok
    assert "differs between rank 0 and rank 1" in result.replicas


def fails(monkeypatch):
    raise ValueError("this rank fails")


def test_a_rank_that_fails_is_no_verdict():
    with pytest.raises(RankError, match="this rank fails"):
        verdict(fails, "zero0")
