"""Pipelines as a person meets them: one loss everywhere, ties that stay together, any lengths, saving, and what is refused."""

import time

import pytest
import torch
from booster_programs import TOLERANCE, Block, Decoder, batch, boost, decoder, plain_step, sgd, weights, worst
from torch import nn

import phalanx as px
from phalanx.errors import ConfigError, PlanError
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.trace import costs_of, from_record, simulated_beside
from phalanx.testing import RankError, run_ranks


def reference(batches, *, tied=True, layers=4):
    model = decoder(tied=tied, layers=layers)
    optimizer = sgd(model)
    losses = [plain_step(model, optimizer, [rows])[0] for rows in batches]
    return losses, weights(model)


def train(plan, batches, tied=True, layers=4):
    torch.manual_seed(px.cluster.launch.world().rank)  # start weights are those of rank 0
    model = decoder(seed=0 if px.cluster.launch.world().rank == 0 else 5, tied=tied, layers=layers)
    booster, model, _ = boost(plan, model, sgd(model))
    data = booster.mesh.axis("dp")
    losses = [booster.step(rows_of(rows, data)).loss for rows in batches]
    evaluated = booster.evaluate(rows_of(batches[0], data)).loss
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    return losses, booster.full_state_dict(), own, evaluated


def rows_of(full, axis):
    from phalanx.data import take_rows
    from phalanx.layout import split_range

    total = len(full["words"])
    return take_rows(full, *split_range(total, axis.size, axis.index), total)


@pytest.mark.parametrize("plan", ["pp2", "pp4+zb-h1", "zero1+pp2+micro3", "pp2+zbv", "pp3+micro2"])
def test_every_rank_has_the_loss_and_ties_stay_together(plan):
    """Five steps: the two copies of a tied weight are bit-equal, and every rank tells the loss of one process."""
    batches = [batch(seed) for seed in range(5)]
    expected, weights_of_one = reference(batches)
    world = 4 if "zero" in plan or "pp4" in plan else 3 if "pp3" in plan else 2
    ranks = run_ranks(train, world, plan, batches)
    for losses, full, _, evaluated in ranks:
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert evaluated == ranks[0][3]
        assert worst({name: full[name] for name in weights_of_one}, weights_of_one) < TOLERANCE
    copies = [own["embed.weight"] for _, _, own, _ in ranks if "embed.weight" in own]
    assert len(copies) >= (1 if "zbv" in plan else 2)
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert all("blocks.0.up.weight" not in own for _, _, own, _ in ranks[1:2])


def variable(seed):
    """Batches whose rows get longer and shorter from one micro-batch to the next."""
    rows = batch(seed)
    length = 12 - 2 * (seed % 5)
    return {name: value[:, :length] for name, value in rows.items()}


SLOW = pytest.mark.slow


DEEPER = [pytest.param(name, marks=SLOW) for name in ("interleaved2", "zbv", "dualpipev")]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe", *DEEPER])
@pytest.mark.parametrize("counts", [(1, 3, 5), pytest.param((2, 4), marks=SLOW)])
def test_few_micro_batches_and_changing_lengths_on_four_stages(schedule, counts):
    layers = 4 if schedule in ("1f1b", "zb-h1", "gpipe") else 9
    batches = [variable(seed) for seed in range(3)]
    expected, _ = reference(batches, layers=layers)
    for num_micro in counts:
        for losses, *_ in run_ranks(train, 4, f"pp4+{schedule}+micro{num_micro}", batches, True, layers, timeout_s=60):
            assert losses == pytest.approx(expected, rel=TOLERANCE)


