"""Attention over a ring, over Ulysses and over their grid, against one process, in float64: the output and every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.kernels.attention import Form
from phalanx.kernels.attention_sight import Sight
from phalanx.parallel.sequence import Cut, Grid, Rows, attention
from phalanx.parallel.sequence import ring as ring_module
from phalanx.parallel.sequence.cut import reach_of
from phalanx.testing import run_ranks

TOLERANCE = 1e-9
DOCUMENTS = (1, 7, 3, 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: what is seen, in which form, by how many heads."""

    name: str
    length: int = 13
    heads: int = 4
    groups: int = 4
    width: int = 3
    value_width: int = 3
    before: int | None = None
    after: int | None = 0
    documents: tuple[int, ...] = ()
    padding: str = ""
    dense: str = ""
    logits: float = 1.0
    softcap: float | None = None


CASES = (
    Case("causal"),
    Case("causal, even", length=16),
    Case("bidirectional", after=None),
    Case("grouped heads", heads=6, groups=2),
    Case("one key head", heads=5, groups=1, after=None),
    Case("fewer heads than ranks", heads=2, groups=1, after=None),
    Case("large logits", logits=30.0),
    Case("large logits, bidirectional", logits=30.0, after=None, groups=2),
    Case("documents", documents=DOCUMENTS),
    Case("documents, bidirectional", documents=DOCUMENTS, after=None),
    Case("documents, large logits, grouped", documents=DOCUMENTS, logits=30.0, groups=2),
    Case("an empty rank", length=3),
    Case("one token", length=1),
    Case("padding left", padding="left"),
    Case("padding right", padding="right"),
    Case("padding right, bidirectional", padding="right", after=None),
    Case("window", before=3),
    Case("window, grouped, documents", before=3, groups=2, documents=(2, 9, 2)),
    Case("window both ways", before=4, after=4),
    Case("boolean mask", dense="bool", after=None),
    Case("bias that falls with distance", dense="slopes"),
    Case("soft cap", softcap=2.0, padding="left", logits=3.0),
    Case("values of another width", value_width=5, groups=2),
)


