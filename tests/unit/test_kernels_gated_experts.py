"""Experts one after another, from gather to sum, against a plain loop: outputs and every gradient, in float64."""

import pytest
import torch
from torch.nn import functional as F

from phalanx.kernels.gated_experts import gated_experts, is_faster
from phalanx.kernels.grouped_rows import sort_choices

TOKENS, HIDDEN, INNER, EXPERTS = 7, 5, 3, 4
CHOICES = {
    "spread": torch.tensor([[0, 2], [3, 0], [2, 3], [0, 3], [2, 0], [3, 2], [0, 2]]),  # none chooses expert 1
    "one": torch.full((TOKENS, 2), 3),  # all choose one expert, and choose it twice
    "missing": torch.tensor([[0, -1], [-1, -1], [4, 1], [1, 2], [-1, 3], [2, 4], [0, 1]]),  # -1 and 4 are no experts
    "nothing": torch.full((TOKENS, 1), -1),
}


def leaves(num_choices, transposed):
    torch.manual_seed(0)
    up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN).double(), torch.randn(EXPERTS, HIDDEN, INNER).double()
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    x, weights = torch.randn(TOKENS, HIDDEN).double(), torch.rand(TOKENS, num_choices).double()
    return [tensor.requires_grad_() for tensor in (x, weights, up, down)]


def plain(x, weights, up, down, choices, transposed):
    if transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    out = 0 * x + 0 * weights.sum() + 0 * (up.sum() + down.sum())
    for expert in range(EXPERTS):
        tokens, places = (choices == expert).nonzero(as_tuple=True)
        gate, linear = F.linear(x[tokens], up[expert]).chunk(2, -1)
        out = out.index_add(0, tokens, F.linear(F.silu(gate) * linear, down[expert]) * weights[tokens, places, None])
    return out


def found_and_right(name, transposed, frozen=()):
    choices = CHOICES[name]
    rows = sort_choices(choices, EXPERTS)
    sizes = rows.counts.tolist()
    slope = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for compute in (
        lambda x, w, up, down: gated_experts(x, w, rows.rows(sum(sizes)), sizes, up, down, transposed=transposed),
        lambda *inputs: plain(*inputs, choices, transposed),
    ):
        inputs = leaves(choices.shape[1], transposed)
        for place in frozen:
            inputs[place].requires_grad_(False)
        out = compute(*inputs)
        results.append([out.detach(), *torch.autograd.grad((out * slope).sum(), [leaf for leaf in inputs if leaf.requires_grad])])
    return results


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_outputs_and_gradients_are_those_of_a_loop(name, transposed):
    for one, other in zip(*found_and_right(name, transposed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (2, 3), (0, 2, 3), (0, 1)], ids=str)
def test_what_is_frozen_changes_no_other_gradient(frozen):
    for one, other in zip(*found_and_right("missing", False, frozen), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_a_gradient_nothing_is_kept():
    inputs = [leaf.detach() for leaf in leaves(2, False)]
    rows = sort_choices(CHOICES["spread"], EXPERTS)
    total = rows.rows(int(rows.counts.sum()))
    _, kept = torch.ops.phalanx.gated_experts(
        inputs[0], inputs[1].flatten()[total.pairs], *inputs[2:], total.tokens, rows.counts.tolist(), False, False
    )
    assert kept.numel() == 0


def test_half_dtypes_and_mixed_ones_go_another_way():
    x, half = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    assert is_faster(x, x, x)
    assert not is_faster(half, half, half)
    assert not is_faster(x, half, x)
    assert not is_faster(x.to("meta"), x, x)
