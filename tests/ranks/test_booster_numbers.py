"""Norms and clipping, gradients that are not finite, the loss scale, and what accumulates in which dtype."""

import copy
import itertools
import math

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, batch, boost, criterion, decoder, local, replicas_differ, sgd, weights, worst
from torch import nn

import phalanx as px
from phalanx.booster import training as training_module
from phalanx.optim.norm import local_power
from phalanx.precision import DTypes, Precision
from phalanx.testing import run_ranks

# -- norm and clip -----------------------------------------------------------------------------------------------------


def shrunk(size):
    return lambda logits, rows: tuple(value * factor for value, factor in zip(criterion(logits, rows), (size, 1)))


def norms(plan):
    """Worst error of the norm, and of the weights after a clipped step, per kind of norm and size of the gradient."""
    errors = {}
    for kind in (2.0, 1.0, math.inf):
        for size in (1.0, 1e-7):
            reference, model = decoder(tied=True), decoder(tied=True)
            loss, count = shrunk(size)(reference(batch()["words"]), batch())
            (loss / count).backward()
            norm = nn.utils.get_total_norm([p.grad for p in reference.parameters()], kind).item()
            limit = norm / 2
            nn.utils.clip_grad_norm_(reference.parameters(), limit, kind)
            clipped = [p.grad.clone() for p in reference.parameters()]
            sgd(reference, lr=0.1 / size).step()
            booster, model, optimizer = boost(plan, model, sgd(model, lr=0.1 / size), shrunk(size), clip_norm=limit, norm_type=kind)
            unclipped = booster.forward_backward(local(batch())) and booster.gradients()
            result = optimizer.step()
            assert type(result.grad_norm) is float
            ratio = max(gradient.abs().max() for gradient in clipped) / max(gradient.abs().max() for gradient in unclipped.values())
            full = booster.full_state_dict()
            assert not replicas_differ(full)
            # The last: what gradients() returned was not clipped, and the factor is what was applied.
            parts = abs(result.grad_norm / norm - 1), worst(full, weights(reference)), abs(result.clip_factor / ratio.item() - 1)
            errors[kind, size] = max(parts)
    return errors


PLANS = [("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero3:2", 4), ("zero1+acc2", 2), ("zero0", 1)]


@pytest.mark.parametrize(("plan", "world"), PLANS)
def test_norm_and_clip(plan, world):
    results = run_ranks(norms, world, plan)
    for errors in results:
        assert max(errors.values()) < TOLERANCE, errors


def norms_of_every_rank_counted(plan):
    training_module.local_power = lambda parts, kind, device: local_power(parts, kind, device) * 2
    return norms(plan)


def test_a_norm_that_counts_twice_is_found():
    errors = run_ranks(norms_of_every_rank_counted, 2, "zero0")[0]
    assert min(errors.values()) > 0.4


# -- not finite --------------------------------------------------------------------------------------------------------


class Spoiled(nn.Module):
    """A model that adds `value` to one element of one weight's gradient."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.value = inner, 0.0
        inner.blocks[0].up.weight.register_hook(self._spoil)

    def _spoil(self, gradient):
        gradient = gradient.clone()
        gradient[0, 0] += self.value
        return gradient

    def forward(self, words):
        return self.inner(words)


def spoiled(plan, value, norm_type):
    """Four steps, the second with a bad gradient on the last rank only: what every step said, and what it changed."""
    dtype = torch.float32
    model = Spoiled(decoder(dtype=dtype, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    booster = px.Booster(plan, norm_type=norm_type)
    model, optimizer, *_ = booster.boost(model, optimizer, criterion, None, schedule)
    told = []
    for step in range(4):
        model.value = value if step == 1 and booster.world.rank == booster.world.size - 1 else 0.0
        before = booster.full_state_dict()
        state = copy.deepcopy({index: dict(entry) for index, entry in enumerate(optimizer.state.values())})
        result = booster.step(local(batch(step)))
        after = booster.full_state_dict()
        same = all(torch.equal(before[name], after[name]) for name in before)
        entries = enumerate(optimizer.state.values())
        kept = bool(state) and all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[i][k])) for i, e in entries for k, v in e.items())
        assert not replicas_differ(after)
        told.append((result.skipped, same, kept, result.skipped_total, optimizer.param_groups[0]["lr"], booster.trainings[0].scale.value))
    return told


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_bad_gradient_on_one_rank_skips_the_step_everywhere(stage, precision):
    for value, norm_type in ((math.inf, 2.0), (math.nan, math.inf)):
        for told in run_ranks(spoiled, 2, f"{stage}+{precision}", value, norm_type):
            skipped, same, kept, total, lrs, scales = zip(*told)
            assert skipped == (False, True, False, False)
            assert same == (False, True, False, False)
            assert kept == (False, True, False, False)
            assert total == (0, 1, 1, 1)
            assert lrs == pytest.approx((1e-2 / 2, 1e-2 / 2, 1e-2 / 3, 1e-2 / 4))
            assert [scale / scales[0] for scale in scales] == ([1.0, 0.5, 0.5, 0.5] if precision == "fp16" else [1.0] * 4)


def one_shard_spoiled(plan):
    """A gradient that is not a number in one small parameter, whose elements few ranks hold, under the infinity norm."""
    model = decoder()
    booster, model, _ = boost(plan, model, sgd(model), norm_type=math.inf)
    model.norm.bias.register_hook(lambda gradient: gradient * math.nan)
    result = booster.step(local(batch()))
    return result.skipped, all(tensor.isfinite().all() for tensor in booster.full_state_dict().values())


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3"])
def test_a_maximum_over_ranks_keeps_what_is_not_a_number(plan):
    assert run_ranks(one_shard_spoiled, 3, plan) == [(True, True)] * 3


class Scaler:
    """A plugin that chooses the loss scale's settings."""

    def __init__(self, plan, **scaler):
        self.plan, self.scaler, self.clip_norm = px.Plan.parse(plan), scaler, None