def tensors_of(case: Case) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(len(case.name))
    draw = lambda heads, width: torch.randn(2, heads, case.length, width, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(case.heads, case.width), draw(case.groups, case.width), draw(case.groups, case.value_width)
    return q * case.logits, k, v, draw(case.heads, case.value_width)


def described(case: Case) -> tuple[Form, dict[str, torch.Tensor | None]]:
    """The form of the scores, and documents, hidden tokens and reach of the rows."""
    hidden = documents = dense = None
    if case.documents:
        documents = torch.repeat_interleave(torch.arange(len(case.documents)), torch.tensor(case.documents)).repeat(2, 1)
    if case.padding:
        lengths = torch.tensor([[case.length], [case.length // 3]])
        places = torch.arange(case.length)[None]
        hidden = places >= lengths if case.padding == "right" else places < case.length - lengths
    if case.dense == "bool":
        dense = torch.rand(2, 1, case.length, case.length, generator=torch.Generator().manual_seed(1)) < 0.5
    if case.dense == "slopes":
        places = torch.arange(case.length, dtype=torch.float64)
        dense = (places[None, :] - places[:, None])[None, None] * torch.linspace(0.1, 1, case.heads, dtype=torch.float64)[
            None, :, None, None
        ]
    form = Form(scale=0.4, softcap=case.softcap, dense=dense)
    return form, {"documents": documents, "hidden": hidden, "reach": reach_of(documents, hidden, case.length)}


def expected(case: Case) -> tuple[torch.Tensor, ...]:
    """Output and gradients by the definition, with one mask of everything."""
    q, k, v, weights = tensors_of(case)
    form, rows = described(case)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    share = case.heads // case.groups
    scores = q @ k.repeat_interleave(share, 1).mT * form.scale
    if form.softcap:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    distance = torch.arange(case.length)[None, :] - torch.arange(case.length)[:, None]
    seen = (distance >= -(case.before if case.before is not None else case.length)) & (
        distance <= (case.length if case.after is None else case.after)
    )
    seen = seen[None, None]
    if rows["documents"] is not None:
        seen = seen & (rows["documents"][:, None, :, None] == rows["documents"][:, None, None, :])
    if rows["hidden"] is not None:
        seen = seen & ~rows["hidden"][:, None, None, :]
    if form.dense is not None:
        seen, scores = (seen & form.dense, scores) if form.dense.dtype == torch.bool else (seen, scores + form.dense)
    weights_of_keys = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0.0)
    out = weights_of_keys.nan_to_num(0.0) @ v.repeat_interleave(share, 1)
    # A row that sees nothing gives 0 / 0 in the definition; its gradient is left out before it can spread.
    blind = ~seen.expand(2, case.heads, -1, -1).any(-1, keepdim=True)
    if blind.any():
        safe = torch.softmax(scores.masked_fill(~seen & ~blind, -torch.inf), -1).masked_fill(blind, 0.0)
        out = safe @ v.repeat_interleave(share, 1)
    (out * weights).sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def grid_of(ulysses: int, ring: int) -> Grid:
    mesh = Mesh({"ring": ring, "ulysses": ulysses})
    assert launch.world().size == ulysses * ring
    return Grid(mesh.axis("ring"), mesh.axis("ulysses"))


def local_results(ulysses: int, ring: int, cases: tuple[Case, ...]) -> list[tuple[torch.Tensor, ...]]:
    """For every case this rank's places, output and gradients."""
    grid, found = grid_of(ulysses, ring), []
    for case in cases:
        cut = Cut(case.length, ring, ulysses)
        places = cut.places(grid.ring.index, grid.ulysses.index)
        form, described_rows = described(case)
        pick = lambda whole: torch.nn.functional.pad(whole, (0, 0, 0, cut.padded - case.length))[:, :, places]  # noqa: E731, B023
        q, k, v, weights = (pick(tensor) for tensor in tensors_of(case))
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = attention(q, k, v, Sight(case.before, case.after), form, Rows(cut, **described_rows), grid)
        (out * weights).sum().backward()
        found.append((places, out.detach(), q.grad, k.grad, v.grad))
    return found


def _without_merging(ulysses: int, ring: int, cases: tuple[Case, ...]) -> list[tuple[torch.Tensor, ...]]:
    """The fault that a ring without log-sum-exp has: partial results are averaged."""
    original = ring_module.merge
    ring_module.merge = lambda out, lse, part, part_lse: out.add_(part).div_(2)
    try:
        return local_results(ulysses, ring, cases)
    finally:
        ring_module.merge = original


def worst_error(program: Callable, ulysses: int, ring: int, cases: tuple[Case, ...]) -> dict[str, float]:
    """The largest error of each case over output and gradients, all tokens of all ranks; every token is on exactly one rank."""
    of_rank = run_ranks(program, ulysses * ring, ulysses, ring, cases)
    errors = {}
    for number, case in enumerate(cases):
        places = torch.cat([found[number][0] for found in of_rank])
        order = places.argsort()
        assert places[order].tolist() == list(range(Cut(case.length, ring, ulysses).padded))
        errors[case.name], wholes = 0.0, expected(case)
        least = 1e-6 * max(float(whole.abs().max()) for whole in wholes)  # a single token's queries have a true gradient of 0
        for kind, whole in enumerate(wholes, start=1):
            joined = torch.cat([found[number][kind] for found in of_rank], 2)[:, :, order][:, :, : case.length]
            assert joined.isfinite().all(), case.name
            errors[case.name] = max(errors[case.name], float((joined - whole).abs().max() / whole.abs().max().clamp(min=least)))
    return errors


GRIDS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1), (1, 4)]


@pytest.mark.parametrize(("ulysses", "ring"), GRIDS)
def test_attention_equals_one_process(ulysses, ring):
    errors = worst_error(local_results, ulysses, ring, CASES)
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 4), (4, 2), (8, 1), (1, 8), (3, 2), (2, 3)])
def test_attention_equals_one_process_on_larger_grids(ulysses, ring):
    errors = worst_error(local_results, ulysses, ring, CASES)
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


