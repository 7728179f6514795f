"""Several backwards before one step, in every form a loop can be written in, give the gradient of all their rows."""

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, batch, boost, criterion, decoder, local, plain_step, replicas_differ, sgd, weights, worst
from torch.nn import functional as F

from phalanx.errors import ConfigError
from phalanx.memory.reduction import GradientReducer
from phalanx.testing import run_ranks


def through_booster(booster, model, optimizer, batches):
    for full in batches:
        booster.forward_backward(local(full))


def without_reduction_until_the_last(booster, model, optimizer, batches):
    *first, last = batches
    with booster.no_sync():
        for full in first:
            booster.forward_backward(local(full))
    booster.forward_backward(local(last))


def reduction_in_the_middle(booster, model, optimizer, batches):
    first, second, third = batches
    with booster.no_sync():
        booster.forward_backward(local(first))
    booster.forward_backward(local(second))
    with booster.no_sync():
        booster.forward_backward(local(third))


def never_asked_to_reduce(booster, model, optimizer, batches):
    with booster.no_sync():
        through_booster(booster, model, optimizer, batches)


def hand_written(booster, model, optimizer, batches):
    """Means over ragged counts, weighted by their count."""
    for number, full in enumerate(batches):
        rows = local(full)
        loss, count = criterion(model(rows["words"]), rows)
        if number == 1:
            with booster.no_sync():
                booster.backward(loss / count, optimizer, count=count)
        else:
            booster.backward(loss / count, optimizer, count=count.item())


LOOPS = (through_booster, without_reduction_until_the_last, reduction_in_the_middle, never_asked_to_reduce, hand_written)


def windows_match(plan):
    """Worst error of losses, gradients, norm and weights over two steps of three batches each, per form of the loop."""
    errors = {}
    for loop in LOOPS:
        reference, model = decoder(), decoder()
        plain, boosted = sgd(reference), sgd(model)
        booster, model, boosted = boost(plan, model, boosted)
        error = 0.0
        for step in range(2):
            batches = [batch(3 * step + number, rows=5 + number) for number in range(3)]
            loss, expected = plain_step(reference, plain, batches)
            loop(booster, model, boosted, batches)
            error = max(error, worst(booster.gradients(), expected))
            result = boosted.step()
            norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
            error = max(error, abs(result.loss / loss - 1), abs(result.grad_norm / norm - 1))
            boosted.zero_grad()
        full = booster.full_state_dict()
        errors[loop.__name__] = max(error, worst(full, weights(reference)))
        assert not replicas_differ(full)
    return errors


