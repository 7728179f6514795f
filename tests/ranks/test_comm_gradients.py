"""Differentiable collectives: gradients of several ranks against those of one process, in float64."""

from __future__ import annotations

import pytest
import torch

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.layout import split_sizes
from phalanx.testing import run_ranks

WIDTH, HIDDEN = 5, 7  # neither divides by 2, 3 or 4


def _axis() -> Axis:
    return Mesh({"tp": launch.world().size}).axis("tp")


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _two_layers(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ first) @ second


def _split_layers(enter, leave) -> tuple[torch.Tensor, ...]:
    """The hidden dimension cut over ranks: x is copied in, the partial outputs are summed."""
    axis = _axis()
    x, first, second = (tensor.requires_grad_() for tensor in (_draw(3, WIDTH), _draw(WIDTH, HIDDEN, seed=1), _draw(HIDDEN, WIDTH, seed=2)))
    sizes = split_sizes(HIDDEN, axis.size)
    own = slice(sum(sizes[: axis.index]), sum(sizes[: axis.index + 1]))
    out = leave(_two_layers(enter(x, axis), first[:, own], second[own]), axis)
    (out**2).sum().backward()
    return out.detach(), x.grad, first.grad[:, own], second.grad[own]


def _copy_and_reduce() -> tuple[torch.Tensor, ...]:
    return _split_layers(comm.copy_to, comm.reduce_from)


def _without_the_dual() -> tuple[torch.Tensor, ...]:
    return _split_layers(lambda x, axis: x, comm.reduce_from)


def _expected_layers() -> tuple[torch.Tensor, ...]:
    x, first, second = (tensor.requires_grad_() for tensor in (_draw(3, WIDTH), _draw(WIDTH, HIDDEN, seed=1), _draw(HIDDEN, WIDTH, seed=2)))
    out = _two_layers(x, first, second)
    (out**2).sum().backward()
    return out.detach(), x.grad, first.grad, second.grad


@pytest.mark.parametrize("n", [2, 3, 4])
def test_copy_and_reduce(n):
    out, x_grad, first_grad, second_grad = _expected_layers()
    results = run_ranks(_copy_and_reduce, n)
    for rank_out, rank_x_grad, _, _ in results:
        torch.testing.assert_close(rank_out, out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank_x_grad, x_grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([result[2] for result in results], 1), first_grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([result[3] for result in results], 0), second_grad, rtol=1e-12, atol=1e-12)


def test_without_its_dual_the_gradient_is_wrong():
    _, x_grad, _, _ = _expected_layers()
    assert not torch.allclose(run_ranks(_without_the_dual, 2)[0][1], x_grad)


def _gather_and_scatter(dim: int, sizes: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x is cut, worked on in parts, joined again; the loss weighs every element differently."""
    axis = _axis()
    x = _draw(6, 5, HIDDEN).requires_grad_()
    part = comm.scatter_to(x, axis, dim, sizes)
    whole = comm.gather_from(torch.sin(part), axis, dim, sizes or split_sizes(x.shape[dim], axis.size))
    (whole * _draw(6, 5, HIDDEN, seed=3)).sum().backward()
    return whole.detach(), x.grad


@pytest.mark.parametrize(("n", "dim", "sizes"), [(2, 1, None), (3, 0, None), (4, -1, None), (3, 2, [0, 6, 1])])
def test_gather_and_scatter(n, dim, sizes):
    x, weights = _draw(6, 5, HIDDEN), _draw(6, 5, HIDDEN, seed=3)
    for whole, grad in run_ranks(_gather_and_scatter, n, dim, sizes):
        torch.testing.assert_close(whole, torch.sin(x), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, torch.cos(x) * weights, rtol=1e-13, atol=1e-13)


def _exchange(heads: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From parts of the sequence with all heads to all of the sequence with parts of the heads, and back."""
    axis = _axis()
    lengths = split_sizes(length, axis.size)
    start = sum(lengths[: axis.index])
    x = _draw(2, length, heads)[:, start : start + lengths[axis.index]].clone().requires_grad_()
    by_head = comm.exchange(x, axis, split_dim=2, concat_dim=1, sizes=lengths)
    mixed = torch.cumsum(by_head, 1)  # needs the whole sequence
    back = comm.exchange(mixed, axis, split_dim=1, concat_dim=2, sizes=split_sizes(heads, axis.size))
    (back * _draw(2, length, heads, seed=4)[:, start : start + lengths[axis.index]]).sum().backward()
    return by_head.detach(), back.detach(), x.grad


@pytest.mark.parametrize(("n", "heads", "length"), [(2, 4, 6), (3, 4, 8), (4, 3, 9), (2, 1, 3)])
def test_exchange(n, heads, length):
    x = _draw(2, length, heads).requires_grad_()
    out = torch.cumsum(x, 1)
    (out * _draw(2, length, heads, seed=4)).sum().backward()
    by_head, back, grad = zip(*run_ranks(_exchange, n, heads, length), strict=True)
    assert torch.equal(torch.cat(by_head, 2), x)
    torch.testing.assert_close(torch.cat(back, 1), out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat(grad, 1), x.grad, rtol=1e-13, atol=1e-13)
