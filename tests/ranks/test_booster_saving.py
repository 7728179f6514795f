"""A run that is saved and taken up by new processes equals one that never stopped; models go out and come back whole."""

import contextlib
import io

import pytest
import torch
from booster_programs import STAGES, WIDTH, WORDS, batch, boost, criterion, decoder, local
from torch import nn
from torch.utils.data import DataLoader, Dataset

import phalanx as px
from phalanx.booster import Booster
from phalanx.booster.plugin import GeminiPlugin, TorchDDPPlugin
from phalanx.data import take_rows
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.testing import run_ranks

ROWS, BATCH, STEPS = 40, 7, 6  # six batches an epoch, the last one smaller


class Rows(Dataset):
    def __init__(self):
        self.rows = batch(3, rows=ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.rows.items()}


def build(plan):
    """The whole program: dropout, AdamW with groups, a warm-up, a shuffled loader."""
    model = decoder(dtype=torch.float32, dropout=0.1, layers=3, tied=True)
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": list(model.blocks.parameters())}, {"params": [model.embed.weight], "lr": 3e-3}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    booster = Booster(plan, clip_norm=0.5, seed=11)
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    return booster, *booster.boost(model, optimizer, criterion, loader, schedule)


def run(plan, start, stop, load_from=None, save_to=None):
    """Steps start to stop; returns what each told, and the weights, moments, settings at the end."""
    booster, _, optimizer, _, loader, schedule = build(plan)
    if load_from:
        torch.manual_seed(999 + booster.world.rank)  # what load must overrule
        booster.load(load_from)
    told, step = [], start
    while step < stop:
        for rows in loader:
            result = booster.step(rows)
            told.append((result.loss, result.grad_norm, result.lr, result.tokens, result.loss_scale))
            step += 1
            if step == stop:
                break
    if save_to:
        booster.save(save_to)
    moments = [torch.as_tensor(value).clone() for entry in optimizer.state.values() for _, value in sorted(entry.items())]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return told, booster.full_state_dict(), moments, settings, schedule.state_dict()["last_epoch"], torch.rand(2)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    return a == b


CELLS = [(stage, "fp32") for stage in STAGES] + [
    ("zero0", "bf16"),
    ("zero3", "bf16"),
    ("zero1", "fp16"),
    ("zero2", "fp16"),
    ("zero3", "fp16"),
]


@pytest.mark.parametrize(("stage", "precision"), CELLS)
def test_resumed_equals_never_stopped(tmp_path, stage, precision):
    plan = f"{stage}+{precision}+acc2"
    straight = run_ranks(run, 2, plan, 0, STEPS + 2)
    first = run_ranks(run, 2, plan, 0, 3, None, tmp_path / "saved")
    second = run_ranks(run, 2, plan, 3, STEPS + 2, tmp_path / "saved")
    for whole, before, after in zip(straight, first, second):
        assert equal(before[0] + after[0], whole[0])
        names = ("told", "weights", "moments", "settings", "schedule", "random")
        assert not [name for name, a, b in list(zip(names, after, whole))[1:] if not equal(a, b)]
    assert len({lr for _, _, lr, _, _ in straight[0][0]}) == 4  # the schedule moves on both sides of the save
    assert {tokens for _, _, _, tokens, _ in straight[0][0]} != {straight[0][0][0][3]}


def test_resumed_without_its_random_streams_is_found(tmp_path):
    straight = run_ranks(run, 2, "zero1", 0, 4)
    run_ranks(run, 2, "zero1", 0, 3, None, tmp_path / "saved")
    after = run_ranks(run_with_lost_streams, 2, "zero1", 3, 4, tmp_path / "saved")
    assert not equal(after[0][0][-1], straight[0][0][-1])


def run_with_lost_streams(*args):
    px.cluster.random.Streams.load_state_dict = lambda self, state: None
    return run(*args)


