"""The far corners of models and loops: odd tensors, inference mode, errors that are caught, ranks that count differently."""

import time

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, batch, boost, criterion, decoder, local, plain_step, sgd, weights, worst
from patience import patience
from torch import nn

import phalanx as px
from phalanx.errors import CommError, ConfigError
from phalanx.layout import split_range
from phalanx.memory import partition
from phalanx.testing import RankError, run_ranks


def error_of(plan, make, before=lambda booster, model, optimizer, step: None, make_optimizer=sgd, steps=3):
    """Worst error of gradients, weights and buffers; `before` is done to the boosted run alone, before each step."""
    reference, model = make(), make()
    plain, boosted = make_optimizer(reference), make_optimizer(model)
    booster, model, boosted = boost(plan, model, boosted)
    error = 0.0
    for step in range(steps):
        before(booster, model, boosted, step)
        _, expected = plain_step(reference, plain, [batch(step)])
        booster.forward_backward(local(batch(step)))
        error = max(error, worst(booster.gradients(), expected))
        boosted.step()
    return max(error, worst(booster.full_state_dict(), reference.state_dict()))


class OddTensors(nn.Module):
    """Quantised weights, a complex parameter, buffers of every dtype, and one buffer that two modules share and change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = decoder(layers=2)
        self.codes = nn.Parameter(torch.randint(-5, 5, (7, 3), dtype=torch.int8), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(37, dtype=torch.complex128))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("turns", torch.randn(3, dtype=torch.complex64))
        shared = torch.zeros(2, dtype=torch.float64)
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("calls", shared)
        self.second.register_buffer("calls", shared)

    def forward(self, words):
        if self.training:
            self.first.calls += 1
        scale = 1 + 0.01 * self.second.calls.sum() + 0.001 * self.codes.double().sum()
        return self.inner(words) * scale + (self.phase * (1 + 2j)).real


@pytest.mark.parametrize(("plan", "world"), [("zero0", 1), ("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero3:2", 4)])
def test_odd_tensors(plan, world):
    assert max(run_ranks(error_of, world, plan, OddTensors)) < TOLERANCE


def test_groups_of_one_are_plain_replicas():
    assert max(run_ranks(error_of, 2, "zero3:1", decoder)) < TOLERANCE


def looking(booster, model, optimizer, step):
    """Forwards that train nothing, in inference mode and without gradients."""
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            model(local(batch(step))["words"])


def failing(booster, model, optimizer, step):
    """A forward and a backward that raise on every rank, are caught, and are tried again."""
    inner = model.blocks[1].forward
    model.blocks[1].forward = _raise
    with pytest.raises(ValueError, match="on purpose"):
        booster.forward_backward(local(batch(step)))
    model.blocks[1].forward = inner
    handle = model.blocks[2].up.weight.register_hook(_raise)
    with pytest.raises(ValueError, match="on purpose"):
        booster.forward_backward(local(batch(step)))
    handle.remove()
    optimizer.zero_grad()


def _raise(*args):
    raise ValueError("on purpose")


def tensor_lr(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))


def corners(plan):
    partition.STREAMED_ELEMENTS = 1
    return {
        "inference mode": error_of(plan, decoder, looking),
        "errors that are caught": error_of(plan, decoder, failing),
        "lr in a tensor": error_of(plan, decoder, make_optimizer=tensor_lr),
        "one layer": bare_layer(plan),
    }


def bare_layer(plan):
    """A model that is one layer and nothing around it."""
    torch.manual_seed(0)
    reference, model = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    model.load_state_dict(reference.state_dict())
    x = torch.randn(8, 5, dtype=torch.float64)
    plain = sgd(reference)
    booster, model, _ = boost(plan, model, sgd(model), lambda y, rows: (y.pow(2).sum(), y.numel()))
    start, stop = split_range(8, booster.world.size, booster.world.rank)
    for _ in range(3):
        reference(x).pow(2).mean().backward()
        plain.step()
        plain.zero_grad()
        booster.step(x[start:stop])
    return worst(booster.full_state_dict(), weights(reference))


@pytest.mark.parametrize("plan", STAGES)
def test_corners(plan):
    for errors in run_ranks(corners, 2, plan):
        assert errors.pop("lr in a tensor") < 1e-6
        assert max(errors.values()) < TOLERANCE, errors


def checkpointed_by_transformers(plan):
    """Whether the models' own recompute changes nothing, bit for bit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    partition.STREAMED_ELEMENTS = 1
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    outcome = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=37, max_position_embeddings=64, **sizes))
        if recomputes:
            model.gradient_checkpointing_enable()
        booster = px.Booster(plan)
        model, *_ = booster.boost(model, sgd(model))
        rows = [{"input_ids": local(batch(step))["words"], "labels": local(batch(step))["labels"]} for step in range(3)]
        outcome.append(([booster.step(part).loss for part in rows], booster.full_state_dict()))
    (losses, full), (same_losses, same) = outcome
    return losses == same_losses and all(torch.equal(full[name], same[name]) for name in full)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_recompute_of_transformers(plan):
    assert run_ranks(checkpointed_by_transformers, 2, plan) == [True] * 2


