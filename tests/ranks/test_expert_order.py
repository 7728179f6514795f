"""Ranks that exchange tokens run the same layers: messages of two layers may have the same sizes, and would mix in silence."""

import pytest
import torch

import phalanx as px
from phalanx.errors import CommError
from phalanx.testing import RankError, run_ranks
from phalanx.verify.batches import make_batch
from phalanx.verify.tiny import BY_TYPE, build_from_config, make_config


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