@pytest.mark.parametrize(
    ("plan", "world"), [("zero0", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("zero3:2", 4), ("zero1+acc2", 2), ("zero3", 1)]
)
def test_windows_of_three_batches(plan, world):
    for errors in run_ranks(windows_match, world, plan):
        assert max(errors.values()) < TOLERANCE, errors


def windows_match_without_reopening(plan):
    GradientReducer.begin = _begin_without_reopening
    return windows_match(plan)


_begin = GradientReducer.begin


def _begin_without_reopening(self, synchronise, **options):
    for chunk in self.chunks:
        chunk.is_reduced = False
    _begin(self, synchronise, **options)


def test_sums_that_are_reduced_twice_are_found():
    errors = run_ranks(windows_match_without_reopening, 2, "zero0")[0]
    assert errors["through_booster"] > 1e-3
    assert errors["without_reduction_until_the_last"] < TOLERANCE


def equal_weight_calls(plan):
    """Backwards without a count weigh the same, whatever the number of rows behind them; a scaled loss mixes with counted ones."""
    reference, model = decoder(), decoder()
    plain, boosted = sgd(reference), sgd(model)
    booster, model, boosted = boost(plan, model, boosted)
    world = booster.world
    batches = [[batch(10 * rank + number, rows=2 + rank + number) for number in range(2)] for rank in range(world.size)]
    mean = lambda model, rows: F.cross_entropy(model(rows["words"]).flatten(0, 1), rows["labels"].flatten())  # noqa: E731
    calls = [mean(reference, rows) for rank in batches for rows in rank]
    (sum(calls) / len(calls)).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for rows in batches[world.rank]:
        booster.backward(mean(model, rows), boosted)
    error = worst(booster.gradients(), expected)
    result = boosted.step()
    plain.step()
    return max(error, abs(result.loss - (sum(calls) / len(calls)).item()), worst(booster.full_state_dict(), weights(reference)))


@pytest.mark.parametrize("plan", STAGES)
def test_calls_without_a_count_weigh_the_same(plan):
    assert max(run_ranks(equal_weight_calls, 2, plan)) < TOLERANCE


def several_forwards(plan):
    """Two forwards, then one backward of both, or two backwards in either order; and gradients that are thrown away."""
    errors = {}
    for order in ("together", "in order", "reversed", "after a discarded one"):
        reference, model = decoder(), decoder()
        plain, boosted = sgd(reference), sgd(model)
        booster, model, boosted = boost(plan, model, boosted)
        batches = [batch(1, rows=4), batch(2, rows=5)]
        _, expected = plain_step(reference, plain, batches)
        if order == "after a discarded one":
            booster.forward_backward(local(batch(9)))
            with booster.no_sync():
                booster.forward_backward(local(batch(8)))
            boosted.zero_grad()
        totals = [criterion(model(rows["words"]), rows) for rows in map(local, batches)]
        if order == "together":
            loss, count = (sum(parts) for parts in zip(*totals))
            booster.backward(loss / count, boosted, count=count)
        else:
            for loss, count in reversed(totals) if order == "reversed" else totals:
                booster.backward(loss / count, boosted, count=count)
        errors[order] = worst(booster.gradients(), expected)
        boosted.step()
        errors[order] = max(errors[order], worst(booster.full_state_dict(), weights(reference)))
    return errors


@pytest.mark.parametrize("plan", STAGES)
def test_two_forwards_before_the_backward(plan):
    for errors in run_ranks(several_forwards, 2, plan):
        assert max(errors.values()) < TOLERANCE, errors


def late_backward(plan):
    booster, *_ = boost(plan, *_model_and_sgd())
    booster.forward_backward(local(batch()))
    booster.gradients()
    try:
        booster.forward_backward(local(batch()))
    except ConfigError as error:
        return str(error)


def _model_and_sgd():
    model = decoder()
    return model, sgd(model)


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_backward_after_gradients_were_read_is_refused(plan):
    assert all("after the last backward" in message for message in run_ranks(late_backward, 2, plan))


def unboosted_backward(plan):
    _, model, optimizer = boost(plan, *_model_and_sgd())
    rows = local(batch())
    loss, _ = criterion(model(rows["words"]), rows)
    try:
        loss.backward()
        optimizer.step()
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("plan", "world"), [(plan, 2) for plan in STAGES] + [("zero0", 1), ("zero0+bf16", 1)])
def test_a_backward_outside_of_the_booster_is_refused(plan, world):
    assert all("booster.backward(loss, optimizer)" in message for message in run_ranks(unboosted_backward, world, plan))


def without_a_backward(plan):
    """What a step, or a look at gradients, before any backward tells; and that a step after a backward then goes through."""
    booster, _, optimizer = boost(plan, *_model_and_sgd())
    told = []
    for call in (optimizer.step, booster.gradients):
        with pytest.raises(ConfigError) as caught:
            call()
        told.append(str(caught.value))
    booster.forward_backward(local(batch()))
    optimizer.zero_grad()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    result = booster.step(local(batch()))
    return [*told, str(caught.value)], result.skipped, result.skipped_total


@pytest.mark.parametrize(("plan", "world"), [("zero0", 1), ("zero0", 2), ("zero2+bf16", 2), ("zero3", 2), ("fsdp", 2)])
def test_a_step_before_any_backward_is_refused_and_no_skipped_step(plan, world):
    for told, skipped, skipped_total in run_ranks(without_a_backward, world, plan):
        assert all("no rank ran a backward since the last step" in message for message in told)
        assert (skipped, skipped_total) == (False, 0)


def on_the_last_rank_alone(plan):
    """The error of the gradients where only one rank has a batch, which the others know nothing of."""
    model, optimizer = _model_and_sgd()
    reference, _ = _model_and_sgd()
    booster, model, optimizer = boost(plan, model, optimizer)
    _, expected = plain_step(reference, sgd(reference), [batch()])
    if booster.world.rank == booster.world.size - 1:
        with booster.no_sync():
            loss, count = criterion(model(batch()["words"]), batch())
            booster.backward(loss / count, optimizer, count=count)
    return worst(booster.gradients(), expected), optimizer.step().skipped


def test_a_rank_may_have_no_backward_where_another_has():
    for error, skipped in run_ranks(on_the_last_rank_alone, 2, "zero0"):
        assert error < TOLERANCE
        assert not skipped
