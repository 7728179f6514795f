"""Batches and losses in every form the face allows, rows that are missing, labels that are missing, and several models."""

import pytest
import torch
from booster_programs import STAGES, TOLERANCE, WIDTH, WORDS, batch, boost, criterion, decoder, local, plain_step, sgd, weights, worst
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.data import take_rows
from phalanx.errors import ConfigError
from phalanx.testing import run_ranks

# -- forms of batches and losses ---------------------------------------------------------------------------------------


def mean_criterion(logits, rows):
    return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten())


class OwnLoss(nn.Module):
    """A user's model that computes its own loss: a plain mean over labels that are not -100."""

    def __init__(self):
        super().__init__()
        self.inner = decoder()

    def forward(self, words, labels):
        return {"loss": F.cross_entropy(self.inner(words).flatten(0, 1), labels.flatten())}


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x, shift=0.0):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + shift
        return x


def as_tuple(rows):
    return rows["words"], rows["labels"]


def tuple_criterion(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def own(kind):
    torch.manual_seed(0)
    return kind().double()


def vectors(rows=8):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def forms():
    """name -> (model, batch, booster's options, criterion, plain loss over the whole batch)."""
    tokens, x = batch(), vectors()
    plain = lambda model: mean_criterion(model(tokens["words"]), tokens)  # noqa: E731
    counted = {"count": lambda rows: (rows["labels"] >= 0).sum()}
    squares = lambda model: (model(x) ** 2).mean()  # noqa: E731
    return {
        "mapping, sum and count": (decoder, tokens, {}, criterion, plain),
        "mapping, mean": (decoder, tokens, {}, mean_criterion, plain),
        "tuple, mean": (decoder, as_tuple(tokens), {}, tuple_criterion, plain),
        "own loss, count given": (lambda: own(OwnLoss), tokens, counted, None, lambda model: model(**tokens)["loss"]),
        "forward given": (
            decoder,
            {"text": tokens["words"], "labels": tokens["labels"]},
            {"forward": lambda model, rows: model(rows["text"])},
            mean_criterion,
            plain,
        ),
        "forward gives the loss": (
            decoder,
            tokens,
            {"forward": lambda model, rows: mean_criterion(model(rows["words"]), rows), **counted},
            None,
            plain,
        ),
        "a tensor": (lambda: own(Regression), x, {}, lambda y, rows: (y**2).mean(), squares),
        "a tensor and its target": (
            lambda: own(Regression),
            (x, x.roll(1, 0)),
            {},
            F.mse_loss,
            lambda model: F.mse_loss(model(x), x.roll(1, 0)),
        ),
        "not per row": (
            lambda: own(Regression),
            {"x": x, "shift": torch.tensor(0.5, dtype=torch.float64)},
            {},
            lambda y, rows: (y**2).mean(),
            lambda model: (model(x, 0.5) ** 2).mean(),
        ),
        "split given": (
            lambda: own(Regression),
            {"x": x, "shift": torch.full((8, 1), 0.5, dtype=torch.float64)},
            {"split": lambda rows, start, stop: {key: value[start:stop] for key, value in rows.items()}},
            lambda y, rows: (y**2).mean(),
            lambda model: (model(x, 0.5) ** 2).mean(),
        ),
    }


def rows_of_this_rank(full):
    world = px.cluster.launch.world()
    return take_rows(full, *px.layout.split_range(8, world.size, world.rank), 8)


def forms_match(plan):
    errors = {}
    for name, (make, full, options, loss_function, plain) in forms().items():
        reference, model = make(), make()
        loss = plain(reference)
        loss.backward()
        expected = {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
        sgd(reference).step()
        booster, model, optimizer = boost(plan, model, sgd(model), loss_function, **options)
        booster.forward_backward(rows_of_this_rank(full))
        error = worst(booster.gradients(), expected)
        result = optimizer.step()
        evaluated = booster.evaluate(rows_of_this_rank(full))
        error = max(error, abs(result.loss / loss.item() - 1), worst(booster.full_state_dict(), weights(reference)))
        errors[name] = max(error, abs(evaluated.loss / plain(reference).item() - 1)) + (evaluated.tokens != result.tokens)
    return errors


@pytest.mark.parametrize(
    ("plan", "world"), [("zero0", 1), ("zero1+acc3", 1), ("zero0+acc2", 2), ("zero2", 3), ("zero3", 3), ("zero3:2+acc3", 4)]
)
def test_forms_of_batches_and_losses(plan, world):
    for errors in run_ranks(forms_match, world, plan):
        assert max(errors.values()) < TOLERANCE, errors


def refused_losses(plan):
    messages = []
    for bad in (
        lambda logits, rows: F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="none"),
        lambda logits, rows: 3.0,
    ):
        model = decoder(layers=1)
        booster, *_ = boost(plan, model, sgd(model), bad)
        with pytest.raises(ConfigError) as caught:
            booster.step(local(batch()))
        messages.append(str(caught.value))
    model = decoder(layers=1)
    booster, *_ = boost(plan, model, sgd(model), None)
    with pytest.raises(ConfigError) as caught:
        booster.step(local({"words": batch()["words"]}))
    return [*messages, str(caught.value)]


def test_losses_that_are_none_are_refused():
    for shape, kind, nothing in run_ranks(refused_losses, 1, "zero0"):
        assert "(96,)" in shape
        assert "float" in kind
        assert "no loss" in nothing or "not known" in nothing


# -- missing rows and labels -------------------------------------------------------------------------------------------


def without_labels(full, rows):
    """The batch with all labels of some rows at -100."""
    labels = full["labels"].clone()
    labels[rows] = -100
    return {**full, "labels": labels}


def masked_mean(logits, rows):
    """A mean as people write it by hand: over nothing it is 0 / 0, and so is its gradient."""
    labels = rows["labels"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    mask = (labels >= 0).flatten().to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def gaps(plan):
    """Rows without labels on some ranks and in some passes, fewer rows than ranks, and then a batch without any label."""
    errors = {}
    cases = {
        "the last rows": without_labels(batch(), slice(4, 8)),
        "all but one": without_labels(batch(), slice(0, 7)),
        "two rows": {key: value[:2] for key, value in batch().items()},
        "one row": {key: value[:1] for key, value in batch().items()},
    }
    models = {
        "sum": (decoder, criterion),
        "mean": (decoder, mean_criterion),
        "masked mean": (decoder, masked_mean),
        "own loss": (lambda: own(OwnLoss), None),
    }
    for kind, (make, loss_function) in models.items():
        reference, model = make(), make()
        plain, optimizer = sgd(reference), sgd(model)
        booster, model, optimizer = boost(plan, model, optimizer, loss_function, count=None if loss_function else _count)
        inner = (lambda net: net.inner) if loss_function is None else (lambda net: net)
        for case, full in {"whole": batch(), **cases}.items():
            loss, expected = plain_step_of(reference, inner(reference), plain, full)
            booster.forward_backward(local(full))
            error = worst(booster.gradients(), expected)
            result = optimizer.step()
            errors[kind, case] = max(error, abs(result.loss / loss - 1)) + result.skipped
        before = booster.full_state_dict()
        empty = optimizer_step_on_nothing(booster, without_labels(batch(), slice(0, 8)))
        after = booster.full_state_dict()
        assert empty.skipped
        assert empty.tokens == 0
        assert all(torch.equal(before[name], after[name]) for name in before)
        errors[kind, "weights"] = worst(after, weights(reference))
    return errors


def _count(rows):
    return (rows["labels"] >= 0).sum()


def optimizer_step_on_nothing(booster, full):
    return booster.step(local(full))


def plain_step_of(whole, inner, optimizer, full):
    loss = mean_criterion(inner(full["words"]), full)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in whole.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


@pytest.mark.parametrize(("plan", "world"), [("zero0", 3), ("zero1+acc3", 1), ("zero2+acc2", 2), ("zero3", 3), ("zero3:2+acc2", 4)])
def test_rows_and_labels_that_are_missing(plan, world):
    for errors in run_ranks(gaps, world, plan):
        assert max(errors.values()) < TOLERANCE, errors


# -- several models ----------------------------------------------------------------------------------------------------


def two_models(plan):
    """A trained model beside a frozen one that judges it, and a second trained model; gradients of one pass through the other."""
    reference, judge, other = decoder(0), decoder(1).requires_grad_(False), decoder(2)
    boosted_model, boosted_judge, boosted_other = decoder(0), decoder(1).requires_grad_(False), decoder(2)
    plain, plain_other = sgd(reference), sgd(other)
    booster = px.Booster(plan)
    boosted_model, optimizer, *_ = booster.boost(boosted_model, sgd(boosted_model), criterion)
    boosted_judge, *_ = booster.boost(boosted_judge)
    boosted_other, *_ = booster.boost(boosted_other, sgd(boosted_other), criterion)
    with pytest.raises(ConfigError, match="2 models are trained"):
        booster.step(local(batch()))
    for step in range(3):
        for full, model, referee, forward in (
            (batch(step), reference, judge, None),
            (local(batch(step)), boosted_model, boosted_judge, booster),
        ):
            with torch.no_grad():
                target = referee(full["words"]).softmax(-1)
            logits = model(full["words"])
            through = referee.norm(logits @ _mixing())
            mask = full["labels"] >= 0
            distance = F.cross_entropy(logits[mask], target[mask], reduction="sum") + through[mask].pow(2).sum()
            if forward is None:
                (distance / mask.sum()).backward()
                plain.step()
                plain.zero_grad()
            else:
                booster.backward(distance / mask.sum(), optimizer, count=mask.sum())
                optimizer.step()
        plain_step(other, plain_other, [batch(step + 5)])
        booster.step(local(batch(step + 5)), boosted_other)
    pairs = ((boosted_model, reference), (boosted_judge, judge), (boosted_other, other))
    return max(worst(booster.full_state_dict(model), weights(plain_model)) for model, plain_model in pairs)


def _mixing():
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("plan", STAGES)
def test_several_models_under_one_booster(plan):
    assert max(run_ranks(two_models, 2, plan)) < TOLERANCE


def rewarded(plan):
    """The loss flows through a whole frozen model that was boosted too."""
    torch.manual_seed(5)
    reference, reward = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double() for _ in range(2))
    torch.manual_seed(5)
    model, judge = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double() for _ in range(2))
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    reward.requires_grad_(False)
    judge.requires_grad_(False)
    plain = sgd(reference)
    booster = px.Booster(plan)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    judge, *_ = booster.boost(judge)
    for _ in range(3):
        reward(reference(x)).pow(2).sum(1).mean().backward()
        plain.step()
        plain.zero_grad()
        mine = rows_of(x, booster.world)
        booster.backward(judge(model(mine)).pow(2).sum(1).mean(), optimizer, count=len(mine))
        optimizer.step()
    gathered = [
        chunk.name for training in booster.trainings for chunk in training.engine.chunks if chunk.policy.parameter and chunk.is_gathered
    ]
    return (
        worst(booster.full_state_dict(), weights(reference)),
        gathered,
        len(getattr(booster.trainings[1].engine.stream, "backward", _Order()).order),
    )


