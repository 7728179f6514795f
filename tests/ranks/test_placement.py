"""Placements by a hand-made strategy: boxes of several ranges, uneven cuts, sums and copies, under every ZeRO stage and across plans."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from booster_programs import TOLERANCE, batch, criterion, plain_step, sgd, worst
from torch import nn
from torch.nn import functional as F

import phalanx as px
from phalanx.booster import booster as booster_module
from phalanx.checkpoint.export import read_safetensors
from phalanx.cluster import comm
from phalanx.cluster.placement import Placement
from phalanx.data import take_rows
from phalanx.errors import ShapeError
from phalanx.layout import Layout, split_range
from phalanx.testing import run_ranks

WORDS, WIDTH, INNER = 37, 6, 5


class Gated(nn.Module):
    """A block with a fused gate, whose scale works on each place of the sequence by itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.scaled(self.down(F.silu(gate) * value))

    def scaled(self, x):
        return x * self.scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(seed=0):
    torch.manual_seed(seed)
    return Model().double()


def split_by_hand(target, context):
    """What a tensor-parallel pass does: says where parameters lie, and puts the communication round the forwards."""
    axis = context.mesh.axis("tp")
    if axis.size == 1:
        return target
    place, cut = context.placements.declare, Layout.cut
    start, stop = split_range(WORDS, axis.size, axis.index)
    place(target.embed, "weight", Placement(cut((WORDS, WIDTH), 0, (start, stop))))
    target.embed.forward = lambda words: comm.reduce_from(_rows_of(target.embed.weight, words - start), axis)
    for block in target.blocks:
        first, last = split_range(INNER, axis.size, axis.index)
        fused = ((first, last), (INNER + first, INNER + last))
        place(block.up, "weight", Placement(cut((2 * INNER, WIDTH), 0, *fused)))
        place(block.up, "bias", Placement(cut((2 * INNER,), 0, *fused)))
        place(block.down, "weight", Placement(cut((WIDTH, INNER), 1, (first, last))))
        place(block, "scale", Placement(Layout.whole((WIDTH,)), sums=(axis,)))
        _communicate(block, axis)
    return target


def _rows_of(weight, words):
    here = (words >= 0) & (words < len(weight))
    return F.embedding(words * here, weight) * here[..., None]


def _communicate(block, axis):
    up, down, scaled = block.up.forward, block.down, block.scaled
    block.up.forward = lambda x: up(comm.copy_to(x, axis))
    down.forward = lambda x: comm.reduce_from(F.linear(x, down.weight), axis) + down.bias

    def scaled_in_parts(x):
        sizes = [stop - start for start, stop in (split_range(x.shape[1], axis.size, index) for index in range(axis.size))]
        return comm.gather_from(scaled(comm.scatter_to(x, axis, 1, sizes)), axis, 1, sizes)

    block.scaled = scaled_in_parts


@contextmanager
def tensor_parallel_by_hand():
    passes = (split_by_hand, *(run for run in booster_module.PASSES if run.__name__ != "split_tensors"))
    with mock.patch.object(booster_module, "PASSES", passes):
        yield


def boost(plan, target, optimizer, **options):
    with tensor_parallel_by_hand():
        booster = px.Booster(plan, **options)
        target, optimizer, *_ = booster.boost(target, optimizer, criterion)
    return booster, target, optimizer


def rows(booster, seed):
    axis, full = booster.mesh.axis("dp"), batch(seed)
    return take_rows(full, *split_range(8, axis.size, axis.index), 8)


def steps(plan, norm_type, lazy):
    reference, expected_norms = model(), []
    if lazy:
        with px.lazy():
            target = model()
    else:
        target = model(px.cluster.launch.launch().rank)  # the first rank's weights are everyone's
    plain = sgd(reference)
    booster, target, optimizer = boost(plan, target, sgd(target), norm_type=norm_type)
    error, norms = 0.0, []
    for step in range(3):
        loss, expected = plain_step(reference, plain, [batch(step)])
        booster.forward_backward(rows(booster, step))
        error = max(error, worst(booster.gradients(), expected))
        result = optimizer.step()
        error = max(error, abs(result.loss - loss) / loss)
        norms.append(result.grad_norm)
        expected_norms.append(torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected.values()]), norm_type).item())
    error = max(error, worst({"norm": torch.tensor(norms)}, {"norm": torch.tensor(expected_norms)}))
    return max(error, worst(booster.full_state_dict(), reference.state_dict()))


