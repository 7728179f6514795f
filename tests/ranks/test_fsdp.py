"""PyTorch's fully_shard behind `fsdp`: the numbers of one plain process, checkpoints, and what it refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.booster.plugin import TorchFSDPPlugin
from phalanx.data import take_rows
from phalanx.errors import CommError, ConfigError
from phalanx.testing import RankError, run_ranks

WIDTH, WORDS = 7, 11
CUTS = {2: ([0, 2, 5], [0, 5, 5]), 3: ([0, 2, 4, 5], [0, 4, 5, 5])}  # even, and ragged with a rank that has no rows


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, marked):
        if marked.any():  # some ranks do not use this parameter in some passes
            x = x + marked[:, None, None] * self.shift
        return x + F.gelu(self.linear(self.norm(x)))


class Odd(nn.Module):
    """Tied, frozen, empty, unused and one-element parameters, sizes that no number of ranks divides, a block used twice and one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.LayerNorm(WIDTH)
        self.last.weight = self.blocks[2].norm.weight
        self.blocks[0].linear.bias.requires_grad_(False)
        self.unused, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(0, 5))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, words):
        x = self.embed(words) + (self.offset + self.empty.sum()).to(self.embed.weight.dtype)
        for index in (0, 1, 1, 2):
            x = self.blocks[index](x, words[:, 0] == 1)
        return self.head(self.last(x)) * self.scale


def criterion(logits, batch):
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def batch():
    words = torch.randint(0, WORDS, (5, 6), generator=torch.Generator().manual_seed(1))
    words[:, 0] = torch.tensor([1, 2, 2, 1, 2])
    labels = words.roll(-1, 1)
    for row, length in enumerate([6, 5, 3, 2, 4]):
        labels[row, length:] = -100
    return {"words": words, "labels": labels}


def optimizer_of(model, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)


def train_plain(dtype=torch.float64, steps=3):
    """Per step (loss, norm, gradients), and the final weights, of one process without Phalanx."""
    model, records = Odd().to(dtype), []
    optimizer = optimizer_of(model)
    for _ in range(steps):
        loss, count = criterion(model(batch()["words"]), batch())
        (loss / count).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        records.append(((loss / count).item(), norm, gradients))
        optimizer.step()
        optimizer.zero_grad()
    return records, {name: p.detach() for name, p in model.named_parameters()}


def boosted(plan, dtype=torch.float64, momentum=0.9):
    booster = px.Booster(plan)
    model = Odd().to(dtype)
    model, optimizer, *_ = booster.boost(model, optimizer_of(model, momentum), criterion)
    return booster, model, optimizer


def rows_of(booster, cuts):
    rank = booster.world.rank
    return take_rows(batch(), cuts[rank], cuts[rank + 1], 5)


def train_ranks(plan, cuts, dtype=torch.float64):
    booster, _, optimizer = boosted(plan, dtype)
    records, first = [], take_rows(batch(), 0, 1, 5)
    booster.evaluate(first)  # a row that stands in where a rank has none
    for _ in range(3):
        booster.forward_backward(rows_of(booster, cuts))
        gradients = booster.gradients()
        result = optimizer.step()
        records.append((result.loss, result.grad_norm, gradients))
    return records, booster.full_state_dict()


def worst_error(plain, other):
    """The largest difference relative to the largest magnitude, over losses, norms, gradients and weights."""
    pairs = []
    for (loss, norm, gradients), (loss_2, norm_2, gradients_2) in zip(plain[0], other[0], strict=True):
        assert gradients.keys() == gradients_2.keys()
        pairs += [(torch.tensor(loss), torch.tensor(loss_2)), (torch.tensor(norm), torch.tensor(norm_2))]
        pairs += [(gradients[name], gradients_2[name]) for name in gradients]
    pairs += [(weight, other[1][name]) for name, weight in plain[1].items()]
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-9)).item() for a, b in pairs if a.numel())


@pytest.mark.parametrize(("world", "plan"), [(2, "fsdp"), (2, "fsdp+acc3+recompute"), (3, "fsdp"), (3, "fsdp+acc3")])
def test_numbers_of_one_process(world, plan):
    plain = train_plain()
    for cuts in CUTS[world]:
        for result in run_ranks(train_ranks, world, plan, cuts):
            assert worst_error(plain, result) < 1e-9


def test_a_lost_row_is_noticed():
    assert worst_error(train_plain(), run_ranks(train_ranks, 2, "fsdp", [0, 2, 4])[0]) > 1e-3


def test_one_rank_has_nothing_to_shard():
    assert worst_error(train_plain(), run_ranks(train_ranks, 1, "fsdp+acc3", [0, 5])[0]) < 1e-9


