"""Products, norms and their ledger on grids of ranks, against one process in float64: outputs and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from phalanx.cluster import comm
from phalanx.cluster.ledger import ledger
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.layout import Range, split_range
from phalanx.parallel.tensor.entered import Entered, enter
from phalanx.parallel.tensor.grid import Grid, Product
from phalanx.parallel.tensor.split_norm import scaled_to_one, standardised
from phalanx.parallel.tensor.summa import leave, product
from phalanx.testing import run_ranks

TOLERANCE = 1e-9
DEPTH = 2


@dataclass(frozen=True)
class Sizes:
    """One layer: rows, tokens, features, heads of `width`, key and value heads, features inside of the MLP."""

    rows: int
    tokens: int
    hidden: int
    heads: int
    width: int
    kv_heads: int
    inner: int

    @property
    def span(self) -> int:
        return self.heads // self.kv_heads


CLASSIC = Sizes(rows=4, tokens=3, hidden=16, heads=4, width=4, kv_heads=4, inner=64)
UNEVEN = Sizes(rows=5, tokens=3, hidden=13, heads=6, width=3, kv_heads=3, inner=11)
SHARED = Sizes(rows=5, tokens=2, hidden=7, heads=4, width=2, kv_heads=1, inner=9)


def make_grid(kind: str, side: int, **options: bool) -> tuple[Grid, Axis]:
    """The grid of a kind over the whole world, and the axis over which rows lie."""
    names = {"2d": ("row", "col"), "2.5d": ("depth", "row", "col"), "3d": ("plane", "row", "col")}[kind]
    mesh = Mesh({name: DEPTH if name == "depth" else side for name in names})
    alone = Axis("alone", (mesh.rank,), 0)
    slow = mesh.axis("row") if kind == "3d" else alone
    both = mesh.axis("row", "col") if kind == "3d" else mesh.axis("col")
    stored = mesh.axis("plane" if kind == "3d" else "row")
    return Grid(stored, slow, mesh.axis("col"), both, **options), mesh.axis("depth", "row") if kind == "2.5d" else stored


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(sizes: Sizes) -> dict[str, torch.Tensor]:
    """A projection to q, and a fused one to k of all heads, then v."""
    q, kv = sizes.heads * sizes.width, 2 * sizes.kv_heads * sizes.width
    shapes = {
        "q": (q, sizes.hidden),
        "kv": (kv, sizes.hidden),
        "kv_bias": (kv,),
        "out": (sizes.hidden, sizes.heads * sizes.width),
        "up": (sizes.inner, sizes.hidden),
        "down": (sizes.hidden, sizes.inner),
        "down_bias": (sizes.hidden,),
    }
    return {name: draw(*shape, seed=7 + number) * 0.3 for number, (name, shape) in enumerate(shapes.items())}


def attend(q: torch.Tensor, kv: torch.Tensor, width: int) -> torch.Tensor:
    k, v = kv.chunk(2, -1)
    apart = lambda x: x.reshape(*x.shape[:2], -1, width).transpose(1, 2)  # noqa: E731
    k, v = (apart(x).repeat_interleave(q.shape[-1] // max(k.shape[-1], 1), 1) for x in (k, v))
    return F.scaled_dot_product_attention(apart(q), k, v, is_causal=True).transpose(1, 2).flatten(2)


def one_process(sizes: Sizes, norms: str) -> tuple[torch.Tensor, ...]:
    """Output, the gradient of the input, and those of all weights."""
    w = {name: value.requires_grad_() for name, value in weights(sizes).items()}
    x = draw(sizes.rows, sizes.tokens, sizes.hidden, seed=1).requires_grad_()
    norm = {
        "layer": lambda x: F.layer_norm(x, (sizes.hidden,)),
        "rms": lambda x: F.rms_norm(x, (sizes.hidden,), eps=1e-5),
        "": lambda x: x,
    }[norms]
    normed = norm(x)
    mixed = attend(normed @ w["q"].T, normed @ w["kv"].T + w["kv_bias"], sizes.width)
    middle = x + mixed @ w["out"].T
    out = middle + F.gelu(norm(middle) @ w["up"].T) @ w["down"].T + w["down_bias"]
    (out * draw(*out.shape, seed=2)).sum().backward()
    return out.detach(), x.grad, *(value.grad for value in w.values())


def products(grid: Grid, sizes: Sizes) -> dict[str, Product]:
    parts, width = grid.both.size, sizes.width

    def heads(index: int) -> Range:
        low, high = _heads(sizes, parts, index)
        return low * width, high * width

    def fused(index: int) -> tuple[Range, ...]:
        low, high = _heads(sizes, parts, index)
        low, high = (low // sizes.span * width, -(-high // sizes.span) * width) if high > low else (0, 0)
        return (low, high), (sizes.kv_heads * width + low, sizes.kv_heads * width + high)

    inner = lambda index: split_range(sizes.inner, parts, index)  # noqa: E731
    return {
        "q": grid.columns(sizes.hidden, lambda index: (heads(index),)),
        "kv": grid.columns(sizes.hidden, fused),
        "out": grid.out_of_group(heads, sizes.hidden),
        "up": grid.columns(sizes.hidden, lambda index: (inner(index),)),
        "down": grid.out_of_group(inner, sizes.hidden),
    }


def _heads(sizes: Sizes, parts: int, index: int) -> Range:
    """Whole groups where there are enough, else a part of one group."""
    if sizes.kv_heads >= parts:
        low, high = split_range(sizes.kv_heads, parts, index)
        return low * sizes.span, high * sizes.span
    for group in range(sizes.kv_heads):
        first, last = split_range(parts, sizes.kv_heads, group)
        if first <= index < last:
            low, high = split_range(sizes.span, last - first, index - first)
            return group * sizes.span + low, group * sizes.span + high
    raise AssertionError("every part lies in a group")


def _multiply(grid: Grid, how: Product, entered: Entered, weight: torch.Tensor) -> torch.Tensor:
    whole = product(entered, weight, grid.rows, 0, grid.stored_sizes(how.num_out), keep=grid.keep)
    return leave(whole, how.leave, how.parts)


def on_grid(kind: str, side: int, sizes: Sizes, norms: str, options: dict[str, bool], fault: str = "") -> tuple:
    """This rank's part of output and gradients, each with the place it has in the whole, and the bytes sent by axis."""
    grid, rows = make_grid(kind, side, **options)
    low, high = split_range(sizes.rows, rows.size, rows.index)
    first, last = grid.stream_range(sizes.hidden)
    how = products(grid, sizes)
    widths = grid.stream_sizes(sizes.hidden)
    full = weights(sizes)
    places = {name: grid.weight_placement(how[name], full[name].shape, transposed=False) for name in how}
    places["kv_bias"] = grid.bias_placement(how["kv"], full["kv_bias"].shape)
    places["down_bias"] = grid.bias_placement(how["down"], full["down_bias"].shape)
    w = {name: places[name].layout.take(full[name]).clone().requires_grad_() for name in full}
    x = draw(sizes.rows, sizes.tokens, sizes.hidden, seed=1)[low:high, :, first:last].clone().requires_grad_()
    norm = {
        "layer": lambda x: standardised(x, grid.both, widths, 1e-5),
        "rms": lambda x: scaled_to_one(x, grid.both, widths, 1e-5),
        "": lambda x: x,
    }[norms]
    multiply = lambda name, entered: _multiply(grid, how[name], entered, w[name])  # noqa: E731
    enter_for = lambda name, x: enter(x, how[name].enter, how[name].sizes, keep=grid.keep)  # noqa: E731
    with ledger.record() as sent:
        entered = enter_for("q", norm(x))
        mixed = attend(multiply("q", entered), multiply("kv", entered) + w["kv_bias"], sizes.width)
        middle = x + multiply("out", enter_for("out", mixed))
        up = multiply("up", enter_for("up", norm(middle)))
        out = middle + multiply("down", enter_for("down", F.gelu(up))) + w["down_bias"]
        cotangent = draw(sizes.rows, sizes.tokens, sizes.hidden, seed=2)[low:high, :, first:last]
        (out * cotangent).sum().backward()
    for name, placement in places.items():
        grad = w[name].grad
        for axis in placement.sums if fault != "sums" else ():
            comm.all_reduce(grad, axis)
        if rows.size > grid.rows.size and fault != "depth":
            comm.all_reduce(grad, Mesh({"depth": DEPTH, "row": side, "col": side}).axis("depth"))
    box = (slice(low, high), slice(None), slice(first, last))
    grads = {name: (places[name].layout, w[name].grad) for name in full}
    return box, out.detach(), x.grad, grads, sum(row[4] for row in sent) // 8


