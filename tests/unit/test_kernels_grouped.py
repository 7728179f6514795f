"""Grouped products and grouped rows against loops, in float64."""

import pytest
import torch

from phalanx.kernels.grouped import grouped_linear
from phalanx.kernels.grouped_rows import sort_choices
from phalanx.kernels.silu_gate import silu_gate


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 0, 9), (9, 0, 0, 0), (0, 0, 0, 0)])
def test_grouped_linear_is_a_loop_over_groups(sizes, transposed):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, *((6, 5) if transposed else (5, 6)), dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(sum(sizes), 5, dtype=torch.float64)
    rows = x.split(list(sizes))
    parts = [row @ (w if transposed else w.t()) + b for row, w, b in zip(rows, weight, bias, strict=True)]
    expected = torch.autograd.grad((torch.cat(parts) * slope).sum(), (x, weight, bias))
    out = grouped_linear(x, weight, sizes, bias, transposed=transposed)
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-12, atol=1e-12)
    for found, right in zip(torch.autograd.grad((out * slope).sum(), (x, weight, bias)), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def groups_of(num_tokens: int, num_choices: int) -> torch.Tensor:
    return torch.randint(-1, 5, (num_tokens, num_choices), generator=torch.Generator().manual_seed(num_tokens))  # -1 and 4: none


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("shape", [(7, 3), (5, 1), (0, 2), (1, 4)])
def test_rows_are_sorted_by_group_and_token_and_added_up(shape, once):
    groups = groups_of(*shape)
    choices = sort_choices(groups, 4, once=once)
    wanted = [(g, t, k) for g in range(4) for t in range(shape[0]) for k in range(shape[1]) if groups[t, k] == g]
    if once:
        wanted = [row for at, row in enumerate(wanted) if row[:2] not in [other[:2] for other in wanted[:at]]]
    assert choices.counts.tolist() == [sum(row[0] == g for row in wanted) for g in range(4)]
    rows = choices.rows(len(wanted))
    assert rows.tokens.tolist() == [t for _, t, _ in wanted]
    assert rows.pairs.tolist() == [t * shape[1] + k for _, t, k in wanted]
    x = torch.randn(shape[0], 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    out = rows.add_up(rows.take(x).sin(), weights)
    total = torch.zeros(shape, dtype=torch.float64)
    for _, t, k in wanted:
        total[t, k] = 1
    right = x.sin() * (weights * total).sum(1, keepdim=True)
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(x)
    found = torch.autograd.grad((out * slope).sum(), (x, weights))
    for one, other in zip(found, torch.autograd.grad((right * slope).sum(), (x, weights)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_in_a_wider_dtype_are_not_rounded_first():
    rows = sort_choices(torch.tensor([[0, 1], [1, 0]]), 2).rows(4)
    y = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(2, 2, requires_grad=True)
    out = rows.add_up(y, weights)
    weighted = y.float() * weights.flatten()[rows.pairs].unsqueeze(1)
    right = torch.zeros(2, 3).index_add(0, rows.tokens, weighted).to(torch.bfloat16)
    torch.testing.assert_close(out, right)
    out.sum().backward()
    assert weights.grad.dtype == torch.float32


def test_the_gate_by_one_operation():
    inner = torch.randn(5, 14, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(silu_gate, inner)
    gate, up = inner.chunk(2, -1)
    torch.testing.assert_close(silu_gate(inner), torch.nn.functional.silu(gate) * up, rtol=0, atol=0)