def incomplete(folder):
    """Loading into a run that has other parts: the messages."""
    model = decoder(dtype=torch.float32, layers=2)
    booster, model, _optimizer = boost("zero1", model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    booster.step(local(batch()))
    booster.save(folder)
    messages = []
    for make in (
        lambda net: boost(
            "zero1", net, torch.optim.AdamW([{"params": list(net.parameters())[:2]}, {"params": list(net.parameters())[2:]}])
        ),
        lambda net: boost("zero1", net),
        _with_scheduler,
    ):
        other, *_ = make(decoder(dtype=torch.float32, layers=2))
        with pytest.raises(CheckpointError) as caught:
            other.load(folder)
        messages.append(str(caught.value))
    return messages


def _with_scheduler(net):
    booster, optimizer = px.Booster("zero1"), torch.optim.AdamW(net.parameters(), lr=1e-2)
    booster.boost(net, optimizer, criterion, None, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    return (booster,)


def test_a_part_that_is_missing_is_named(tmp_path):
    for groups, optimizer, schedule in run_ranks(incomplete, 2, tmp_path / "saved"):
        assert "groups" in groups
        assert "optimizer" in optimizer
        assert "scheduler" in schedule


# -- weights alone -----------------------------------------------------------------------------------------------------


def told_while_loading(plan, folder):
    """What the log says when a run of another number of ranks is taken up."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        run(plan, 2, 3, load_from=folder)
    return told.getvalue()


def test_another_number_of_ranks_starts_its_random_streams_anew_and_says_so(tmp_path):
    folder = str(tmp_path / "run")
    run_ranks(run, 2, "zero2", 0, 2, None, folder)
    assert run_ranks(told_while_loading, 2, "zero1", folder) == ["", ""]
    first, *others = run_ranks(told_while_loading, 3, "zero1", folder)
    assert "saved by another number of ranks: random streams (dropout) start anew from the seed" in first
    assert others == ["", ""]


def weights_alone(plan, folder):
    """Training, other weights, a step with lr 0: whether the weights are the loaded ones, in master dtype and as the model computes."""
    source = decoder(7, dtype=torch.float32, layers=2)
    booster, source, _ = boost("zero0", source)
    booster.save_model(folder)
    expected = booster.full_state_dict()
    model = decoder(dtype=torch.float32, layers=2)
    booster, model, optimizer = boost(plan, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        booster.step(local(batch(step)))
    booster.load_model(folder)
    loaded = booster.full_state_dict()
    compute = booster.evaluate(local(batch()))
    optimizer.param_groups[0]["lr"] = 0.0
    booster.step(local(batch(5)))
    again = booster.evaluate(local(batch()))
    kept = booster.full_state_dict()
    return all(
        torch.equal(loaded[name], value) and torch.equal(kept[name], value) for name, value in expected.items()
    ), compute.loss == again.loss


@pytest.mark.parametrize("plan", [*STAGES, "zero0+bf16", "zero1+bf16", "zero2+bf16", "zero3+bf16"])
def test_weights_loaded_alone_stay(tmp_path, plan):
    assert run_ranks(weights_alone, 2, plan, tmp_path / "weights") == [(True, True)] * 2


def tiny_llama(tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=37, max_position_embeddings=32, tie_word_embeddings=tied, use_cache=False, **sizes))


def exported(plan, folder, tied):
    model = tiny_llama(tied)
    booster = Booster(plan)
    model, _optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        booster.step({"input_ids": local(batch(step))["words"], "labels": local(batch(step))["labels"]})
    booster.save_model(folder, format="huggingface")
    booster.save_model(model, f"{folder}-again")
    return booster.full_state_dict()


EXPORTS = [("zero0", True), ("zero2+bf16", True), ("zero3", True), ("zero3", False), ("fsdp", False), ("pp2", True), ("pp2", False)]


@pytest.mark.parametrize(("plan", "tied"), EXPORTS)
def test_models_go_out_in_the_form_of_transformers(tmp_path, plan, tied):
    from transformers import LlamaForCausalLM

    full, _ = run_ranks(exported, 2, plan, str(tmp_path / "model"), tied)
    for folder in ("model", "model-again"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert set(model.state_dict()) == set(full)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in full.items())
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert model.config.architectures == ["LlamaForCausalLM"]


# -- dtypes and other names --------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS).bfloat16()
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.none, self.seven = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(7))
        self.register_buffer("calls", torch.tensor(seed))
        self.register_buffer("scratch", torch.tensor(1.0), persistent=False)

    def forward(self, words):
        self.calls += 1
        x = self.norm(self.embed(words) + nn.functional.pad(self.seven, (0, 5)) + self.none.sum())
        return self.head(x.to(self.head.weight.dtype)).float() * self.scale


def mixed_saved(plan, folder):
    """Saves, changes everything, loads; then the same through optimizer, schedule and model files of their own."""
    outcome = {}
    for way in ("run", "parts"):
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        booster = Booster(plan)
        model, optimizer, _, _, schedule = booster.boost(model, optimizer, criterion, None, schedule)
        booster.step(local(batch(0)))
        place = f"{folder}-{way}"
        if way == "run":
            booster.save(place)
        else:
            booster.save_model(model, f"{place}-model")
            booster.save_optimizer(optimizer, f"{place}-optimizer")
            booster.save_lr_scheduler(schedule, f"{place}-schedule")
        saved = booster.full_state_dict()
        booster.step(local(batch(1)))
        expected = booster.full_state_dict()
        other = Mixed(5)
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        booster = Booster(plan)
        other, optimizer, _, _, schedule = booster.boost(other, optimizer, criterion, None, schedule)
        if way == "run":
            booster.load(place)
        else:
            booster.load_model(other, f"{place}-model")
            booster.load_optimizer(optimizer, f"{place}-optimizer")
            booster.load_lr_scheduler(schedule, f"{place}-schedule")
        outcome[way, "loaded"] = equal(booster.full_state_dict(), saved)
        booster.step(local(batch(1)))
        outcome[way, "continued"] = equal(booster.full_state_dict(), expected)
        outcome[way, "lr"] = optimizer.param_groups[0]["lr"] == 1e-2 * 0.25
    dtypes = {name: parameter.dtype for name, parameter in Mixed().named_parameters()}
    outcome["dtypes"] = {name: saved[name].dtype for name in dtypes} == dtypes
    return outcome


@pytest.mark.parametrize(("plan", "world"), [("zero0", 1), ("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero3:2", 4)])
def test_mixed_dtypes_come_back_as_they_were(tmp_path, plan, world):
    for outcome in run_ranks(mixed_saved, world, plan, str(tmp_path / "saved")):
        assert all(outcome.values()), outcome


def familiar(kind):
    """The way of calling that people bring along."""
    model = decoder(dtype=torch.float32, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataloader = DataLoader(Rows(), batch_size=BATCH)
    try:
        plugin = GeminiPlugin(max_memory={0: "30GB", "cpu": "60GB"}, precision="fp32") if kind == "gemini" else TorchDDPPlugin()
        booster = Booster(plugin=plugin)
        model, optimizer, given, dataloader = booster.launch(model=model, optimizer=optimizer, criterion=criterion, dataloader=dataloader)
    except PhalanxError as error:
        return str(error)
    losses = []
    for rows in dataloader:
        optimizer.zero_grad()
        loss, count = given(model(rows["words"]), rows)
        booster.backward(loss / count.clamp(min=1), optimizer, count=count)
        losses.append(optimizer.step().loss)
    return losses


def test_the_familiar_way_of_calling():
    plain = decoder(dtype=torch.float32, layers=2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for start in range(0, ROWS, BATCH):
        rows = take_rows(Rows().rows, start, min(start + BATCH, ROWS), ROWS)
        loss, count = criterion(plain(rows["words"]), rows)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss / count).item())
    first, second = run_ranks(familiar, 2, "ddp")
    assert first == second == pytest.approx(expected, rel=1e-5)
    for outcome in run_ranks(familiar, 2, "gemini"):
        assert outcome == pytest.approx(expected, rel=1e-5)
