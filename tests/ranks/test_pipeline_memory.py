"""What a rank of a pipeline holds at most: the table's prediction beside a count of all tensors, under every schedule."""

import pytest
import torch
from booster_programs import boost, sgd
from torch import nn

from phalanx.cluster import comm
from phalanx.parallel.pipeline.footprint import StageBytes, peak_bytes
from phalanx.parallel.pipeline.messages import arrivals
from phalanx.parallel.pipeline.post import Outbox
from phalanx.parallel.pipeline.table import COMPUTE, Kind
from phalanx.testing import run_ranks
from phalanx.train.memory import TensorCount

WIDTH, ROWS = 48, 160


class Wide(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Marked:
    """Counts tensors around every computation of a runner: level before and after, and the most in between."""

    def __init__(self, runner, count):
        self.marks, self.most = {}, 0
        do = runner._do

        def counted(action):
            before, count.peak = count.now, 0
            do(action)
            after = count.now
            self.most = max(self.most, count.peak, after)
            if action.kind in COMPUTE:
                self.marks[action] = before, after, max(count.peak, after)

        runner._do = counted


def stage_bytes(runner, marks, handed):
    """What one micro-batch takes in each of this rank's stages, from single computations of each kind."""
    table, rank = runner.table, runner.rank
    known, found = arrivals(table)[rank], {}
    sizes = {Kind.SEND_FORWARD: lambda stage: handed[stage], Kind.SEND_BACKWARD: lambda stage: handed[stage - 1]}

    def learned(action):
        receive = {Kind.FORWARD: Kind.RECV_FORWARD}.get(action.kind, Kind.RECV_BACKWARD)
        sends = known.get(action._replace(kind=receive), ()) if action.kind is not Kind.WEIGHT else ()
        return sum(sizes[send.kind](table.stage(rank, send.chunk)) for send in sends)

    def change(action):
        before, after, _ = marks[action]
        return after - before + learned(action)

    def rise(action):
        before, _, most = marks[action]
        return most - before + learned(action)

    for chunk in range(table.num_chunks):
        stage = table.stage(rank, chunk)
        of = lambda *kinds: [action for action in table.rows[rank] if action.kind in kinds and action.chunk == chunk]  # noqa: B023, E731
        forward, halves, weights = of(Kind.FORWARD), of(Kind.INPUT), of(Kind.WEIGHT)
        received = handed[stage - 1] if stage else 0
        kept = change(forward[1]) - handed[stage]
        later = change(halves[0]) + handed[stage] + kept if halves else 0
        makes = of(Kind.BACKWARD, Kind.WEIGHT)
        whole = -kept - handed[stage] + (received if stage and table.home(stage - 1)[0] != rank else 0)
        steady = lambda actions: max((rise(action) for action in actions if action != makes[0]), default=0)  # noqa: B023, E731
        found[stage] = StageBytes(
            received=received,
            handed=handed[stage],
            kept=kept,
            kept_for_weights=later,
            forward=steady(forward),
            backward=steady(of(Kind.BACKWARD)),
            input=steady(halves),
            weight=steady(weights),
            first=rise(makes[0]),
            first_weight=rise(makes[0]),
            gradients=change(makes[0]) - (whole if makes[0].kind is Kind.BACKWARD else -later),
        )
    return found


def measured_and_predicted(plan, num_micro):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Wide(4 + index % 2) for index in range(4))), nn.Linear(WIDTH, WIDTH))
    booster, model, _ = boost(f"{plan}+micro{num_micro}", model, sgd(model), lambda output, rows: (output.sum(), torch.tensor(1.0)))
    batch = torch.randn(num_micro * ROWS, WIDTH)
    booster.step(batch)
    runner = booster.trainings[0].runner
    handed = handed_bytes(runner)
    with TensorCount() as count:
        start = count.now
        counted = Marked(runner, count)
        booster.step(batch)
    mine = stage_bytes(runner, counted.marks, handed)
    stages = {stage: bytes_ for part in comm.gather_objects(mine, runner.axis) for stage, bytes_ in part.items()}
    predicted = peak_bytes(runner.table, [stages[stage] for stage in range(runner.table.num_stages)])
    return counted.most - start, predicted[runner.rank]


def handed_bytes(runner):
    """For each stage of this rank that is not the last, the bytes that it hands on: all stages of this model hand on the same."""
    header = next(iter({**runner.sent, **runner.heard}.values())).known
    size = sum(entry.dtype.itemsize * torch.Size(entry.shape).numel() for entry in next(iter(header.values())).entries)
    return [size] * (runner.table.num_stages - 1) + [0]


SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved2", "zbv", "dualpipev", "auto-schedule")


@pytest.mark.parametrize("schedule", [name if name == "dualpipev" else pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES])
@pytest.mark.parametrize("num_micro", [7, pytest.param(3, marks=pytest.mark.slow)])
def test_the_peak_of_a_stage_is_what_its_table_says(schedule, num_micro):
    for measured, predicted in run_ranks(measured_and_predicted, 2, f"pp2+{schedule}", num_micro):
        assert predicted == pytest.approx(measured, rel=0.02)


def keeping_what_was_sent(plan, num_micro):
    """A fault on purpose: nothing that was sent is let go before the end of the step."""
    Outbox.forget = lambda self, arrived: None
    return measured_and_predicted(plan, num_micro)


def test_a_rank_that_keeps_what_it_has_sent_is_seen():
    measured, predicted = run_ranks(keeping_what_was_sent, 2, "pp2", 7)[0]
    assert measured > 1.05 * predicted
