"""Collectives on gloo ranks against what one process computes, and the ledger against closed forms."""

from __future__ import annotations

import pytest
import torch

from phalanx.cluster import collectives, comm, launch
from phalanx.cluster.mesh import Axis, Mesh
from phalanx.errors import CommError, ShapeError
from phalanx.testing import RankError, run_ranks

SMALL, LARGE = 5, 40_000  # below and above the size from which parts travel in rounds


def _axis() -> Axis:
    return Mesh({"dp": launch.world().size}).axis("dp")


def _own(rank: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def _reduce_and_gather(count: int, wait: bool) -> tuple[torch.Tensor, ...]:
    axis = _axis()
    n, rank = axis.size, axis.index
    total, part, whole = _own(rank, count), torch.empty(count, dtype=torch.float64), torch.empty(n * count, dtype=torch.float64)
    pending = [
        comm.all_reduce(total, axis, wait=wait),
        comm.reduce_scatter(part, _own(rank, n * count), axis, wait=wait),
        comm.all_gather(whole, _own(rank, count), axis, wait=wait),
    ]
    for operation in reversed(pending):
        operation.wait()
        operation.wait()
        assert operation.done()
    return total, part, whole


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("wait", [True, False])
def test_reduce_and_gather(n, count, wait):
    results = run_ranks(_reduce_and_gather, n, count, wait)
    total = sum(_own(rank, count) for rank in range(n))
    scattered = sum(_own(rank, n * count) for rank in range(n)).chunk(n)
    for rank, (reduced, part, whole) in enumerate(results):
        torch.testing.assert_close(reduced, total, rtol=1e-13, atol=1e-13)
        assert torch.equal(part, scattered[rank]), "summed in another order than that of the ranks"
        assert torch.equal(whole, torch.cat([_own(other, count) for other in range(n)]))


def _in_place() -> tuple[torch.Tensor, torch.Tensor]:
    axis = _axis()
    full = torch.full((axis.size, LARGE), float(axis.index + 1))
    comm.reduce_scatter(full[axis.index], full, axis)
    whole = torch.zeros(axis.size, LARGE)
    whole[axis.index] = axis.index + 1
    comm.all_gather(whole, whole[axis.index], axis)
    return full[axis.index].clone(), whole


def test_parts_may_lie_in_the_whole():
    for part, whole in run_ranks(_in_place, 3):
        assert torch.equal(part, torch.full((LARGE,), 6.0))
        assert torch.equal(whole, torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, LARGE))


def _narrow_in_wide_out(n: int) -> torch.Tensor:
    axis = _axis()
    full = torch.full((axis.size, 64), 1.0 if axis.index else 256.0, dtype=torch.bfloat16)
    out = torch.empty(64)
    comm.reduce_scatter(out, full, axis)
    return out


def test_bfloat16_is_summed_in_float32():
    for out in run_ranks(_narrow_in_wide_out, 4, 4):
        assert torch.equal(out, torch.full((64,), 259.0))  # bfloat16 would stay at 256


def _every_dtype() -> dict[str, list[float]]:
    axis, seen = _axis(), {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.int16, torch.float8_e4m3fn):
        mine = torch.tensor([axis.index, 1]).to(dtype)
        whole = torch.empty(axis.size * 2, dtype=dtype)
        comm.all_gather(whole, mine, axis)
        first = mine.clone()
        comm.broadcast(first, axis, source=1)
        swapped = torch.empty(axis.size, dtype=dtype)
        comm.all_to_all(swapped, torch.full((axis.size,), axis.index).to(dtype), axis)
        seen[str(dtype)] = [*whole.float().tolist(), *first.float().tolist(), *swapped.float().tolist()]
    return seen


def test_every_dtype_travels():
    for seen in run_ranks(_every_dtype, 2):
        for values in seen.values():
            assert values == [0, 1, 1, 1, 1, 1, 0, 1]


def _bool_and_refusals() -> list[bool]:
    axis = _axis()
    flag = torch.tensor([axis.index == 1, False])
    comm.all_reduce(flag, axis, op="max")
    for bad, op in ((torch.zeros(2, dtype=torch.float8_e4m3fn), "sum"), (torch.zeros(2, dtype=torch.bool), "sum"), (torch.zeros(2), "avg")):
        with pytest.raises(CommError, match="all_reduce cannot take"):
            comm.all_reduce(bad, axis, op=op)
    with pytest.raises(ShapeError, match="contiguous"):
        comm.all_reduce(torch.zeros(2, 3).t(), axis)
    with pytest.raises(ShapeError, match="equal parts"):
        comm.reduce_scatter(torch.zeros(2), torch.zeros(5), axis)
    return flag.tolist()


def test_flags_are_joined_and_what_cannot_be_summed_is_refused():
    assert run_ranks(_bool_and_refusals, 2) == [[True, False]] * 2