def test_a_ring_that_averages_is_found():
    errors = worst_error(_without_merging, 1, 2, (Case("bidirectional", after=None), Case("large logits", logits=30.0)))
    assert min(errors.values()) > 1e-3


def _wire(ulysses: int, ring: int, heads: int, groups: int, length: int, width: int) -> tuple[dict, dict]:
    """Elements on the wire of one attention by axis, forward and backward."""
    grid, cut = grid_of(ulysses, ring), Cut(length, ring, ulysses)
    shape = lambda number: (2, number, cut.local_length, width)  # noqa: E731
    q, k, v = (torch.randn(shape(number), dtype=torch.float64, requires_grad=True) for number in (heads, groups, groups))
    with comm.ledger.record() as forward:
        out = attention(q, k, v, Sight(after=0), Form(scale=0.5), Rows(cut), grid)
    with comm.ledger.record() as backward:
        out.sum().backward()
    elements = lambda rows: {axis: wire // 8 for _, axis, _, _, wire in rows if wire}  # noqa: E731
    return elements(forward), elements(backward)


@pytest.mark.parametrize(
    ("ulysses", "ring", "heads", "groups", "copies"), [(2, 1, 4, 2, 2), (4, 1, 8, 2, 4), (1, 4, 4, 2, 2), (2, 2, 4, 4, 4), (1, 2, 2, 1, 1)]
)
def test_bytes_follow_the_formulas(ulysses, ring, heads, groups, copies):
    """`copies` is the number of key heads that Ulysses sends, replicas counted."""
    rows, length, width = 2, 48, 3
    h, h_kv, s = heads * width, copies * width, length // ring
    want_forward, want_backward = {}, {}
    if ulysses > 1:
        want_forward["ulysses"] = want_backward["ulysses"] = (ulysses - 1) * (2 * h + 2 * h_kv) * rows * s // ulysses // ulysses
    if ring > 1:
        want_forward["ring"] = (ring - 1) * 2 * rows * length * h_kv // ulysses // ring
        want_backward["ring"] = 2 * want_forward["ring"]
    for forward, backward in run_ranks(_wire, ulysses * ring, ulysses, ring, heads, groups, length, width):
        assert (forward, backward) == (want_forward, want_backward)


def _dropped(ring: int, ulysses: int) -> tuple[torch.Tensor, float]:
    """The part of weights that dropout leaves, and the error of a gradient against a difference quotient."""
    grid, cut = grid_of(ulysses, ring), Cut(64, ring, ulysses)
    torch.manual_seed(grid.ring.index)
    q, k = (torch.zeros(1, 2, cut.local_length, 3, dtype=torch.float64) for _ in range(2))
    v = torch.ones(1, 2, cut.local_length, 1, dtype=torch.float64, requires_grad=True)
    form = Form(scale=1.0, dropout=0.3, seed=7 + grid.ring.index)
    run = lambda value: attention(q, k, value, Sight(), form, Rows(cut), grid)  # noqa: E731
    out = run(v)
    out.sum().backward()
    with torch.no_grad():
        again = run(v.detach())
    assert torch.equal(out, again)  # the same seed draws the same
    # Linear in v: the output must be the gradient's product with v, summed over all ranks.
    total = torch.stack([out.detach().sum(), v.grad.sum()])
    for axis in (grid.ring, grid.ulysses):
        comm.all_reduce(total, axis)
    return out.detach().mean(), float((total[0] - total[1]).abs() / total[0])


def test_dropout_keeps_its_rate_and_its_draws():
    found = run_ranks(_dropped, 2, 2, 1)
    assert abs(float(torch.stack([mean for mean, _ in found]).mean()) - 1.0) < 0.05
    assert all(error < 1e-12 for _, error in found)
    assert not torch.equal(found[0][0], found[1][0])
