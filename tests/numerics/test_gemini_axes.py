"""Tiers beside tensor and context parallelism: the numbers of one process within the smallest budget, and every byte as foreseen."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from tier_meter import counted

import phalanx as px
from phalanx.cluster import collectives, comm
from phalanx.errors import CapacityError
from phalanx.plan import Plan
from phalanx.precision import lift_to_float64
from phalanx.testing import run_ranks
from phalanx.verify import verify_named
from phalanx.verify.batches import make_batch
from phalanx.verify.tiny import build_tiny

ROOMY = {"device": "1GB", "host": "1GB"}
STEPS = 3


def start(name, dtype, frozen):
    torch.manual_seed(0)
    model, kind = build_tiny(name)
    model = model.to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if frozen and (".0." in parameter_name or "embed" in parameter_name):
            parameter.requires_grad_(False)
    batches = [make_batch(kind, model.config, step, rows=7) for step in range(STEPS)]
    return model, [{key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()} for batch in batches]


def make_optimizer(model):
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05, momentum=0.9)


def alone(name, frozen, clip_norm):
    """Losses and weights of one plain process."""
    model, batches = start(name, torch.float64, frozen)
    optimizer, losses = make_optimizer(model), []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {parameter_name: parameter.detach() for parameter_name, parameter in model.named_parameters()}


class Run:
    """Steps of a tiny model on this rank, with the bytes moved in each, and the peaks beside the chunks in the last."""

    def __init__(self, name, fields, table, *, frozen=False, clip_norm=None, dtype=torch.float64, steps=STEPS):
        model, batches = start(name, dtype, frozen)
        booster = px.Booster({**fields, **({"gemini": table} if table else {"zero": 3})}, clip_norm=clip_norm)
        *_, loader, _ = booster.boost(model, make_optimizer(model), None, batches, None)
        self.training = booster.trainings[0]
        self.tiers = self.training.engine.tiers
        self.losses, self.moved = [], []
        for self.batch in list(loader)[:steps]:
            before = self.tiers.moved() if table else {}
            self.losses.append(booster.step(self.batch).loss)
            self.moved.append({link: count - before[link] for link, count in self.tiers.moved().items()} if table else {})
        self.weights = booster.full_state_dict()

    def require_foreseen(self):
        plan, sizes = self.tiers.plan, self.tiers.sizes
        assert plan is not None
        assert self.moved[1] == self.moved[2] == plan.moved
        assert self.tiers.arena.budget.peak <= sizes.device
        assert self.tiers.host.budget.peak <= sizes.host


def check(name, fields, options, folder):
    """On each rank: the numbers at several budgets and places, and the refusal one byte below the smallest."""
    world, half = px.launch(), "precision" in fields
    with nullcontext() if half else lift_to_float64():
        return check_budgets(name, fields, options, folder and f"{folder}/{world.rank}", half)


def check_budgets(name, fields, options, folder, half):
    options = options | ({"dtype": torch.float32} if half else {})
    if half:  # bit for bit what the same ranks compute without tiers
        plain = Run(name, fields, None, **options)
        losses, weights, limit = plain.losses, plain.weights, 0.0
    else:
        losses, weights = alone(name, options.get("frozen", False), options.get("clip_norm"))
        limit = 1e-9
    roomy = Run(name, fields, ROOMY | {"placement": "host"}, **options, steps=1)
    smallest = roomy.tiers.plan.smallest
    assert len(set(comm.gather_objects(smallest, roomy.training.world))) == 1, "all ranks name the same budget"
    tables = [ROOMY | {"device": smallest}]
    if folder is not None:
        staging = max(chunk.sizes().optimizer + chunk.sizes().gradient_shard for chunk in roomy.tiers.chunks)
        disk = {"host": int(1.2 * staging), "disk": "100MB", "disk_path": folder}
        tables += [{"device": device, **disk} for device in (smallest, smallest + roomy.tiers.host.budget.peak // 4)]
    for table in tables:
        run = Run(name, fields, table, **options)
        run.require_foreseen()
        for expected, found in zip(losses, run.losses):
            assert abs(found - expected) <= limit * abs(expected)
        for key, value in weights.items():
            assert (run.weights[key] - value).abs().max() <= limit * value.abs().max()
    try:
        Run(name, fields, ROOMY | {"device": smallest - 1}, **options, steps=1)
    except CapacityError as error:
        return str(error), smallest
    return "", smallest


def require(name, fields, world, options=None, folder=None):
    found = run_ranks(check, world, name, fields, options or {}, folder)
    for refusal, smallest in found:
        assert f"a step needs {smallest} bytes on the device" in refusal


CELLS = {"tp2": ({"tp": 2, "sp": True}, 2), "cp2": ({"cp": 2}, 2)}
SETTINGS = {
    "three passes, clipped, on disk": ({"acc": 3}, {"clip_norm": 0.1}, True),
    "frozen": ({}, {"frozen": True}, True),
    "bf16": ({"precision": "bf16"}, {}, False),
    "recompute": ({"recompute": "full"}, {}, False),
}
MORE = {
    "dp2 tp2": ({"tp": 2}, 4),
    "dp2 cp2": ({"cp": 2}, 4),
    "tp2 cp2": ({"tp": 2, "sp": True, "cp": 2}, 4),
    "2d": ({"tp": 4, "tp_kind": "2d"}, 4),
    "tp3": ({"tp": 3}, 3),
    "ulysses2": ({"ulysses": 2}, 2),
}


@pytest.mark.parametrize("cell", ["tp2", pytest.param("cp2", marks=pytest.mark.slow)])
def test_tiers_beside_another_axis(cell):
    require("tiny-llama", *CELLS[cell])


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
@pytest.mark.parametrize("cell", CELLS)
def test_more_settings(tmp_path, cell, name, setting):
    fields, options, uses_disk = SETTINGS[setting]
    axes, world = CELLS[cell]
    require(name, axes | fields, world, options, tmp_path if uses_disk else None)


@pytest.mark.slow
@pytest.mark.parametrize("cell", MORE)
def test_more_axes(cell):
    require("tiny-llama", *MORE[cell])


@pytest.mark.slow
def test_tiers_beside_axes_and_the_verifier():
    report = verify_named("tiny-llama", Plan.from_table({"tp": 2, "cp": 2, "gemini": ROOMY}), 4, clip_norm=0.5)
    assert report.ok, str(report)


@contextmanager
def nothing_sent():
    """What the library that carries messages holds, and for how long after them, is not the pass's."""
    sent = collectives._is_tried_out
    collectives._is_tried_out = lambda tensor, axis: True
    try:
        yield
    finally:
        collectives._is_tried_out = sent


def peaks_of(name, fields):
    """What a pass holds beside the chunks in each interval: foreseen, and counted as it runs."""
    px.launch()
    run = Run(name, fields, ROOMY | {"placement": "host"}, dtype=torch.float32, steps=2)
    inputs = [*run.batch.values(), *run.training.model.buffers()]
    with nothing_sent(), counted(run.tiers, inputs) as peaks:
        run.training.forward_backward(run.batch)
    beside = sum(tensor.nbytes for tensor in inputs)
    return run.tiers.plan.record.others, [peak + beside for peak in peaks]


@pytest.mark.parametrize("cell", CELLS)
def test_no_interval_holds_more_beside_the_chunks_than_foreseen(cell):
    fields, world = CELLS[cell]
    for foreseen, found in run_ranks(peaks_of, world, "tiny-llama", fields):
        assert len(found) == len(foreseen)
        assert all(expected - 2000 <= real <= expected for real, expected in zip(found, foreseen))