def scales(stage):
    """The scale after each of six steps with an overflow in the third, and the loss of each."""
    model = Spoiled(decoder(dtype=torch.float32, layers=2))
    booster = px.Booster(plugin=Scaler(f"{stage}+fp16", initial_scale=2.0**16, growth_interval=2, growth_factor=4.0))
    model, _optimizer, *_ = booster.boost(model, sgd(model, lr=1e-3), criterion)
    seen = []
    for step in range(6):
        model.value = math.inf if step == 2 and booster.world.rank == 0 else 0.0
        result = booster.step(local(batch(step)))
        seen.append((booster.trainings[0].scale.value, result.loss, result.grad_norm if step != 2 else None))
    return seen


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_the_loss_scale_is_one_number_and_grows(stage):
    first, *others = run_ranks(scales, 3, stage)
    assert all(other == first for other in others)
    values = [value for value, _, _ in first]
    assert [later / earlier for earlier, later in itertools.pairwise(values)] == [4.0, 0.5, 1.0, 4.0, 1.0]
    norms = [norm for _, _, norm in first if norm is not None]
    assert max(norms) < 3 * min(norms)  # the norm is that of the unscaled gradients


# -- accumulation ------------------------------------------------------------------------------------------------------


def float_logits(logits, rows):
    return criterion(logits.float(), rows)


def accumulated(plan):
    """The error of a gradient summed over 64 passes in bfloat16, against a float32 sum of the same bfloat16 gradients."""
    model = decoder(dtype=torch.float32, layers=2)
    booster, model, _optimizer = boost(plan, model, sgd(model), float_logits)
    reference = decoder(dtype=torch.float32, layers=2).bfloat16()
    world = booster.world
    sums, count = {}, 0
    for number in range(64):
        rows = batch(number, rows=world.size)
        for rank in range(world.size):
            part = {key: value[rank : rank + 1] for key, value in rows.items()}
            loss, labels = float_logits(reference(part["words"]), part)
            loss.backward()
            count += labels
            for name, parameter in reference.named_parameters():
                sums[name] = sums.get(name, 0) + parameter.grad.float()
                parameter.grad = None
        booster.forward_backward(local(rows))
    gradients = booster.gradients()
    dtypes = {chunk.dtypes for chunk in booster.trainings[0].engine.chunks}
    errors = [((gradients[name] - total / count).norm() / (total / count).norm()).item() for name, total in sums.items()]
    return max(errors), {(kind.compute, kind.master, kind.gradient, kind.reduce) for kind in dtypes}


@pytest.mark.parametrize("plan", ["zero0+bf16", "zero1+bf16", "zero2+bf16", "zero3+bf16"])
def test_sixty_four_passes_in_bfloat16(plan):
    for error, dtypes in run_ranks(accumulated, 2, plan):
        assert error < 1e-3
        assert dtypes == {(torch.bfloat16, torch.float32, torch.float32, torch.float32)}  # compute, master, gradient, reduce


def accumulated_in_bfloat16(plan):
    Precision.for_parameter = lambda self, dtype: DTypes(
        compute=torch.bfloat16, master=torch.float32, gradient=torch.bfloat16, reduce=torch.bfloat16
    )
    return accumulated(plan)


def test_accumulation_in_bfloat16_is_found():
    assert max(error for error, _ in run_ranks(accumulated_in_bfloat16, 2, "zero0+bf16")) > 1e-3
