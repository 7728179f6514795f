"""Collectives on plain tensors over an axis of the mesh: in place or into given outputs, at once or in the background.

Every function is counted in the ledger and returns a Pending. On an axis of one rank it copies locally. Tensors without data are
not sent, and counted only where all ranks are imagined too (PyTorch's fake process group): a rank may try a pass out by itself.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor

from phalanx.cluster import deadlock, debug, failure, launch
from phalanx.cluster.buffers import buffers
from phalanx.cluster.ledger import ledger, ring_all_reduce_bytes, tree_broadcast_bytes
from phalanx.cluster.mesh import Axis, group_of
from phalanx.cluster.sentry import blocked
from phalanx.errors import CommError, ShapeError

# The dtypes gloo knows; others are moved as bytes, and cannot be summed.
_GLOO_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64})
_OPERATORS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
# Below this many bytes a shard, one message for all ranks beats one round for each peer without copies.
_ROUNDS_FROM_BYTES = 32 * 1024
_SLICE = timedelta(seconds=0.5)
_HERE = os.path.dirname(os.path.abspath(__file__))
# torch 2.13 renamed these methods of ProcessGroup; the old names stay for 2.11.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"


class Pending:
    """An operation under way: `wait()` returns when its result may be used; waiting again costs nothing.

    Tensors handed over stay untouched until then. On an accelerator that is a promise for work queued after the wait.
    """

    __slots__ = ("_axis", "_finish", "_is_queued", "_message", "_operation", "_works")

    def __init__(
        self,
        operation: str,
        axis: Axis,
        works: Sequence[Any] = (),
        finish: Callable[[], object] | None = None,
        of: torch.Tensor | None = None,
        message: deadlock.Message | None = None,
    ):
        self._message = message
        self._operation, self._axis, self._works, self._finish = operation, axis, works, finish
        self._is_queued = of is not None and of.device.type != "cpu"

    def wait(self) -> None:
        """Raises: CommError where a rank failed, left, or did not come in time."""
        works, self._works = self._works, ()
        for work in works:
            if self._is_queued:
                _queue_behind(work, self._operation, self._axis)
            else:
                _wait(work, self._operation, self._axis, self._message)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def done(self) -> bool:
        """True if `wait()` would not block; False may also mean that the backend does not tell."""
        return all(work.is_completed() for work in self._works)


def all_reduce(tensor: torch.Tensor, axis: Axis, op: str = "sum", wait: bool = True) -> Pending:
    """Combines `tensor` over the axis, in place; `op` is "sum", "max", "min" or "product".

    Cost: 2 (n - 1)/n of the tensor. Grad: see `reduce_from` and `copy_to`.
    """
    if axis.size == 1:
        return _nothing("all_reduce", axis, tensor)
    if _is_tried_out(tensor, axis):
        return Pending("all_reduce", axis)
    flat = _flat(tensor, "all_reduce")
    if flat.dtype is torch.bool and op in ("max", "min"):
        flat = flat.view(torch.uint8)
    if flat.dtype not in _GLOO_DTYPES or op not in _OPERATORS:
        raise CommError(
            f"all_reduce cannot take {op} of {tensor.dtype}", allowed=f"{', '.join(_OPERATORS)} of floats and integers; max and min of bool"
        )
    _begin("all_reduce", axis, tensor, detail=op)
    ledger.count("all_reduce", axis.name, _nbytes(flat), ring_all_reduce_bytes(_nbytes(flat), axis.size))
    if axis.backend == "fake" or not flat.numel():
        return Pending("all_reduce", axis)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPERATORS[op]  # type: ignore[assignment]
    return _started(Pending("all_reduce", axis, [group_of(axis).allreduce([flat], options)], of=flat), wait)


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, axis: Axis, wait: bool = True) -> Pending:
    """Sums `full` over the axis and leaves part `index` of n equal parts in `out`; `full` must stay untouched until the wait.

    Where `out` is wider than `full` (float32 of bfloat16), parts travel narrow and are summed wide. On gloo the n - 1 foreign
    parts are exchanged and summed here in the order of the ranks, so the result does not depend on timing.
    Shapes: `full` has n times the elements of `out`. Cost: (n - 1)/n of `full`.
    """
    if axis.size == 1:
        out.view(-1).copy_(full.reshape(-1))
        return _nothing("reduce_scatter", axis, full)
    if _is_tried_out(full, axis):
        return Pending("reduce_scatter", axis)
    flat_out, flat = _flat(out, "reduce_scatter"), _flat(full, "reduce_scatter")
    _expect_parts("reduce_scatter", "full", flat, flat_out, axis)
    _begin("reduce_scatter", axis, full, detail=str(out.dtype))
    ledger.count("reduce_scatter", axis.name, _nbytes(flat), _nbytes(flat) * (axis.size - 1) // axis.size)
    if axis.backend == "fake" or not flat.numel():
        return Pending("reduce_scatter", axis)
    if flat.device.type == "cpu":
        return _started(_reduce_scatter_here(flat_out, flat, axis), wait)
    target = flat_out if flat_out.dtype == flat.dtype else torch.empty_like(flat_out, dtype=flat.dtype)
    if target is flat_out:
        work = getattr(group_of(axis), _REDUCE_SCATTER)(flat_out, flat)
        return _started(Pending("reduce_scatter", axis, [work], of=flat), wait)
    wide = flat.to(flat_out.dtype)  # the backend sums in the dtype it is given
    work = getattr(group_of(axis), _REDUCE_SCATTER)(flat_out, wide)
    return _started(Pending("reduce_scatter", axis, [work], of=flat), wait)


def all_gather(out: torch.Tensor, shard: torch.Tensor, axis: Axis, wait: bool = True) -> Pending:
    """Puts the shards of all ranks into `out` in the order of the axis; `shard` may be this rank's own part of `out`.

    Shapes: `out` has n times the elements of `shard`. Cost: n - 1 shards. Grad: see `gather_from`.
    """
    if axis.size == 1:
        if isinstance(out, FakeTensor) or out.is_meta or out.data_ptr() != shard.data_ptr():
            out.view(-1).copy_(shard.reshape(-1))
        return _nothing("all_gather", axis, shard)
    if _is_tried_out(shard, axis):
        return Pending("all_gather", axis)
    flat_out, flat = _as_bytes(_flat(out, "all_gather")), _as_bytes(_flat(shard, "all_gather"))
    if out.dtype != shard.dtype:
        raise ShapeError(f"all_gather of {shard.dtype} into {out.dtype}", allowed="equal dtypes")
    _expect_parts("all_gather", "out", flat_out, flat, axis)
    _begin("all_gather", axis, shard)
    ledger.count("all_gather", axis.name, _nbytes(flat), _nbytes(flat) * (axis.size - 1))
    if axis.backend == "fake" or not flat.numel():
        return Pending("all_gather", axis)
    if flat.device.type == "cpu" and (axis.size == 2 or _nbytes(flat) >= _ROUNDS_FROM_BYTES):
        own = flat_out.narrow(0, axis.index * flat.numel(), flat.numel())
        works = _rounds(axis, lambda peer: flat, lambda peer: flat_out.narrow(0, peer * flat.numel(), flat.numel()))
        if own.data_ptr() != flat.data_ptr():
            own.copy_(flat)
        return _started(Pending("all_gather", axis, works), wait)
    return _started(Pending("all_gather", axis, [getattr(group_of(axis), _ALL_GATHER)(flat_out, flat)], of=flat), wait)


def all_to_all(
    out: torch.Tensor,
    inp: torch.Tensor,
    axis: Axis,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    wait: bool = True,
) -> Pending:
    """Sends part j of `inp` to rank j and receives part j of `out` from it; splits count rows of the first dimension.

    Cost: all parts of `inp` but one's own. Grad: the same with the splits exchanged.
    """
    if axis.size == 1:
        out.view(-1).copy_(inp.reshape(-1))
        return _nothing("all_to_all", axis, inp)
    if _is_tried_out(inp, axis):
        return Pending("all_to_all", axis)
    out_counts, in_counts = _split_counts(out, out_splits, axis), _split_counts(inp, in_splits, axis)
    _begin("all_to_all", axis, inp, splits=(out_counts, in_counts))
    foreign = sum(in_counts) - in_counts[axis.index]
    ledger.count("all_to_all", axis.name, inp.numel() * inp.element_size(), foreign * inp.element_size())
    if axis.backend == "fake":
        return Pending("all_to_all", axis)
    flat_out, flat = _flat(out, "all_to_all"), _flat(inp, "all_to_all")
    if flat.dtype not in _GLOO_DTYPES:
        width = flat.element_size()
        flat_out, flat = _as_bytes(flat_out), _as_bytes(flat)
        out_counts, in_counts = [count * width for count in out_counts], [count * width for count in in_counts]
    work = group_of(axis).alltoall_base(flat_out, flat, out_counts, in_counts)
    return _started(Pending("all_to_all", axis, [work], of=flat), wait)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0, wait: bool = True) -> Pending:
    """Copies the tensor of the rank at index `source` of the axis to all others, in place.

    Cost: up to log2(n) times the tensor at the source, (n - 1)/n on average.
    """
    if axis.size == 1:
        return _nothing("broadcast", axis, tensor)
    if _is_tried_out(tensor, axis):
        return Pending("broadcast", axis)
    flat = _as_bytes(_flat(tensor, "broadcast"))
    _begin("broadcast", axis, tensor, detail=f"source {source}")
    ledger.count("broadcast", axis.name, _nbytes(flat), tree_broadcast_bytes(_nbytes(flat), axis.size, axis.index, source))
    if axis.backend == "fake" or not flat.numel():
        return Pending("broadcast", axis)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return _started(Pending("broadcast", axis, [group_of(axis).broadcast([flat], options)], of=flat), wait)


def send(tensor: torch.Tensor, axis: Axis, peer: int, wait: bool = True) -> Pending:
    """Sends to the rank at index `peer` of the axis; messages between two ranks arrive in the order they were sent."""
    if _is_tried_out(tensor, axis):
        return Pending("send", axis)
    flat = _as_bytes(_flat(tensor, "send"))
    _begin("send", axis, tensor, peer=peer)
    ledger.count("send", axis.name, _nbytes(flat), _nbytes(flat))
    if axis.backend == "fake":
        return Pending("send", axis)
    message = deadlock.begin_message(axis.name, axis.channel, axis.ranks[axis.index], axis.ranks[peer], axis.ranks[axis.index])
    return _started(Pending("send", axis, [group_of(axis).send([flat], peer, 0)], of=flat, message=message), wait)


def recv(tensor: torch.Tensor, axis: Axis, peer: int, wait: bool = True) -> Pending:
    """Receives into `tensor` from the rank at index `peer` of the axis."""
    if _is_tried_out(tensor, axis):
        return Pending("recv", axis)
    flat = _as_bytes(_flat(tensor, "recv"))
    _begin("recv", axis, tensor, peer=peer)
    ledger.count("recv", axis.name, 0, 0)
    if axis.backend == "fake":
        return Pending("recv", axis)
    message = deadlock.begin_message(axis.name, axis.channel, axis.ranks[peer], axis.ranks[axis.index], axis.ranks[axis.index])
    return _started(Pending("recv", axis, [group_of(axis).recv([flat], peer, 0)], of=flat, message=message), wait)


def barrier(axis: Axis) -> None:
    """Returns when every rank of the axis has come here."""
    if axis.size == 1:
        return
    _begin("barrier", axis)
    ledger.count("barrier", axis.name, 0, 0)
    if axis.backend != "fake":
        _wait(group_of(axis).barrier(dist.BarrierOptions()), "barrier", axis, None)


def gather_objects(obj: object, axis: Axis) -> list[Any]:
    """The objects of all ranks in the order of the axis, on every rank. Cost: n - 1 times the longest pickle."""
    if axis.size == 1 or axis.backend == "fake":
        return [obj] * axis.size
    payload = pickle.dumps(obj)
    lengths = torch.empty(axis.size, dtype=torch.int64)
    all_gather(lengths, torch.tensor([len(payload)]), axis)
    longest = int(lengths.max())
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    everyone = torch.empty(axis.size, longest, dtype=torch.uint8)
    all_gather(everyone, mine, axis)
    return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(everyone, lengths.tolist(), strict=True)]


def broadcast_object(obj: object, axis: Axis, source: int = 0) -> Any:
    """The object of the rank at index `source`, on every rank."""
    if axis.size == 1 or axis.backend == "fake":
        return obj
    payload = pickle.dumps(obj) if axis.index == source else b""
    length = torch.tensor([len(payload)])
    broadcast(length, axis, source)
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(int(length), dtype=torch.uint8)
    broadcast(data, axis, source)
    return obj if axis.index == source else pickle.loads(data.numpy().tobytes())


def fail(message: str) -> NoReturn:
    """Ends the job from a rank that found an inconsistency: every rank raises, naming this one. Raises: CommError."""
    raise_and_publish(CommError(message))


def raise_and_publish(error: CommError) -> NoReturn:
    """Makes `error` the job's failure and raises it here."""
    failure.publish(error)
    raise error


