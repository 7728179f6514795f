"""A backward in two halves gives the gradients of a whole one, and its first half touches no weight that can wait."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from phalanx.parallel.pipeline.halves import Halves


class Block(nn.Module):
    """Products, norms, a weight used twice, one behind an operation of its own, attention, and branches that join again."""

    def __init__(self):
        super().__init__()
        self.norm, self.mixed, self.out = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6, bias=False)
        self.twice, self.gain, self.unused = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), nn.Linear(2, 2)

    def forward(self, x):
        query, key, value = self.mixed(self.norm(x)).view(*x.shape[:2], 2, 9).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        x = x + self.twice(torch.tanh(self.twice(x)))
        return x * (1 + self.gain.exp())


def run(halved, num_inputs=1, leaf=False):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Tanh(), Block()).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=num_inputs > 0)
    y = model(x)
    passed = torch.randn(3, dtype=torch.float64, requires_grad=True)  # an input that is handed on as it came
    roots, gradients = [get_gradient_edge(y)], [torch.randn_like(y)]
    if leaf:
        roots, gradients = [*roots, get_gradient_edge(passed)], [*gradients, torch.ones_like(passed)]
    inputs = [x, passed][: num_inputs + leaf] if num_inputs else []
    early = None
    if halved:
        halves = Halves(roots, gradients, inputs)
        del y
        halves.run_input()
        early = {name for name, p in model.named_parameters() if p.grad is not None}
        halves.run_weight()
    else:
        torch.autograd.backward(roots, gradients)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **{f"input {place}": tensor.grad for place, tensor in enumerate(inputs)}}, early


@pytest.mark.parametrize(("num_inputs", "leaf"), [(1, False), (1, True), (0, False)])
def test_both_halves_together_are_the_whole(num_inputs, leaf):
    expected, _ = run(False, num_inputs, leaf)
    found, early = run(True, num_inputs, leaf)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
    shared = {f"{place}.twice.{part}" for place in (0, 2) for part in ("weight", "bias")}
    assert early == (shared if num_inputs else set())


def test_gradients_add_up_over_micro_batches_and_hooks_run_once():
    torch.manual_seed(0)
    layer, arrivals = nn.Linear(3, 3).double(), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: arrivals.append(p.grad.clone()))
    waiting = []
    xs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for x in xs:
        y = layer(x)
        halves = Halves([get_gradient_edge(y)], [torch.ones_like(y)], [x])
        halves.run_input()
        waiting.append(halves)
    assert layer.weight.grad is None
    assert all(x.grad is not None for x in xs)
    for halves in waiting:
        halves.run_weight()
    assert len(arrivals) == 3
    torch.testing.assert_close(layer.weight.grad, torch.cat(xs).sum(0).expand(3, 3))


def test_frozen_weights_and_outputs_that_no_input_reaches():
    torch.manual_seed(0)
    frozen, free = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    first, second = frozen(x), free(torch.ones(2, 3))
    halves = Halves([get_gradient_edge(first), get_gradient_edge(second)], [torch.ones(2, 3)] * 2, [x])
    halves.run_input()
    assert frozen.weight.grad is None
    assert free.weight.grad is None
    halves.run_weight()
    assert frozen.weight.grad is None
    torch.testing.assert_close(free.weight.grad, torch.full((3, 3), 2.0))
    torch.testing.assert_close(x.grad, frozen.weight.sum(0).expand(2, 3))
