"""`MoeHybridParallelPlugin` as people who know it from ColossalAI call it: boost, a loop of their own, the numbers of one process."""

import pytest
import torch

from phalanx import Booster
from phalanx.booster.plugin import MoeHybridParallelPlugin
from phalanx.precision import lift_to_float64
from phalanx.testing import run_ranks
from phalanx.verify.program import use_plain_experts
from phalanx.verify.tiny import build_tiny


def start():
    torch.manual_seed(0)
    model, _ = build_tiny("tiny-mixtral")
    use_plain_experts(model.double().train())
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, 37, (4, 9), generator=generator) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [{"input_ids": ids, "labels": ids} for ids in tokens]


def with_the_plugin(options):
    model, optimizer, batches = start()
    plugin = MoeHybridParallelPlugin(tp_size=1, pp_size=1, ep_size=2, precision="fp32", max_norm=0.5, **options)
    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, _ = booster.boost(model=model, optimizer=optimizer, dataloader=batches)
    with lift_to_float64():
        for batch in dataloader:
            booster.backward(model(**batch).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in booster.full_state_dict().items()}


@pytest.mark.parametrize("options", [{"zero_stage": 1}, {"zero_stage": 2, "moe_dp_outside": True}], ids=str)
def test_a_loop_of_ones_own_gives_the_weights_of_one_process(options):
    model, optimizer, batches = start()
    with lift_to_float64():
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for found in run_ranks(with_the_plugin, 4 if options["zero_stage"] == 1 else 2, options):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
