"""Ranks that exchange tokens run the same layers: messages of two layers may have the same sizes, and would mix in silence.

A rank that fails in an exchange ends all.
"""

import time

import pytest
import torch
from patience import patience

import phalanx as px
from phalanx.cluster import comm
from phalanx.errors import CommError
from phalanx.testing import RankError, run_ranks
from phalanx.verify.batches import make_batch
from phalanx.verify.tiny import BY_TYPE, build_from_config, build_tiny, make_config


def fails_in_an_exchange(told):
    """Rank 1 raises in an exchange of its second step; the others wait for it in theirs."""
    torch.manual_seed(0)
    model, kind = build_tiny("tiny-mixtral")
    booster = px.Booster("ep2")
    batches = [make_batch(kind, model.config, step) for step in range(2)]
    model, _, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, batches)
    exchange = comm.all_to_all

    def exchange_or_fail(*args, **options):
        told.write_text(str(time.time()))
        raise ValueError("seven")

    for step, batch in enumerate(loader):
        comm.all_to_all = exchange_or_fail if step == 1 and px.launch().rank == 1 else exchange
        booster.step(batch)


def test_a_rank_that_fails_in_an_exchange_ends_all(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(fails_in_an_exchange, 2, tmp_path / "told")
    assert time.time() - float((tmp_path / "told").read_text()) < patience(20)
    assert str(caught.value.__cause__) == "seven"
    assert str(caught.value).count("Traceback") == 1


def second_step_without(skipped):
    """Rank 1 goes past one layer in the second step, when the order of a step is known and nobody asks for it any more."""
    from transformers import MixtralConfig

    torch.manual_seed(0)
    model, kind = build_from_config(make_config(MixtralConfig, {**BY_TYPE["mixtral"], "num_hidden_layers": 3}))
    batches = [make_batch(kind, model.config, step) for step in range(2)]
    booster = px.Booster("ep2")
    model, _, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, batches)
    for step, batch in enumerate(loader):
        if step == 1 and px.launch().rank == 1:
            model.model.layers[skipped].forward = lambda hidden, *args, **kwargs: hidden
        booster.step(batch)


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_rank_that_skips_a_layer_is_named(skipped):
    with pytest.raises(RankError) as caught:
        run_ranks(second_step_without, 2, skipped)
    assert isinstance(caught.value.__cause__, CommError)
    assert "runs other experts" in str(caught.value.__cause__)