def check(results, sizes: Sizes, norms: str, tolerance: float = TOLERANCE) -> float:
    """The worst difference, over the largest magnitude of each tensor."""
    out, x_grad, *grads = one_process(sizes, norms)
    worst = 0.0
    seen = torch.zeros_like(out)
    for box, local_out, local_x, local_grads, _ in results:
        seen[box] += 1
        worst = max(worst, _apart_by(local_out, out[box], out), _apart_by(local_x, x_grad[box], x_grad))
        for (layout, grad), expected in zip(local_grads.values(), grads, strict=True):
            worst = max(worst, _apart_by(grad, layout.take(expected), expected))
    assert bool((seen == 1).all())
    return worst


def _apart_by(found: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / whole.abs().max()) if found.numel() else 0.0


def _world(kind: str, side: int) -> int:
    return side ** (3 if kind == "3d" else 2) * (DEPTH if kind == "2.5d" else 1)


OPTIONS = [{}, {"keep": True}, {"outputs_move": True}, {"keep": True, "outputs_move": True}]
GRIDS = [("2d", 2), ("2.5d", 2), ("3d", 2)]


@pytest.mark.parametrize(("kind", "side"), GRIDS)
@pytest.mark.parametrize("sizes", [CLASSIC, UNEVEN, SHARED], ids=["even", "uneven", "shared"])
def test_a_layer_on_a_grid(kind, side, sizes):
    norms = "layer" if sizes is UNEVEN else "rms"
    results = run_ranks(on_grid, _world(kind, side), kind, side, sizes, norms, {})
    assert check(results, sizes, norms) < TOLERANCE