class _Order:
    order = ()


def rows_of(x, world):
    start, stop = px.layout.split_range(len(x), world.size, world.rank)
    return x[start:stop]


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_a_loss_through_a_frozen_model(plan):
    for error, gathered, order in run_ranks(rewarded, 2, plan):
        assert error < TOLERANCE
        assert not gathered
        assert order <= 3  # units of the frozen model, whatever the number of steps


# -- what belongs to the whole batch -----------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Its output depends on a vector that belongs to the whole batch: a half of it gives another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x, w):
        return self.layer(x)[:, 0] * w.sum()


def whole_vectors_match(plan):
    """Batches of 6, 6, 4 and 6 rows beside one vector of 3, as long as the rows of one rank of two."""
    w = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    batches = [{"x": vectors(rows), "labels": vectors(rows)[:, 0].contiguous(), "w": w} for rows in (6, 6, 4, 6)]
    reference, model = own(Weighted), own(Weighted)
    plain = sgd(reference)
    booster = px.Booster(plan)
    model, _, _, loader, _ = booster.boost(model, sgd(model), lambda y, rows: F.mse_loss(y, rows["labels"]), batches)
    error = 0.0
    for full, rows in zip(batches, loader, strict=True):
        loss = F.mse_loss(reference(full["x"], full["w"]), full["labels"])
        loss.backward()
        plain.step()
        plain.zero_grad()
        evaluated = booster.evaluate(rows)
        error = max(error, abs(booster.step(rows).loss / loss.item() - 1), abs(evaluated.loss / loss.item() - 1))
    return max(error, worst(booster.full_state_dict(), weights(reference)))


@pytest.mark.parametrize(("plan", "world"), [("zero1+acc2", 2), ("zero0+acc3", 2), ("zero3+acc1", 2), ("zero2+acc2", 3)])
def test_passes_leave_whole_what_the_loader_left_whole(plan, world):
    assert max(run_ranks(whole_vectors_match, world, plan)) < TOLERANCE