def rows_that_belong_together():
    """Labels are a function of the words: with weights that know it, every micro-batch has a loss of 0."""

    class Copy(Decoder):
        def forward(self, words):
            for block in self.blocks:
                words = block(words)
            return words

    class Keep(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.gain * x

    model = Copy().double()
    model.blocks = nn.ModuleList(Keep() for _ in range(2))
    del model.embed, model.norm, model.head
    booster = px.Booster("pp2+micro4")
    losses = []

    def difference(output, rows):
        losses.append(float((output - rows["labels"]).abs().max()))
        return (output - rows["labels"]).abs().sum(), torch.tensor(1.0)

    model, *_ = booster.boost(model, sgd(model), difference)
    for seed in range(2):
        rows = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        booster.forward_backward({"words": rows, "labels": rows.clone()})
    return losses


def test_outputs_meet_the_labels_of_their_own_rows():
    first, last = run_ranks(rows_that_belong_together, 2)
    assert first == []
    assert last == [0.0] * 8


def save_and_go_on(path, plan, other, batches):
    model = decoder(tied=True)
    booster, model, _ = boost(plan, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    axis = booster.mesh.axis("dp")
    for rows in batches[:2]:
        booster.step(rows_of(rows, axis))
    booster.save(path)
    booster.save_model(f"{path}-model")
    straight = [booster.step(rows_of(rows, axis)).loss for rows in batches[2:]]
    model = decoder(seed=7, tied=True)
    booster, model, _ = boost(other, model, torch.optim.AdamW(model.parameters(), lr=0.01))
    axis = booster.mesh.axis("dp")
    booster.load(path)
    resumed = [booster.step(rows_of(rows, axis)).loss for rows in batches[2:]]
    loaded = decoder(seed=9, tied=True)
    booster, *_ = boost(plan, loaded)
    booster.load_model(f"{path}-model")
    return straight, resumed


@pytest.mark.parametrize(("plan", "other"), [("pp2", "pp2+zbv"), ("pp2+zb-h1", "zero2"), ("zero1", "pp2"), ("pp2+interleaved2", "zero3")])
def test_a_run_goes_on_under_another_plan(tmp_path, plan, other):
    batches = [batch(seed) for seed in range(4)]
    for straight, resumed in run_ranks(save_and_go_on, 2, str(tmp_path / "run"), plan, other, batches):
        assert resumed == pytest.approx(straight, rel=TOLERANCE)


def lazily(plan, rows):
    torch.manual_seed(0)
    with px.lazy():
        model = Decoder(tied=True).double()
    booster, model, _ = boost(plan, model, sgd(model))
    return booster.step(rows).loss, sum(parameter.numel() for parameter in model.parameters())


def test_lazy_models_take_only_what_their_stages_hold():
    rows = batch(1)
    torch.manual_seed(0)
    model = Decoder(tied=True).double()
    total = sum(parameter.numel() for parameter in model.parameters())
    expected, _ = plain_step(model, sgd(model), [rows])
    for loss, held in run_ranks(lazily, 2, "pp2", rows):
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        assert held < 0.75 * total


class Skipping(Decoder):
    """Its head reads what came out of the first block, which the last stage does not have."""

    def forward(self, words):
        x = first = self.embed(words)
        for number, block in enumerate(self.blocks):
            x = block(x)
            first = x if number == 0 else first
        return self.head(self.norm(x + first))


class Mixing(Decoder):
    """Every block is called with something computed between blocks from the embedding."""

    def forward(self, words):
        x = start = self.embed(words)
        for block in self.blocks:
            x = block(x + 2 * start)
        return self.head(self.norm(x))


def refuse(kind):
    torch.manual_seed(0)
    booster, *_ = boost("pp2", kind().double())
    booster.evaluate(batch(1))


@pytest.mark.parametrize("kind", [Skipping])
def test_models_that_read_across_stages_are_refused_at_their_first_batch(kind):
    with pytest.raises(RankError) as caught:
        run_ranks(refuse, 2, kind)
    assert isinstance(caught.value.__cause__, PlanError)
    assert "another stage holds" in str(caught.value)


def carry(rows):
    torch.manual_seed(0)
    model = Mixing().double()
    optimizer = sgd(model)
    booster, model, optimizer = boost("pp4", model, optimizer)
    booster.forward_backward(rows)
    return booster.gradients()


def test_what_is_added_to_the_hidden_states_between_layers_is_carried_or_refused():
    with pytest.raises(RankError, match="another stage holds"):
        run_ranks(carry, 4, batch(1))


def stage_by_stage(sizes):
    model = decoder(layers=5)
    booster, model, _ = boost("pp2", model, sgd(model), stage_sizes=sizes)
    booster.step(batch(1))
    return sorted({int(name.split(".")[1]) for name, _ in model.named_parameters() if name.startswith("blocks.")})


def test_stages_are_cut_as_given():
    assert run_ranks(stage_by_stage, 2, (4, 1)) == [[0, 1, 2, 3], [4]]
    with pytest.raises(RankError, match=r"stages of \[4, 4\] layers.*add up to 5"):
        run_ranks(stage_by_stage, 2, (4, 4))


def call_directly():
    _, model, _ = boost("pp2", decoder())
    with pytest.raises(ConfigError, match=r"booster\.evaluate"):
        model(batch(1)["words"])
    return True


def test_a_model_in_stages_cannot_be_called_by_itself():
    assert run_ranks(call_directly, 2) == [True, True]


def without_tie_sums(rows):
    """A fault on purpose: the copies of a tied weight keep their own parts of the gradient."""
    from phalanx.cluster.placement import Placements

    Placements.add_sums = lambda *_: None
    model = decoder(tied=True)
    booster, model, _ = boost("pp2", model, sgd(model))
    booster.forward_backward(rows)
    return booster.gradients()


def test_ties_that_are_not_summed_are_seen():
    rows = batch(1)
    model = decoder(tied=True)
    _, expected = plain_step(model, sgd(model), [rows])
    try:
        found = run_ranks(without_tie_sums, 2, rows)[0]
    except RankError:  # two ranks then own the same elements
        return
    assert worst({name: found[name] for name in expected}, expected) > 1e-3


def dropped(plan, rows):
    model = decoder(tied=True, dropout=0.3)
    booster, model, _ = boost(plan, model, sgd(model))
    return [booster.step(rows).loss for _ in range(2)]


def test_dropout_is_the_same_with_and_without_recompute():
    rows = batch(1)
    plain, *again = (run_ranks(dropped, 2, plan, rows)[0] for plan in ("pp2", "pp2+recompute", "pp2+zb-h1+recompute=0.5,0"))
    assert all(losses == plain for losses in again)
    assert plain[0] != plain[1]


def forwards_of_layers(plan, layers, rows):
    """How often each layer of this rank runs in a micro-batch, and which stages halve their backwards."""
    model = decoder(layers=layers)
    booster, model, _ = boost(plan, model, sgd(model))
    booster.step(rows)
    calls, plain = {}, Block.forward
    number = {block: index for index, block in enumerate(model.blocks)}

    def counted(self, x):
        calls[number[self]] = calls.get(number[self], 0) + 1
        return plain(self, x)

    Block.forward = counted
    booster.step(rows)
    Block.forward = plain
    runner = booster.trainings[0].runner
    stages = [runner.table.stage(runner.rank, chunk) for chunk in range(runner.table.num_chunks)]
    mine = {index for stage in stages for index in range(runner.cut.starts[stage], runner.cut.starts[stage + 1])}
    return {index: calls[index] / booster.plan.num_micro for index in mine}, {stage: runner.splits(stage) for stage in stages}


@pytest.mark.parametrize(
    ("plan", "layers", "forwards", "halved"),
    [
        ("pp2+zb-h1+recompute=full,0", 5, [2, 2, 2, 1, 1], [False, True]),
        ("pp2+recompute=0,0.5", 5, [1, 1, 1, 1, 2], [True, False]),
        ("pp2+zbv+recompute=full,0", 4, [2, 1, 1, 2], [False, True, True, False]),  # by rank
        ("pp2+zbv+recompute=0,full,0,0", 4, [1, 2, 1, 1], [True, False, True, True]),  # by stage
    ],
)
def test_stages_recompute_what_the_plan_says_of_each(plan, layers, forwards, halved):
    ranks = run_ranks(forwards_of_layers, 2, plan, layers, batch(1))
    assert [count for _, count in sorted({**ranks[0][0], **ranks[1][0]}.items())] == forwards
    assert [count for _, count in sorted({**ranks[0][1], **ranks[1][1]}.items())] == halved


class Slow(torch.autograd.Function):
    """Passes on what it gets, and takes a given time forward and twice that backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class SlowBlock(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.inner = seconds, nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(Slow.apply(x, self.seconds))


def slow_steps(plan, seconds):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(SlowBlock(each) for each in seconds)))
    booster, model, _ = boost(plan, model, sgd(model), lambda output, rows: (output.sum(), torch.tensor(1.0)))
    rows = torch.randn(8, 4)
    for _ in range(2):
        booster.step(rows)
    result, record = booster.traced_step(rows)
    assert result.loss == result.loss
    return record


@pytest.mark.parametrize("plan", ["pp3+micro6", "pp3+gpipe+micro4", "pp2+interleaved2+micro4"])
def test_a_real_step_takes_the_time_that_the_simulation_says(plan):
    """Each stage is slowed by a known sleep, so that it does not matter how many cores there are."""
    seconds = (0.02, 0.03, 0.02, 0.025)[: 4 if "interleaved" in plan else 3]
    ratios = []
    for _ in range(2):  # a busy machine may be late once
        record = run_ranks(slow_steps, 2 if "pp2" in plan else 3, plan, seconds)[0]
        table, spans = from_record(record)
        measured, simulated = simulated_beside(table, spans)
        ratios.append(measured.step_s / simulated.step_s)
        if abs(ratios[-1] - 1) < 0.05:
            break
    assert abs(ratios[-1] - 1) < 0.05, ratios
    assert costs_of(table, spans).forward[1] == pytest.approx(seconds[1], rel=0.15)


def cut_twice(seconds):
    """The layers of each stage and the time of a step: cut by counted costs, and by those of that step."""
    found = []
    costs = None
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(SlowBlock(each) for each in seconds)))
        booster, model, _ = boost(
            "pp2+micro4", model, sgd(model), lambda output, rows: (output.sum(), torch.tensor(1.0)), layer_costs=costs
        )
        rows = torch.randn(8, 4)
        booster.step(rows)
        _, costs = booster.traced_step(rows)
        found.append((booster.trainings[0].runner.cut.sizes, simulated_beside(*from_record(costs))[0].step_s))
    return found


def test_stages_are_cut_by_the_times_of_an_earlier_step():
    (counted, before), (measured, after) = run_ranks(cut_twice, 2, (0.02, 0.02, 0.0025, 0.0025, 0.0025))[0]
    assert (counted, measured) == ([2, 3], [1, 4])
    assert after < before


def cut_by_costs_of_another_model():
    costs = LayerCosts(forward=(1.0,) * 3, input=(1.0,) * 3, weight=(1.0,) * 3, activation_bytes=(1.0,) * 3)
    boost("pp2", decoder(), layer_costs=costs)


def test_costs_of_another_number_of_layers_are_refused():
    with pytest.raises(RankError, match="costs of 3 layers for a model of 4"):
        run_ranks(cut_by_costs_of_another_model, 2)