def _reduce_scatter_here(out: torch.Tensor, full: torch.Tensor, axis: Axis) -> Pending:
    """The exchange of foreign parts now, the sum in the order of the ranks when waited for."""
    count = out.numel()
    if full.dtype not in _GLOO_DTYPES:
        raise CommError(f"reduce_scatter cannot sum {full.dtype}", allowed="floats and integers")
    mine = full.narrow(0, axis.index * count, count)
    if axis.size == 2 or _nbytes(mine) >= _ROUNDS_FROM_BYTES:
        received = buffers.take(count * (axis.size - 1), full.dtype)
        # Peer p's part lies at place p of the received ones, this rank's own place left out.
        slots = {peer: received.narrow(0, (peer - (peer > axis.index)) * count, count) for peer in range(axis.size) if peer != axis.index}
        works = _rounds(axis, lambda peer: full.narrow(0, peer * count, count), slots.__getitem__)
        parts = [mine if peer == axis.index else slots[peer] for peer in range(axis.size)]
    else:
        received = buffers.take(full.numel(), full.dtype)
        works = [group_of(axis).alltoall_base(received, full, [], [])]
        parts = list(received.chunk(axis.size))

    def finish() -> None:
        _sum_in_order(out, parts)
        buffers.give(received)

    return Pending("reduce_scatter", axis, works, finish)