def uneven(plan, first_uneven_step, quietly):
    """The last rank calls backward once less than the others in one step: the error, how long it took, and how wrong the gradient is."""
    reference, model = decoder(), decoder()
    booster, model, optimizer = boost(plan, model, sgd(model))
    start, error = time.monotonic(), 0.0
    last = booster.world.rank == booster.world.size - 1
    try:
        for step in range(first_uneven_step + 1):
            calls = 3 - (last and step == first_uneven_step)
            for call in range(calls):
                rows = local(batch(call))
                loss, count = criterion(model(rows["words"]), rows)
                if quietly:
                    with booster.no_sync():
                        booster.backward(loss / count, optimizer, count=count)
                else:
                    booster.backward(loss / count, optimizer, count=count)
            if quietly:
                error = worst(booster.gradients(), _uneven_gradient(reference, booster.world.size))
            optimizer.step()
    except CommError as failure:
        return str(failure), time.monotonic() - start
    return error, time.monotonic() - start


def _uneven_gradient(reference, size):
    rows = [batch(call) for call in range(2)]
    start, _ = split_range(8, size, size - 1)
    rows.append({name: value[:start] for name, value in batch(2).items()})
    return plain_step(reference, sgd(reference, lr=0.0), rows)[1]


@pytest.mark.parametrize(("plan", "first_uneven_step"), [("zero0", 0), ("zero1", 1), ("zero2", 0), ("zero2", 1)])
def test_a_rank_that_calls_backward_less_often_is_one_clear_error(plan, first_uneven_step):
    start = time.monotonic()
    try:
        outcomes = run_ranks(uneven, 2, plan, first_uneven_step, False)
    except RankError as failure:
        outcomes = [(str(failure), 0.0)]
    assert time.monotonic() - start < patience(30)
    for message, seconds in outcomes:
        # Told by the question that was not answered, or by the waits that cross: whichever is seen first.
        assert ("part 3" in message and "no_sync" in message) or "wait for each other" in message
        assert seconds < patience(20)


@pytest.mark.parametrize("plan", ["zero0", "zero1"])
def test_a_rank_that_calls_backward_less_often_without_reduction_is_exact(plan):
    assert max(error for error, _ in run_ranks(uneven, 3, plan, 0, True)) < TOLERANCE