@pytest.mark.parametrize(("kind", "side"), GRIDS)
@pytest.mark.parametrize("options", OPTIONS[1:], ids=["kept", "outputs move", "both"])
def test_the_options_change_no_number(kind, side, options):
    results = run_ranks(on_grid, _world(kind, side), kind, side, UNEVEN, "layer", options)
    assert check(results, UNEVEN, "layer") < TOLERANCE


def formula(kind: str, side: int, x: int, weight: int, options: dict[str, bool]) -> int:
    """Elements that one rank sends for one layer, forward and backward, without norms; x = rows · tokens · hidden, weight = 12 hidden²."""
    q = side
    times = 2 if options.get("keep") else 3
    if kind == "3d":
        return (q - 1) * (times * (7 * x + weight) + 2 * 9 * x) // q**3  # 2(16x + w) kept, 39x + 3w gathered again
    moved = 2 * times + 2 * 2 if options.get("outputs_move") else 7 * times
    return (q - 1) * (moved * x // (DEPTH if kind == "2.5d" else 1) + times * weight) // q**2


@pytest.mark.parametrize(("kind", "side"), [*GRIDS, pytest.param("2d", 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "kept", "outputs move", "both"])
def test_the_ledger_equals_the_formula(kind, side, options):
    sizes = CLASSIC if side == 2 else Sizes(rows=9, tokens=2, hidden=18, heads=9, width=2, kv_heads=9, inner=72)
    results = run_ranks(on_grid, _world(kind, side), kind, side, sizes, "", options)
    assert check(results, sizes, "") < TOLERANCE
    expected = formula(kind, side, sizes.rows * sizes.tokens * sizes.hidden, 12 * sizes.hidden**2, options)
    assert [sent for *_, sent in results] == [expected] * len(results)


@pytest.mark.parametrize(("kind", "fault"), [("2d", "sums"), ("3d", "sums"), ("2.5d", "depth")])
def test_without_a_sum_the_gradients_are_wrong(kind, fault):
    results = run_ranks(on_grid, _world(kind, 2), kind, 2, UNEVEN, "rms", {}, fault)
    assert check(results, UNEVEN, "rms") > 1e-3


def _norm_without_its_sum() -> tuple[torch.Tensor, ...]:
    """The gradient of a norm whose backward looks at its own features alone, and of one that does not."""
    grid, _ = make_grid("2d", 2)
    first, last = grid.stream_range(13)
    found = []
    for axis in (grid.both, Axis("alone", (0,), 0)):
        x = draw(4, 13, seed=1)[:, first:last].clone().requires_grad_()
        (scaled_to_one(x, axis, (13,), 1e-5) * draw(4, 13, seed=2)[:, first:last]).sum().backward()
        found.append(x.grad)
    return found[0], found[1], slice(first, last)


def test_a_norm_of_its_own_features_alone_is_wrong():
    x = draw(4, 13, seed=1).requires_grad_()
    (F.rms_norm(x, (13,), eps=1e-5) * draw(4, 13, seed=2)).sum().backward()
    for right, wrong, part in run_ranks(_norm_without_its_sum, 4):
        assert _apart_by(right, x.grad[:, part], x.grad) < TOLERANCE
        assert _apart_by(wrong, x.grad[:, part], x.grad) > 1e-3
