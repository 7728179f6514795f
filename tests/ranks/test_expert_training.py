"""What a mixture adds to training: losses of routers, correction biases, loads, bounds, places by load. Against one plain process."""

import math

import pytest
import torch

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.expert.losses import read_scores
from phalanx.precision import lift_to_float64
from phalanx.testing import RankError, run_ranks
from phalanx.verify.batches import make_batch
from phalanx.verify.program import use_plain_experts
from phalanx.verify.tiny import build_tiny

STEPS = 2


def start(name, length=None):
    """A model and its batches, of which `length` tokens of every row are left."""
    torch.manual_seed(4)
    model, kind = build_tiny(name)
    use_plain_experts(model.double().train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # routers that are far from even
    batches = [make_batch(kind, model.config, step) for step in range(STEPS)]
    return model, [{key: value[:, :length] for key, value in batch.items()} for batch in batches]


def routers(model):
    return [module for name, module in model.named_modules() if type(module).__name__.lower().endswith("router")]


# -- one plain process ---------------------------------------------------------------------------------------------------------


def added_losses(model, batch, z, sequence):
    """Returns a function that gives the sum of the added losses of the last forward, written as the papers have them."""
    seen = []
    handles = [router.register_forward_hook(lambda module, args, output: seen.append(output)) for router in routers(model)]
    rows = len(batch["input_ids"])

    def total():
        loss = 0
        for logits, _, chosen in seen:
            loss = loss + z * (logits.exp().sum(-1).log() ** 2).sum()
            num_experts, num_choices = logits.shape[-1], chosen.shape[-1]
            for row_logits, row_chosen in zip(logits.chunk(rows), chosen.chunk(rows), strict=True):
                scores = row_logits.sigmoid() if hasattr(routers(model)[0], "e_score_correction_bias") else row_logits.softmax(-1)
                mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
                length = len(row_logits)
                share = torch.stack([(row_chosen == expert).sum() for expert in range(num_experts)]) * num_experts / (num_choices * length)
                loss = loss + sequence * length * (share * mean).sum()
        for handle in handles:
            handle.remove()
        return loss, [chosen for _, _, chosen in seen]

    return total


def plain_steps(name, z=0.0, sequence=0.0, rate=0.0, length=None):
    """Losses, gradients of the last step, and buffers afterwards."""
    model, batches = start(name, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with lift_to_float64():
        for batch in batches:
            optimizer.zero_grad()
            total = added_losses(model, batch, z, sequence)
            loss = model(**batch).loss
            count = (batch["labels"][:, 1:] != -100).sum()
            added, chosen = total()
            loss = loss + added / count
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if rate:
                for router, choices in zip(routers(model), chosen, strict=True):
                    counts = torch.bincount(choices.flatten(), minlength=router.num_experts).double()
                    router.e_score_correction_bias += rate * torch.sign(counts.mean() - counts)
    return losses, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, model.state_dict()


# -- under a plan ----------------------------------------------------------------------------------------------------------------


def planned_steps(name, plan, options, length=None):
    model, batches = start(name, length)
    booster = px.Booster(plan, routing=px.Routing(**options))
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, batches)
    losses = []
    with lift_to_float64():
        for batch in loader:
            booster.forward_backward(batch)
            gradients = booster.gradients()
            losses.append(float(optimizer.step().loss))
    loads = [(load.name, load.chosen, load.dropped, load.entropy) for load in booster.expert_loads()]
    return losses, gradients, booster.full_state_dict(), loads


def compare(found, right):
    losses, gradients, state = found[:3]
    assert losses == pytest.approx(right[0], rel=1e-9)
    largest = max(float(gradient.abs().max()) for gradient in right[1].values())
    for key, gradient in right[1].items():
        scale = max(float(gradient.abs().max()), 1e-6 * largest)
        assert float((gradients[key] - gradient).abs().max()) < 1e-9 * scale, key
    for key, value in right[2].items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    ("name", "plan", "world"),
    [
        ("tiny-deepseek-v3", "zero1+ep2+acc2", 4),
        ("tiny-mixtral", "zero3+ep3+recompute", 3),
        ("tiny-mixtral", "tp2+sp+ep2", 4),
        pytest.param("tiny-qwen3-moe", "ep2", 2, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "ring2+ep2", 4, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "pp2+ep2", 4, marks=pytest.mark.slow),
    ],
)
def test_added_losses_are_those_of_one_process(name, plan, world):
    right = plain_steps(name, z=0.02, sequence=0.5)
    compare(run_ranks(planned_steps, world, name, plan, {"z": 0.02, "sequence": 0.5})[0], right)
    assert abs(right[0][0] - plain_steps(name)[0][0]) > 1e-3  # they are there