@pytest.mark.parametrize("term", ["bf16", "fp16"])
def test_half_precision_is_that_of_zero3(term):
    ours, pytorchs = (run_ranks(train_ranks, 2, f"{plan}+{term}", [0, 2, 5], torch.float32)[0] for plan in ("zero3", "fsdp"))
    assert all(value.dtype == torch.float32 for value in pytorchs[1].values())
    assert worst_error(ours, pytorchs) < 1e-3
    assert worst_error(train_plain(torch.float32), pytorchs) > 1e-3


def small_criterion(logits, batch):
    loss, count = criterion(logits, batch)
    return loss * 1e-6, count


def clip(kinds):
    """Norm and weights after one clipped step, for each (norm_type, limit); the norm is about as small as the epsilon of clipping."""
    results = []
    for kind, limit in kinds:
        booster = px.Booster("fsdp", clip_norm=limit, norm_type=kind)
        model = Odd().double()
        booster.boost(model, optimizer_of(model), small_criterion)
        norm = booster.step(rows_of(booster, [0, 1, 5])).grad_norm
        results.append((norm, booster.full_state_dict()))
    return results


def test_norm_and_clipping_are_global():
    kinds = [(kind, 1e-6) for kind in (1.0, 2.0, float("inf"))]
    results = run_ranks(clip, 2, kinds)
    for (kind, limit), *ranks in zip(kinds, *results, strict=True):
        model = Odd().double()
        loss, count = small_criterion(model(batch()["words"]), batch())
        (loss / count).backward()
        parameters = [p for p in model.parameters() if p.numel()]
        norm = nn.utils.clip_grad_norm_(parameters, limit, norm_type=kind).item()
        optimizer_of(model).step()
        for found, weights in ranks:
            assert found == pytest.approx(norm, rel=1e-9)
            assert largest_difference(model.state_dict(), weights) < 1e-15
    assert results[0][0][0] > 2 * results[0][1][0]  # the kinds of norm are told apart


def save_and_go_on(plan, path):
    booster, *_ = boosted(plan)
    booster.step(rows_of(booster, [0, 2, 5]))
    booster.save(path)
    booster.step(rows_of(booster, [0, 2, 5]))
    return booster.full_state_dict()


def load_and_go_on(plan, path, cuts):
    booster, *_ = boosted(plan)
    booster.step(rows_of(booster, cuts))  # weights and moments that loading has to replace
    booster.load(path)
    booster.step(rows_of(booster, cuts))
    return booster.full_state_dict()


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one if one[name].numel())


def test_a_loaded_run_goes_on_bit_for_bit_and_under_other_plans(tmp_path):
    path = str(tmp_path / "at")
    whole = run_ranks(save_and_go_on, 2, "fsdp", path)[0]
    resumed = run_ranks(load_and_go_on, 2, "fsdp", path, [0, 2, 5])[1]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert largest_difference(whole, run_ranks(load_and_go_on, 3, "fsdp", path, [0, 1, 2, 5])[2]) < 1e-12
    assert largest_difference(whole, run_ranks(load_and_go_on, 2, "zero3", path, [0, 2, 5])[0]) < 1e-12


def load_weights_alone(path):
    booster, _, optimizer = boosted("fsdp+bf16", torch.float32)
    booster.save_model(path)
    rows = rows_of(booster, [0, 2, 5])
    booster.step(rows)
    trained = booster.full_state_dict()
    booster.load_model(path)
    optimizer.param_groups[0].update(lr=0.0)
    booster.step(rows)
    return trained, booster.full_state_dict()


def test_loaded_weights_stay_through_a_step_that_moves_nothing(tmp_path):
    start = Odd().state_dict()
    for trained, after in run_ranks(load_weights_alone, 2, str(tmp_path / "model")):
        assert not torch.equal(trained["scale"], start["scale"])
        assert all(torch.equal(after[name], value) for name, value in start.items())


def evaluate_between():
    """Losses in evaluation before and after a step, with an evaluation between backward and step."""
    booster, _, optimizer = boosted(TorchFSDPPlugin())
    rows = rows_of(booster, [0, 2, 5])
    booster.forward_backward(rows)
    before = booster.evaluate(rows).loss
    optimizer.step()
    return before, booster.evaluate(rows).loss


def test_evaluation_sees_the_weights_of_the_last_step():
    losses = [loss for loss, _, _ in train_plain(steps=2)[0]]
    assert run_ranks(evaluate_between, 2)[0] == pytest.approx(losses, rel=1e-12)


def hand_written(quiet):
    booster, model, optimizer = boosted("fsdp")
    for row in ([0, 1], [1, 2]) if booster.world.rank == 0 else ([2, 4], [4, 5]):
        part = take_rows(batch(), *row, 5)
        loss, count = criterion(model(part["words"]), part)
        if quiet:
            with booster.no_sync():
                booster.backward(loss / count, optimizer, count)
        else:
            booster.backward(loss / count, optimizer, count)
    optimizer.step()
    return booster.full_state_dict()