def _sum_in_order(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        own = next((part for part in parts if part.data_ptr() == out.data_ptr() and part.dtype == out.dtype), None)
        if own is not None:  # in place: the own part is where the sum goes, so it comes first
            rest = [part for part in parts if part is not own]
        elif out.dtype == parts[0].dtype:
            torch.add(parts[0], parts[1], out=out)
            rest = list(parts[2:])
        else:
            out.copy_(parts[0])
            rest = list(parts[1:])
        for part in rest:
            out.add_(part)


def _rounds(axis: Axis, outgoing: Callable[[int], torch.Tensor], incoming: Callable[[int], torch.Tensor]) -> list[Any]:
    """Starts n - 1 exchanges, in round k with the ranks k places on and back, straight from and into the given tensors.

    An all-to-all with one part each: it runs in the background without a copy, and a wait on it can be left.
    """
    size, index = axis.size, axis.index
    works = []
    for step in range(1, size):
        target, origin = (index + step) % size, (index - step) % size
        leaving, arriving = outgoing(target), incoming(origin)
        in_splits, out_splits = [0] * size, [0] * size
        in_splits[target], out_splits[origin] = leaving.numel(), arriving.numel()
        works.append(group_of(axis).alltoall_base(arriving, leaving, out_splits, in_splits))
    return works


def _is_tried_out(tensor: torch.Tensor, axis: Axis) -> bool:
    """Whether this rank alone tries out, without data, what it will do with the others of the axis."""
    return isinstance(tensor, FakeTensor) and axis.backend != "fake"


def _begin(operation: str, axis: Axis, tensor: torch.Tensor | None = None, **details: Any) -> None:
    """Before every operation: stop where the job has failed; compare with the other ranks in debug mode."""
    failed = failure.noticed()
    if failed is not None:
        raise failure.peer_error(failed, f"about to {operation} on axis {axis.name} at {call_site()}")
    if launch.world().debug and axis.backend != "fake":
        debug.compare(operation, axis, tensor, call_site(), **details)


def _started(pending: Pending, wait: bool) -> Pending:
    if wait:
        pending.wait()
    return pending


def _nothing(operation: str, axis: Axis, tensor: torch.Tensor) -> Pending:
    ledger.count(operation, axis.name, _nbytes(tensor), 0)
    return Pending(operation, axis)


def _queue_behind(work: Any, operation: str, axis: Axis) -> None:
    """Lets the device's current stream wait, not this process; time-outs are the backend's, failures are noticed by `_begin`.

    Given a time-out, NCCL and HCCL would hold up the process until the operation has ended.
    """
    try:
        work.wait()
    except RuntimeError as error:
        _raise_broken(error, operation, axis)


def _wait(work: Any, operation: str, axis: Axis, message: deadlock.Message | None) -> None:
    """Waits in slices, so that another rank's failure is noticed; work that ends in time returns at once."""
    if axis.group is not None and message is not None:
        # gloo drops the connection when such a wait runs out, so it cannot be sliced; a failed peer closes it from its side.
        with blocked(message):
            if not _ends_within(work, timedelta(seconds=launch.world().timeout_s), operation, axis, last=True):
                _raise_broken(None, operation, axis)
    elif not _ends_within(work, _SLICE, operation, axis):
        _wait_long(work, operation, axis)


def _wait_long(work: Any, operation: str, axis: Axis) -> None:
    current = launch.world()
    assert current.store is not None  # axes of several ranks have one
    with deadlock.waiting(current.store, current.rank, f"{operation} on axis {axis.name}", axis.ranks) as search:
        for _ in range(max(1, round(current.timeout_s / _SLICE.total_seconds()))):
            if _ends_within(work, _SLICE, operation, axis):
                return
            if failure.noticed() is not None:
                break
            search.look()
    _raise_broken(None, operation, axis)


def _ends_within(work: Any, slice_: timedelta, operation: str, axis: Axis, last: bool = False) -> bool:
    """Whether the work is done after this slice. Raises: CommError where it broke."""
    try:
        work.wait(slice_)
        return True
    except RuntimeError as error:
        if failure.noticed() is not None or last:
            _raise_broken(error, operation, axis)
        return work.is_completed() and _ended_well(work, operation, axis)


def _ended_well(work: Any, operation: str, axis: Axis) -> bool:
    """Work that ended as its slice ran out may have succeeded: waiting again tells. Raises: CommError where it broke."""
    try:
        work.wait()
    except RuntimeError as error:
        _raise_broken(error, operation, axis)
    return True


def _raise_broken(error: BaseException | None, operation: str, axis: Axis) -> NoReturn:
    """Turns a broken or endless wait into an error that names the rank behind it."""
    doing = f"waiting in {operation} on axis {axis.name} at {call_site()}"
    failed = failure.noticed() or failure.awaited(3.0)
    if failed is not None:
        raise failure.peer_error(failed, doing) from None
    cause = "the time-out passed" if error is None else str(error).split("\n")[0]
    raise_and_publish(CommError(f"rank {launch.world().rank} broke off {doing}: {cause}"))


def call_site() -> str:
    """File and line of the innermost frame outside this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _flat(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{operation} of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}", allowed="contiguous tensors"
        )
    return tensor.detach().view(-1)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.dtype in _GLOO_DTYPES else flat.view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _expect_parts(operation: str, name: str, whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> None:
    if whole.numel() != part.numel() * axis.size:
        found = f"{operation} on axis {axis.name}: {name} has {whole.numel()} elements and the part {part.numel()}"
        raise ShapeError(found, allowed=f"{axis.size} equal parts")


def _split_counts(tensor: torch.Tensor, splits: Sequence[int] | None, axis: Axis) -> list[int]:
    """The elements of each rank's part, from rows of the first dimension."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if rows % axis.size:
            raise ShapeError(f"all_to_all of {rows} rows over {axis.size} ranks", remedy="give out_splits and in_splits")
        splits = [rows // axis.size] * axis.size
    if len(splits) != axis.size or sum(splits) != rows:
        raise ShapeError(
            f"all_to_all splits {list(splits)} for {rows} rows over {axis.size} ranks", allowed="one number a rank that add up to the rows"
        )
    width = tensor.numel() // rows if rows else 0
    return [count * width for count in splits]