@pytest.mark.parametrize(
    ("name", "plan", "world"),
    [
        ("tiny-deepseek-v3", "cp3", 3),
        pytest.param("tiny-deepseek-v3", "zero1+pp2+ring2+acc2", 4, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "tp2+sp+ring2", 4, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "recompute+ulysses2+ep2", 4, marks=pytest.mark.slow),
    ],
)
def test_what_fills_up_parts_of_rows_is_not_counted(name, plan, world):
    """Rows of 11 tokens, which neither 2 nor 3 divides: losses, biases and loads are those of these tokens."""
    rate = 0.01 if name == "tiny-deepseek-v3" else 0.0
    right = plain_steps(name, z=0.02, sequence=0.5, rate=rate, length=11)
    found = run_ranks(planned_steps, world, name, plan, {"z": 0.02, "sequence": 0.5, "bias_rate": rate}, 11)[0]
    compare(found, right)
    model, batches = start(name, 11)
    choices = model.config.num_experts_per_tok * sum(batch["input_ids"].numel() for batch in batches)
    assert {sum(chosen) for _, chosen, *_ in found[3]} == {choices}


def loads_of_listed_experts(bias_rate):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
    import user_mixture

    model, criterion, _ = user_mixture.build_scaling()
    booster = px.Booster("cp2", routing=px.Routing(bias_rate=bias_rate))
    booster.boost(model, torch.optim.SGD(model.parameters()), criterion)
    booster.expert_loads()


@pytest.mark.parametrize("bias_rate", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_loads_of_listed_experts_are_refused_where_rows_are_filled_up(bias_rate):
    with pytest.raises(RankError, match="cp2 fills rows up"):
        run_ranks(loads_of_listed_experts, 2, bias_rate)


@pytest.mark.slow
def test_a_capacity_drops_none_of_what_fills_rows_up():
    *_, loads = run_ranks(planned_steps, 3, "tiny-mixtral", "cp3", {"capacity": 1e-6}, 11)[0]
    for _, chosen, dropped, _ in loads:
        assert 0.9 * sum(chosen) < dropped < sum(chosen)  # each expert takes one choice of a rank and pass


def adapted(plan):
    model, _ = start("tiny-mixtral")
    experts = model.model.layers[1].mlp.experts
    torch.nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", torch.nn.Identity())
    px.Booster(plan).boost(model)


def test_weights_of_experts_that_an_adapter_computes_are_not_divided():
    run_ranks(adapted, 1, "zero1")
    with pytest.raises(RankError, match="an adapter computes them"):
        run_ranks(adapted, 2, "ep2")


def two_mixtures(plan, names):
    """Two mixtures in training under one Booster, step by step in turn."""
    booster, boosted = px.Booster(plan), []
    for name in names:
        model, batches = start(name)
        model, optimizer, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, batches)
        boosted.append((model, optimizer, iter(loader)))
    losses, gradients = {name: [] for name in names}, {}
    with lift_to_float64():
        for _ in range(STEPS):
            for name, (model, optimizer, batches) in zip(names, boosted, strict=True):
                booster.forward_backward(next(batches), model)
                gradients[name] = booster.gradients(model)
                losses[name].append(float(optimizer.step().loss))
    return [(losses[name], gradients[name], booster.full_state_dict(model)) for name, (model, *_) in zip(names, boosted, strict=True)]