@pytest.mark.parametrize("quiet", [False, True])
def test_hand_written_loops_add_up(quiet):
    weights = train_plain(steps=1)[1]
    result = run_ranks(hand_written, 2, quiet)[1]
    assert largest_difference(weights, result) < 1e-12


def read_in_full():
    booster, model, _ = boosted("fsdp")
    with pytest.raises(ConfigError, match="full_state_dict"):
        model.state_dict()
    with booster.gathered(), torch.no_grad():
        for _ in range(booster.world.rank + 1):  # different numbers of passes
            logits = model(batch()["words"])
        shapes = [tuple(p.shape) for p in model.parameters()]
        inside = booster.full_state_dict()
    booster.step(rows_of(booster, [0, 2, 5]))
    return logits, shapes, inside, booster.full_state_dict()


def test_gathered_models_run_alone_and_train_on_after():
    model = Odd().double()
    for logits, shapes, inside, after in run_ranks(read_in_full, 2):
        assert torch.equal(logits, model(batch()["words"]).detach())
        assert shapes == [tuple(p.shape) for p in model.parameters()]
        assert all(torch.equal(inside[name], value) for name, value in model.state_dict().items())
        assert largest_difference(train_plain(steps=1)[1], after) < 1e-12


def unfreeze():
    booster, model, optimizer = boosted("fsdp", momentum=0.0)
    frozen = model.blocks[0].linear.bias
    booster.step(rows_of(booster, [0, 2, 5]))
    before = booster.full_state_dict()
    frozen.requires_grad_(True)
    booster.forward_backward(rows_of(booster, [0, 2, 5]))
    moved = booster.gradients()
    optimizer.step()
    return moved, before, booster.full_state_dict()


def test_a_parameter_unfrozen_later_trains():
    name = "blocks.0.linear.bias"
    gradients, before, after = run_ranks(unfreeze, 2)[1]
    model = Odd().double()
    assert torch.equal(before[name], model.get_parameter(name))
    model.load_state_dict(before)
    model.blocks[0].linear.bias.requires_grad_(True)
    loss, count = criterion(model(batch()["words"]), batch())
    (loss / count).backward()
    for parameter, p in model.named_parameters():
        assert p.grad is None or not p.numel() or (gradients[parameter] - p.grad).abs().max() < 1e-12
    assert not torch.equal(before[name], after[name])


def fail(_):
    raise ZeroDivisionError


def break_and_recover():
    """A forward and a backward that raise half-way leave the model fit for the next step."""
    booster, model, optimizer = boosted("fsdp")
    with pytest.raises(IndexError):
        model(torch.full((1, 6), WORDS))
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        booster.step(rows_of(booster, [0, 2, 5]))
    handle.remove()
    optimizer.zero_grad()
    booster.step(rows_of(booster, [0, 2, 5]))
    weights = booster.full_state_dict()
    with pytest.raises(ConfigError, match=r"booster\.backward"):
        model(batch()["words"]).sum().backward()
    return weights


def test_after_an_error_the_next_step_is_right():
    weights = train_plain(steps=1)[1]
    assert largest_difference(weights, run_ranks(break_and_recover, 2)[0]) < 1e-12


def run_different_modules():
    booster, model, _ = boosted("fsdp")
    if booster.world.rank:
        model.blocks[0] = model.blocks[3]
    booster.step(rows_of(booster, [0, 2, 5]))


def test_ranks_that_run_different_modules_are_told():
    with pytest.raises(RankError) as caught:
        run_ranks(run_different_modules, 2)
    assert isinstance(caught.value.__cause__, CommError)
    assert all(name in str(caught.value) for name in ("'blocks.0'", "'blocks.3'"))


def refusals():
    messages = []
    for change in (_add_scalar, lambda model: model.bfloat16(), lambda model: model.blocks.double()):
        model = Odd()
        change(model)
        with pytest.raises(ConfigError) as caught:
            px.Booster("fsdp").boost(model)
        messages.append(str(caught.value))
    with px.lazy():
        model = Odd()
    with pytest.raises(ConfigError) as caught:
        px.Booster("fsdp").boost(model)
    return [*messages, str(caught.value)]


def _add_scalar(model):
    model.temperature = nn.Parameter(torch.ones(()))


def test_what_cannot_be_exact_is_refused():
    scalar, half, mixed, lazy = run_ranks(refusals, 2)[0]
    for message, words in (
        (scalar, ("'temperature' is a scalar", "Try: zero3")),
        (half, ("torch.bfloat16", "fsdp+bf16")),
        (mixed, ("torch.float64", "torch.float32")),
        (lazy, ("no memory", "zero3")),
    ):
        assert all(word in message for word in words), message
