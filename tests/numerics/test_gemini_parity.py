"""A state in tiers gives the numbers of one process at every budget; it never exceeds one, and moves what was foreseen, to the byte."""

import pytest
import torch
from tier_meter import counted

import phalanx as px
from phalanx.errors import CapacityError, PlanError
from phalanx.verify import verify_named
from phalanx.verify.batches import make_batch
from phalanx.verify.tiny import build_tiny

ROOMY = {"device": "1GB", "host": "1GB"}


def freeze(model):
    for name, parameter in model.named_parameters():
        if ".0." in name or ".2." in name or "embed" in name:
            parameter.requires_grad_(False)


class Run:
    """Three steps of a tiny model, with the bytes moved in each."""

    def __init__(self, name, table, *, frozen=False, optimizer="adamw", clip_norm=None, dtype=torch.float64, steps=3, **fields):
        torch.manual_seed(0)
        model, kind = build_tiny(name)
        model = model.to(dtype)
        if frozen:
            freeze(model)
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
        self.booster = px.Booster({**fields, **({"gemini": table} if table else {})}, clip_norm=clip_norm)
        self.model, self.optimizer, *_ = self.booster.boost(model, make(learning, lr=1e-2))
        self.training = self.booster.trainings[0]
        self.tiers = self.training.engine.tiers
        self.results, self.moved = [], []
        for step in range(steps):
            batch = make_batch(kind, model.config, step, 8)
            self.batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
            before = self.tiers.moved() if self.tiers else {}
            result = self.booster.step(self.batch)
            self.results.append((result.loss, result.grad_norm))
            self.moved.append({link: count - before[link] for link, count in self.tiers.moved().items()} if self.tiers else {})
        self.weights = self.booster.full_state_dict()


def require_equal(run, plain):
    """Bit for bit: on one rank nothing but the place of the numbers differs."""
    assert run.results == plain.results
    assert all(torch.equal(run.weights[name], value) for name, value in plain.weights.items())
    assert run.moved[1] == run.moved[2] == run.tiers.plan.moved
    assert run.tiers.arena.budget.peak <= run.tiers.sizes.device
    assert run.tiers.host.budget.peak <= run.tiers.sizes.host


def disk_table(run, tmp_path, device):
    """A host with room for little more than the update of one chunk, and a disk for the rest."""
    staging = max(chunk.sizes().optimizer + chunk.sizes().gradient_shard for chunk in run.tiers.chunks)
    return {"device": device, "host": int(1.2 * staging), "disk": "100MB", "disk_path": str(tmp_path / "tiers")}


SETTINGS = {
    "adamw": {},
    "sgd, three passes": {"optimizer": "sgd", "acc": 3},
    "clipped": {"clip_norm": 0.1, "acc": 2},
    "frozen": {"frozen": True},
    "bf16": {"dtype": torch.float32, "precision": "bf16"},
    "recompute": {"recompute": "full"},
}