def test_two_mixtures_under_one_booster():
    names = ("tiny-mixtral", "tiny-deepseek-v3")
    for name, found in zip(names, run_ranks(two_mixtures, 2, "zero1+ep2", names)[0], strict=True):
        compare(found, plain_steps(name))


def shares_of_choices(make, likely="softmax", num_choices=2, **options):
    """What is read from a router that weighs its choices by `make(logits)`."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    scores = make(logits)
    weights, chosen = scores.topk(num_choices, -1)
    return read_scores((options.pop("given", logits), 2.5 * weights / weights.sum(-1, keepdim=True), chosen), 5, likely, **options)


def test_scores_are_read_from_what_a_router_gives_out():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for likely in ("softmax", "sigmoid"):
        assert shares_of_choices(lambda x: x.softmax(-1), likely, reads_logits=True) == "softmax"
        assert shares_of_choices(torch.sigmoid, likely, reads_logits=True) == "sigmoid"
        assert shares_of_choices(torch.sigmoid, likely, num_choices=1, reads_logits=True) == likely  # one choice tells nothing
    assert shares_of_choices(lambda x: x.softmax(-1), given=logits.softmax(-1), reads_logits=False) == "plain"
    with pytest.raises(ConfigError, match="gives out probabilities"):
        shares_of_choices(lambda x: x.softmax(-1), given=logits.softmax(-1), reads_logits=True)
    with pytest.raises(ConfigError, match="none of softmax, sigmoid"):
        shares_of_choices(lambda x: x.exp() ** 2 + 1, reads_logits=True)
    with pytest.raises(ConfigError, match="no logits"):
        read_scores((logits[:, :2], logits, logits), 5, "softmax", reads_logits=True)


def z_loss_of_a_block_of_ones_own(plan):
    """The gradient of the first router, whose weights scale what goes into the experts and what comes out."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))
    import user_mixture

    torch.manual_seed(0)
    model, criterion, batch = user_mixture.build_scaling()
    batches = [batch(0)]
    booster = px.Booster(plan, routing=px.Routing(z=1.0))
    with lift_to_float64():
        model, _, _, loader, _ = booster.boost(model.double(), torch.optim.SGD(model.parameters(), lr=0.1), criterion, batches)
        for rows in loader:
            booster.forward_backward(rows)
    return booster.gradients()["layers.0.mixture.router.weight"]


def test_a_block_that_runs_twice_adds_its_loss_once():
    right = z_loss_of_a_block_of_ones_own("zero0")
    for plan in ("ep2", "ep2+recompute"):
        for found in run_ranks(z_loss_of_a_block_of_ones_own, 2, plan):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", ["zero1+ep2+acc2+recompute", "pp2+ep2"])
def test_correction_biases_follow_the_loads_of_all_ranks(plan):
    right = plain_steps("tiny-deepseek-v3", rate=0.01)
    for found in run_ranks(planned_steps, 4, "tiny-deepseek-v3", plan, {"bias_rate": 0.01}):
        compare(found, right)
    moved = [value for key, value in right[2].items() if "correction_bias" in key]
    assert all(float(bias.abs().max()) == pytest.approx(0.02) or float(bias.abs().max()) <= 0.02 for bias in moved)
    assert any(float(bias.abs().max()) > 0 for bias in moved)


def state_after_the_second_batch(plan, first):
    """After the second of two batches. The first is left out, thrown away, skipped, taken, or taken after its loads were read."""
    model, batches = start("tiny-deepseek-v3")
    booster = px.Booster(plan, routing=px.Routing(bias_rate=0.01))
    model, optimizer, _, loader, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), None, batches)
    for number, batch in enumerate(loader):
        if number == 0 and first in ("left out", "thrown away", "read"):
            if first != "left out":
                booster.forward_backward(batch)
                optimizer.zero_grad() if first == "thrown away" else (booster.expert_loads(), optimizer.step())
            continue
        spoiled = model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
        if number > 0 or first == "taken":
            spoiled.remove()
        skipped = booster.step(batch).skipped
        spoiled.remove()
        assert skipped == (number == 0 and first == "skipped")
    return booster.full_state_dict()