def _uneven_all_to_all() -> torch.Tensor:
    axis = _axis()
    in_splits = [axis.index + peer for peer in range(axis.size)]  # rank 0 sends nothing to itself
    out_splits = [peer + axis.index for peer in range(axis.size)]
    out = torch.empty(sum(out_splits), 2)
    comm.all_to_all(out, torch.full((sum(in_splits), 2), float(axis.index)), axis, out_splits, in_splits)
    return out[:, 0]


def test_uneven_all_to_all():
    for rank, out in enumerate(run_ranks(_uneven_all_to_all, 3)):
        assert out.tolist() == [peer for peer in range(3) for _ in range(peer + rank)]


def _messages() -> list[float]:
    axis, got = _axis(), []
    for value in range(3):
        back, on = torch.empty(1), torch.full((1,), 10.0 * axis.index + value)
        pending = comm.send(on, axis, (axis.index + 1) % axis.size, wait=False)
        comm.recv(back, axis, (axis.index - 1) % axis.size)
        pending.wait()
        got.append(back.item())
    return got


def test_messages_arrive_in_order():
    assert run_ranks(_messages, 3) == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]


def _objects() -> tuple[list, object]:
    axis = _axis()
    comm.barrier(axis)
    return comm.gather_objects({"rank": axis.index, "text": "x" * axis.index}, axis), comm.broadcast_object([axis.index], axis, source=1)


def test_objects():
    for gathered, told in run_ranks(_objects, 3):
        assert gathered == [{"rank": rank, "text": "x" * rank} for rank in range(3)]
        assert told == [1]


def _one_rank() -> None:
    axis, x = _axis(), torch.arange(4.0)
    out = torch.empty(4)
    comm.reduce_scatter(out, x, axis)
    comm.all_gather(x, out, axis)
    comm.all_to_all(x, out, axis)
    comm.all_reduce(x, axis)
    comm.barrier(axis)
    assert comm.gather_objects(3, axis) == [3]
    assert torch.equal(x, torch.arange(4.0))
    assert axis.group is None


def test_one_rank_needs_no_group():
    run_ranks(_one_rank, 1)


def _mesh() -> dict[str, tuple[int, ...]]:
    mesh = Mesh({"dp": 2, "pp": 1, "cp": 1, "tp": 3})
    outer, inner = mesh.split(mesh.world, 2)
    seen = {axis.name: axis.ranks for axis in (mesh.axis("dp"), mesh.axis("tp"), mesh.axis("tp", "dp"), mesh.world, outer, inner)}
    for axis in (mesh.axis("dp"), mesh.axis("tp"), outer, inner, mesh.axis("dp", "cp")):
        total = torch.ones(1)
        comm.all_reduce(total, axis)
        assert total.item() == axis.size
        assert axis.ranks[axis.index] == launch.world().rank
    assert mesh.axis("dp", "cp").group is mesh.axis("dp").group
    return seen


def test_mesh_lays_ranks_outermost_first():
    seen = run_ranks(_mesh, 6)
    assert seen[4] == {
        "dp": (1, 4), "tp": (3, 4, 5), "dp.tp": (0, 1, 2, 3, 4, 5), "world": (0, 1, 2, 3, 4, 5),
        "world:outer": (0, 2, 4), "world:inner": (4, 5),
    }  # fmt: skip


def _count() -> list:
    axis, count = _axis(), 12
    with comm.ledger.record() as rows:
        comm.all_reduce(torch.zeros(count), axis)
        comm.reduce_scatter(torch.zeros(count // axis.size), torch.zeros(count, dtype=torch.bfloat16), axis)
        comm.all_gather(torch.zeros(count), torch.zeros(count // axis.size), axis)
        comm.all_to_all(torch.zeros(count), torch.zeros(count), axis)
        comm.broadcast(torch.zeros(count), axis)
        comm.broadcast(torch.zeros(count), axis)
    return rows


def test_ledger_counts_what_each_rank_sends():
    for rank, rows in enumerate(run_ranks(_count, 3)):
        counted = {operation: numbers for operation, axis, *numbers in rows}
        assert counted == {
            "all_reduce": [1, 48, 64],
            "reduce_scatter": [1, 24, 16],
            "all_gather": [1, 16, 32],
            "all_to_all": [1, 48, 32],
            "broadcast": [2, 96, 2 * 48 * [2, 0, 0][rank]],
        }


def _wrong() -> None:
    total = torch.ones(1)
    comm.all_reduce(total, _axis())
    assert total.item() == 3


def test_a_wrong_sum_is_seen():
    with pytest.raises(RankError, match="AssertionError"):
        run_ranks(_wrong, 2)


def _released() -> tuple[int, int]:
    comm.reduce_scatter(torch.empty(5000), torch.ones(10000), _axis())
    kept = len(collectives.buffers._free)
    comm.release_buffers()
    return kept, len(collectives.buffers._free)


def test_receive_buffers_are_kept_until_released():
    assert run_ranks(_released, 2) == [(1, 0)] * 2