@pytest.mark.parametrize(("name", "setting"), [("tiny-llama", "frozen"), ("tiny-gpt2", "clipped"), ("tiny-vit", "sgd, three passes")])
def test_every_budget_gives_the_same_bits_and_moves_what_was_foreseen(tmp_path, name, setting):
    check_budgets(tmp_path, name, setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-vit", "tiny-t5"])
def test_more_models_and_settings(tmp_path, name, setting):
    check_budgets(tmp_path, name, setting)


def check_budgets(tmp_path, name, setting):
    options = SETTINGS[setting]
    plain, roomy = Run(name, None, **options), Run(name, ROOMY, **options)
    require_equal(roomy, plain)
    assert not any(roomy.moved[2].values()), "with room for everything nothing moves"
    full, smallest = roomy.tiers.arena.budget.peak, Run(name, ROOMY | {"placement": "host"}, steps=1, **options).tiers.plan.smallest
    for device in sorted({full, max(full // 2, smallest), smallest}):
        require_equal(Run(name, ROOMY | {"device": device}, **options), plain)
        require_equal(Run(name, disk_table(roomy, tmp_path, device), **options), plain)
    require_equal(Run(name, ROOMY | {"device": smallest, "placement": "static"}, **options), plain)
    with pytest.raises(CapacityError, match=f"a step needs {smallest} bytes on the device"):
        Run(name, ROOMY | {"device": smallest - 1}, **options)


@pytest.mark.parametrize(
    ("model", "table", "world"),
    [
        ("tiny-llama", {"gemini": ROOMY, "acc": 2}, 2),
        ("tiny-gpt2", {"gemini": ROOMY | {"placement": "host"}, "precision": "bf16"}, 2),
        ("tiny-vit", {"gemini": ROOMY | {"host": "100KB", "disk": "100MB"}}, 3),
    ],
)
def test_ranks_share_the_state(tmp_path, model, table, world):
    from phalanx.plan import Plan

    if "disk" in table["gemini"]:
        table = {**table, "gemini": {**table["gemini"], "disk_path": str(tmp_path)}}
    report = verify_named(model, Plan.from_table(table), world, clip_norm=0.5)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-vit"])
def test_the_dry_run_foresees_every_byte_beside_the_chunks(name):
    """Interval by interval: nothing that a pass makes goes beyond what its budget was reduced by, and that is not much too large."""
    run = Run(name, ROOMY | {"placement": "host"}, dtype=torch.float32, steps=1)
    inputs = [*run.batch.values(), *run.model.buffers()]
    with counted(run.tiers, inputs) as peaks:
        run.training.forward_backward(run.batch)
    beside = sum(tensor.nbytes for tensor in inputs)
    foreseen = run.tiers.plan.record.others
    assert len(peaks) == len(foreseen)
    for real, expected in zip(peaks, foreseen):
        assert expected - 2000 <= real + beside <= expected


def test_a_larger_batch_is_planned_anew_or_refused():
    run = Run("tiny-llama", ROOMY | {"placement": "host"}, steps=1)
    tight = Run("tiny-llama", ROOMY | {"device": run.tiers.plan.smallest}, steps=1)
    smaller = {key: value[:3] for key, value in tight.batch.items()}
    plan = tight.tiers.plan
    tight.booster.step(smaller)
    assert tight.tiers.plan is plan, "what is smaller in every dimension fits the plan that is there"
    larger = {key: torch.cat([value, value]) for key, value in tight.batch.items()}
    with pytest.raises(CapacityError, match="a step needs"):
        tight.booster.step(larger)
    run.booster.step(larger)
    assert run.tiers.plan.smallest > plan.smallest


def test_saving_and_loading_go_through_every_tier(tmp_path):
    plain = Run("tiny-llama", None)
    roomy = Run("tiny-llama", ROOMY)
    smallest = Run("tiny-llama", ROOMY | {"placement": "host"}, steps=1).tiers.plan.smallest
    first = Run("tiny-llama", disk_table(roomy, tmp_path, smallest))
    first.booster.save(tmp_path / "saved")
    again = Run("tiny-llama", disk_table(roomy, tmp_path, smallest), steps=1)
    again.booster.load(tmp_path / "saved")
    for run in (plain, first, again):
        run.booster.step(plain.batch)
        run.weights = run.booster.full_state_dict()
    for run in (first, again):
        assert all(torch.equal(run.weights[name], value) for name, value in plain.weights.items())


def test_a_hand_written_loop_and_evaluation_are_served_on_demand():
    plain, run = Run("tiny-llama", None, steps=1), Run("tiny-llama", ROOMY | {"placement": "host"}, steps=1)
    for each in (plain, run):
        each.losses = []
        for _ in range(2):
            each.losses.append(each.booster.evaluate(each.batch).loss)
            each.booster.backward(each.model(**each.batch).loss, each.optimizer)
            each.losses.append(each.optimizer.step().loss)
    assert run.losses == plain.losses


def test_an_optimizer_with_a_count_of_its_own_steps_is_refused():
    class Counting(torch.optim.SGD):
        num_steps = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.num_steps += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"] / self.num_steps)

    model, _ = build_tiny("tiny-vit")
    with pytest.raises(px.errors.ConfigError, match="Counting cannot update some parameters before others"):
        px.Booster({"gemini": ROOMY}).boost(model, Counting(model.parameters(), lr=0.1))


def test_what_cannot_be_foreseen_is_refused_beside_tiers():
    from phalanx.plan import Plan

    for other, why in (("pp2", "what a stage is handed"), ("ep2", "how many tokens come to the experts")):
        with pytest.raises(PlanError, match=f"gemini with {other}: {why}"):
            Plan.parse(f"gemini+{other}").require(None, 4)
