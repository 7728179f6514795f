"""Experts spread over ranks against all experts in one process: every output and gradient, in float64, on uneven choices."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from phalanx.cluster import comm
from phalanx.cluster.comm import ledger
from phalanx.cluster.launch import launch
from phalanx.cluster.mesh import Mesh
from phalanx.parallel.expert import exchange
from phalanx.parallel.expert.axes import hops_of
from phalanx.parallel.expert.homes import Homes, by_load
from phalanx.parallel.expert.load import Load
from phalanx.parallel.expert.stacked import StackedForward
from phalanx.testing import run_ranks

HIDDEN, WIDTH = 6, 5
TOKENS = [7, 0, 3, 5]  # of each rank


def problem(num_experts, num_choices, routing):
    """Tokens, choices and weights of every rank, the stacked parameters, and a slope for the outputs."""
    torch.manual_seed(3)
    ranks = []
    for rank, count in enumerate(TOKENS):
        scores = torch.rand(count, num_experts)
        if routing == "one":
            scores[:, 0] += 5
        if routing == "some":
            scores[:, 1::2] -= 5 if num_choices <= (num_experts + 1) // 2 else 0
        experts = scores.topk(num_choices, 1).indices if count else torch.zeros(0, num_choices, dtype=torch.int64)
        if routing == "none" and rank == 2:
            experts[:, 0] = -1  # choices that name no expert
        ranks.append((torch.randn(count, HIDDEN).double(), experts, torch.rand(count, num_choices).double()))
    up, down = torch.randn(num_experts, 2 * WIDTH, HIDDEN).double(), torch.randn(num_experts, HIDDEN, WIDTH).double()
    up_bias, down_bias = torch.randn(num_experts, 2 * WIDTH).double(), torch.randn(num_experts, HIDDEN).double()
    return ranks, (up, down, up_bias, down_bias), [torch.randn_like(x) for x, _, _ in ranks]


def gate(inner):
    left, right = inner.chunk(2, -1)
    return F.silu(left) * right


def plain(x, experts, weights, parameters):
    up, down, up_bias, down_bias = parameters
    out = torch.zeros_like(x)
    for expert in range(len(up)):
        tokens, choices = (experts == expert).nonzero(as_tuple=True)
        y = F.linear(gate(F.linear(x[tokens], up[expert], up_bias[expert])), down[expert], down_bias[expert])
        out = out.index_add(0, tokens, y * weights[tokens, choices, None])
    return out


def module_with(parameters):
    up, down, up_bias, down_bias = parameters
    return SimpleNamespace(
        gate_up_proj=up, down_proj=down, gate_up_proj_bias=up_bias, down_proj_bias=down_bias,
        has_gate=True, has_bias=True, is_transposed=False, has_post_expert_norm=False, _apply_gate=gate,
    )  # fmt: skip


def axes_of(grid):
    mesh = Mesh({"outer": grid[0], "inner": grid[1], "width": grid[2]})
    return mesh, [mesh.axis("outer"), mesh.axis("inner")]


def spread(case, grid, homes_of=Homes.even, broken=False):
    """This rank's largest errors against one process, and its ledger."""
    num_experts = case[0]
    rank = launch().rank
    mesh, axes = axes_of(grid)
    width_axis = mesh.axis("width")
    ranks, parameters, slopes = problem(*case)
    x, experts, weights = ranks[rank // width_axis.size]
    x, weights = x.requires_grad_(), weights.requires_grad_()
    homes = homes_of(num_experts, grid[0] * grid[1])
    place = mesh.index("outer") * grid[1] + mesh.index("inner")
    mine = list(homes.held[place])
    start, stop = width_axis.index * WIDTH // width_axis.size, (width_axis.index + 1) * WIDTH // width_axis.size
    columns = [*range(start, stop), *range(WIDTH + start, WIDTH + stop)]
    up, down, up_bias, down_bias = (tensor[mine] for tensor in parameters)
    local = [up[:, columns], down[..., start:stop], up_bias[:, columns], down_bias]
    local = [tensor.contiguous().requires_grad_() for tensor in local]
    forward = StackedForward(homes, axes, Load("layer", num_experts), width_axis)
    with ledger.record() as rows:
        out = forward(module_with(local), x, experts, weights)
    (out * slopes[rank // width_axis.size]).sum().backward()
    if broken:
        local[0].grad.mul_(2)
    return compare(case, x, weights, out, local, mine, columns, slice(start, stop), place_tokens(grid), width_axis), rows


def place_tokens(grid):
    return TOKENS[: grid[0] * grid[1]]


def compare(case, x, weights, out, local, mine, columns, inner, tokens, width_axis):
    ranks, parameters, slopes = problem(*case)
    ranks = [(a.requires_grad_(), b, c.requires_grad_()) for a, b, c in ranks[: len(tokens)]]
    parameters = [tensor.requires_grad_() for tensor in parameters]
    outs = [plain(*part, parameters) for part in ranks]
    sum((one * slope).sum() for one, slope in zip(outs, slopes)).backward()
    data_index = launch().rank // width_axis.size
    up, down, up_bias, down_bias = (tensor.grad[mine] for tensor in parameters)
    down_grad_bias = local[3].grad
    comm.all_reduce(down_grad_bias, width_axis)  # one part of the width has it, the others 0
    tokens, _, token_weights = ranks[data_index]
    pairs = [
        (out, outs[data_index]), (x.grad, tokens.grad), (weights.grad, token_weights.grad),
        (local[0].grad, up[:, columns]), (local[1].grad, down[..., inner]),
        (local[2].grad, up_bias[:, columns]), (down_grad_bias, down_bias),
    ]  # fmt: skip
    return max(float((found - right).abs().max()) if right.numel() else 0.0 for found, right in pairs)


CASES = [(5, 2, "even"), (4, 1, "one"), (6, 3, "some"), (3, 2, "none"), (2, 2, "one")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_outputs_and_gradients_are_those_of_one_process(case, grid):
    world = grid[0] * grid[1] * grid[2]
    for error, _ in run_ranks(spread, world, case, grid):
        assert error < 1e-12


def hop_sizes(local_size):
    launch()
    mesh = Mesh({"dp": 4})
    return [hop.size for hop in hops_of(mesh, mesh.axis("dp"), local_size)]


@pytest.mark.parametrize(("local_size", "sizes"), [(2, [2, 2]), (1, [4]), (4, [4]), (3, [4])])
def test_an_axis_over_several_nodes_is_two_hops(local_size, sizes):
    assert run_ranks(hop_sizes, 4, local_size) == [sizes] * 4


def scattered(num_experts, size):
    return by_load([float(expert % 3) for expert in range(num_experts)], size)


def test_homes_by_load_change_no_number():
    for error, _ in run_ranks(spread, 4, (6, 2, "even"), (2, 2, 1), scattered):
        assert error < 1e-12


def test_a_doubled_gradient_is_seen():
    assert max(error for error, _ in run_ranks(spread, 2, (5, 2, "even"), (1, 2, 1), Homes.even, True)) > 1e-3


def uniform(size, num_experts, num_choices, num_tokens, hidden):
    """Rows sent over the wire by a dispatch and a combine under choices that are spread evenly."""
    launch()
    axis = Mesh({"ep": size}).axis("ep")
    experts = torch.stack(
        [torch.randperm(num_experts, generator=torch.Generator().manual_seed(t))[:num_choices] for t in range(num_tokens)]
    )
    x = torch.randn(num_tokens, hidden, requires_grad=True)
    weights = torch.rand(num_tokens, num_choices, requires_grad=True)
    with ledger.record() as forth:
        sent = exchange.dispatch(x, experts, weights, Homes.even(num_experts, size), [axis], "layer")
        out = sent.combine(sent.rows.add_up(sent.rows.take(sent.x), sent.weights))
    with ledger.record() as back:
        out.sum().backward()
    return [sum(row[4] for row in rows) / 4 for rows in (forth, back)]


@pytest.mark.parametrize(("size", "num_choices"), [(2, 2), (4, 2)])
def test_a_token_is_sent_once_to_each_rank(size, num_choices):
    num_tokens, hidden = 200, 64
    bound = 2 * num_choices * num_tokens * hidden * (size - 1) / size
    for forth, back in run_ranks(uniform, size, size, 8, num_choices, num_tokens, hidden):
        assert max(forth, back) <= bound