def states_after_the_second_batch(plan):
    return [state_after_the_second_batch(plan, first) for first in ("skipped", "left out", "thrown away", "taken", "read")]


def test_choices_of_steps_that_are_not_taken_move_no_bias():
    skipped, left_out, thrown_away, taken, read = run_ranks(states_after_the_second_batch, 2, "ep2")[0]
    biases = [name for name in skipped if "correction_bias" in name]
    for found, right in ((skipped, left_out), (thrown_away, left_out), (read, taken)):
        assert all(torch.equal(found[name], right[name]) for name in found)
    assert not all(torch.equal(skipped[name], taken[name]) for name in biases)  # the first batch would have moved them otherwise


@pytest.mark.parametrize(("plan", "world"), [("zero0", 1), ("ep2+acc3+recompute", 2), ("tp2+sp+ep2", 4), ("pp2+recompute+fp16", 2)])
def test_loads_count_every_choice_once(plan, world):
    _, batches = start("tiny-mixtral")
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    *_, loads = run_ranks(planned_steps, world, "tiny-mixtral", plan, {})[0]
    assert [name for name, *_ in loads] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for _, chosen, dropped, entropy in loads:
        assert sum(chosen) == 2 * tokens
        assert dropped == 0
        shares = [count / sum(chosen) for count in chosen]
        assert entropy == pytest.approx(-sum(share * math.log(share) for share in shares) / math.log(4))


def test_places_by_load_change_no_number():
    loads = {f"model.layers.{layer}.mlp.experts": [9.0, 1.0, 8.0, 2.0] for layer in range(2)}
    found = run_ranks(planned_steps, 2, "tiny-mixtral", "ep2", {"loads": loads})[0]
    compare(found, plain_steps("tiny-mixtral"))


def test_a_capacity_drops_and_says_how_many():
    right = plain_steps("tiny-mixtral")
    losses, *_, loads = run_ranks(planned_steps, 2, "tiny-mixtral", "ep2", {"capacity": 0.5})[0]
    assert all(dropped > 0 for _, _, dropped, _ in loads)
    assert abs(losses[0] - right[0][0]) > 1e-9
    found = run_ranks(planned_steps, 2, "tiny-mixtral", "ep2", {"capacity": 4.0})[0]  # room for every choice
    compare(found, right)


def test_what_a_model_does_not_have_is_refused():
    model, _ = start("tiny-llama")
    with pytest.raises(ConfigError, match="no experts were found"):
        px.Booster("zero0", routing=px.Routing(z=0.1)).boost(model)
    model, _ = start("tiny-mixtral")
    with pytest.raises(ConfigError, match="no correction bias"):
        px.Booster("zero0", routing=px.Routing(bias_rate=0.1)).boost(model)
    with pytest.raises(PlanError, match=r"Try: model\.layers\.0\.mlp"):
        px.Booster("zero0", routing=px.Routing(loads={"model.layer.0.mlp.experts": [1.0] * 4})).boost(start("tiny-mixtral")[0])


@pytest.mark.parametrize(
    "options", [{"z": -1}, {"z": math.nan}, {"bias_rate": math.inf}, {"capacity": math.nan}, {"loads": {"a": [1.0, -2.0]}}], ids=str
)
def test_a_routing_of_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match=r"above 0|from 0"):
        px.Routing(**options)


def test_verify_refuses_what_depends_on_the_cut():
    for routing, words in (
        (px.Routing(capacity=1.0), "numbers depend on the cut"),
        (px.Routing(z=0.1), "no part of the one plain process"),
    ):
        with pytest.raises(ConfigError, match=words):
            px.verify(start, dict, "ep2", 2, routing=routing)


def refused_plan():
    model, _ = start("tiny-llama")
    with pytest.raises(PlanError, match="no experts were found"):
        px.Booster("ep2").boost(model)


def test_ep_without_experts_is_refused():
    run_ranks(refused_plan, 2)