@pytest.mark.parametrize(
    ("plan", "world", "norm_type", "lazy"),
    [
        ("tp3", 3, 3.0, False),
        ("tp7", 7, 2.0, True),
        ("zero1+tp2", 4, 2.0, True),
        ("zero2+tp2+acc2", 4, float("inf"), False),
        ("zero3+tp2+acc3", 4, 2.0, True),
        ("zero3+tp2", 6, 1.0, False),
    ],
)
def test_boxes_sums_and_copies_are_exact(plan, world, norm_type, lazy):
    assert max(run_ranks(steps, world, plan, norm_type, lazy)) < TOLERANCE


def gradients_in_bits(plans):
    found = []
    for plan in plans:
        target = model()
        booster, *_ = boost(plan, target, sgd(target))
        booster.forward_backward(rows(booster, 0))
        found.append({name: gradient.numpy().tobytes() for name, gradient in booster.gradients().items()})
    return found


def test_copies_have_the_same_bits_where_three_ranks_are_summed():
    """The order of a sum of three or more depends on the place in the message, which boxes of uneven sizes would shift."""
    first, *others = run_ranks(gradients_in_bits, 6, ("tp2", "zero1+tp2", "zero3+tp2"))
    assert all(found == first for found in others)


def adam(target):
    return torch.optim.AdamW(target.parameters(), lr=0.01)


def train_and_save(plan, path, num_steps, before=None):
    target = model()
    booster, target, _ = boost(plan, target, adam(target))
    if before is not None:
        booster.load(before)
    for step in range(num_steps):
        booster.step(rows(booster, step))
    booster.save(path)
    booster.save_model(path.with_name(path.name + "-weights"))
    return booster.full_state_dict()


@pytest.mark.parametrize(
    ("first", "world", "second", "other_world"), [("zero2+tp2", 4, "zero3", 3), ("zero1", 2, "zero3+tp2", 4), ("tp3", 3, "tp2", 2)]
)
def test_a_run_goes_on_under_another_cut(tmp_path, first, world, second, other_world):
    run_ranks(train_and_save, world, first, tmp_path / "half", 2)
    found = run_ranks(train_and_save, other_world, second, tmp_path / "whole", 2, tmp_path / "half")
    run_ranks(train_and_save, 1, "zero0", tmp_path / "alone", 2)
    expected = run_ranks(train_and_save, 1, "zero0", tmp_path / "whole-alone", 2, tmp_path / "alone")[0]
    assert max(worst(full, expected) for full in found) < 1e-7  # moments near 0 multiply rounding
    for path in (tmp_path / "whole-weights", tmp_path / "whole-alone-weights"):
        with read_safetensors(path) as weights:
            assert worst(dict(weights.items()), expected) < 1e-7


def half_of_the_head(target, context):
    context.placements.declare(target.head, "bias", Placement(Layout.cut((WORDS,), 0, (0, 20))))  # the same half on every rank
    return target


def _declare_too_little(plan):
    target = model()
    with mock.patch(f"{__name__}.split_by_hand", half_of_the_head):
        booster, *_ = boost(plan, target, sgd(target))
    with pytest.raises(ShapeError, match=r"ranks own 40 elements of 'head.bias'. Allowed: each of its 37 elements once"):
        booster.full_state_dict()


def test_boxes_that_do_not_make_up_a_parameter_are_found():
    run_ranks(_declare_too_little, 2, "tp2")


def test_layouts_that_cannot_be_are_refused():
    for box in ([((4, 6), (0, 2))], [(0, 7)], [((0, 3), (2, 4))], [(-1, 2)]):
        with pytest.raises(ShapeError, match="ascending ranges"):
            Layout.of_box((6,), box)
    with pytest.raises(ShapeError, match=r"the run \(0, 7\)"):
        Layout.whole((6,)).with_run(0, 7)


def test_who_holds_the_first_element():
    holding = [Layout.cut((6, 2), 0, (0, 2), (4, 6)), Layout.whole(()), Layout.whole((0, 3))]
    others = [Layout.cut((6, 2), 0, (2, 4)), Layout.cut((6, 2), 0, (0, 0)), Layout.whole((6,)).with_run(1, 6)]
    assert all(layout.has_first for layout in holding)
    assert not any(layout.has_first for layout in others)