class ReadsLater(nn.Module):
    """From its third step on the parent reads a block's weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.step = decoder(layers=2), 0

    def forward(self, words):
        logits = self.inner(words)
        return logits + 0.01 * self.inner.blocks[0].up.weight.sum() if self.step >= 2 else logits


def reading_later(plan):
    """Which of six steps are skipped, and the error of the weights against a plain loop that leaves those out."""
    partition.STREAMED_ELEMENTS = 1
    reference, model = ReadsLater(), ReadsLater()
    plain = sgd(reference)
    booster, model, _ = boost(plan, model, sgd(model))
    skipped = []
    for step in range(6):
        reference.step = model.step = step
        skipped.append(booster.step(local(batch(step))).skipped)
        if not skipped[-1]:
            plain_step(reference, plain, [batch(step)])
    return skipped, worst(booster.full_state_dict(), weights(reference))


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_a_parameter_that_is_read_elsewhere_only_later(plan):
    for skipped, error in run_ranks(reading_later, 2, plan):
        assert skipped == [False, False, plan == "zero3", False, False, False]  # found by what it does to one loss, never applied
        assert error < TOLERANCE


def boosted_twice():
    model = decoder()
    booster, model, _ = boost("zero0", model, sgd(model))
    with pytest.raises(ConfigError, match="boosted already"):
        booster.boost(model, sgd(model))


def test_a_model_is_boosted_once():
    run_ranks(boosted_twice, 1)


def boosted_by_another():
    model = decoder()
    boost("zero0", model, sgd(model))
    with pytest.raises(ConfigError, match="boosted already"):
        boost("zero1", model, sgd(model))


def test_a_model_belongs_to_one_booster():
    run_ranks(boosted_by_another, 2)


def edited_in_place(plan):
    """Whether an edit of the model's own tensors lasts over a step with lr 0, or the error that says it would not."""
    model = decoder().float()
    booster, model, _ = boost(plan, model, sgd(model, lr=0.0))
    booster.step(local(batch(0)))
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    kept = model.head.weight.detach().clone()
    try:
        booster.step(local(batch(1)))
    except ConfigError as error:
        return str(error)
    return torch.equal(kept, model.head.weight)


@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero0+bf16", "zero2+bf16"])
def test_an_edit_in_place_lasts_or_is_refused(plan):
    for outcome in run_ranks(edited_in_place, 2, plan):
        assert ("'head.weight' was changed in place" in outcome) if "bf16" in plan else outcome is True


class Pair:
    def __init__(self, value):
        self.value = value


class Wrapping(nn.Module):
    """A block that hands on a plain object, in which no tensor can be found."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([_WrappingBlock() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).value
        return x


class _WrappingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return Pair(self.linear(x))


def wrapped(plan):
    model = Wrapping()
    booster, _, _ = boost(plan, model, sgd(model), criterion=lambda output, batch: (output.sum(), batch.numel()))
    try:
        booster.step(torch.ones(2, 5))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_block_that_hides_its_tensors_is_refused_by_name():
    assert all("'blocks.0' returns a Pair" in told for told in run_ranks(wrapped, 2, "zero3"))
    assert run_ranks(wrapped, 2, "zero2") == ["", ""]


class OwnMaskedMean(nn.Module):
    """Computes its loss by a mean over a mask, which is 0 / 0 where nothing counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x, labels):
        logits = self.linear(x)
        kept = labels != -100
        losses = nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return {"loss": (losses * kept).sum() / kept.sum(), "logits": logits}


def nothing_on_one_rank(plan):
    torch.manual_seed(0)
    model, reference = OwnMaskedMean(), OwnMaskedMean()
    reference.load_state_dict(model.state_dict())
    whole = {"x": torch.randn(4, 5), "labels": torch.tensor([1, 2, -100, -100])}
    reference(**whole)["loss"].backward()
    booster, model, _ = boost(plan, model, sgd(model), criterion=None, count=lambda batch: (batch["labels"] != -100).sum())
    start = 2 * booster.world.rank
    result = booster.forward_backward({name: value[start : start + 2] for name, value in whole.items()})
    return result.tokens, worst(booster.gradients(), {name: p.grad for name, p in reference.named_parameters()})


def test_a_models_own_mean_over_nothing_on_one_rank():
    for tokens, error in run_ranks(nothing_on_one_rank, 2, "zero1"):
        assert tokens == 2
        assert error < 1e-6
