"""The sharded state engine of one model: it owns parameters, gradients and what the optimizer updates, under one policy.

A step through it:  begin_backward -> [hooks collect, reduce, gather, release] -> end_backward  (once per pass)
                    finish_gradients -> agree on statistics -> expose_gradients -> optimizer.step -> publish -> clear
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ConfigError
from phalanx.layout import Layout, Piece
from phalanx.memory.chunk import Chunk, Slot, as_real
from phalanx.memory.partition import Unit, by_kind, find_units
from phalanx.memory.policy import ZERO, Policy
from phalanx.memory.reduction import GradientReducer, sparse_gradient
from phalanx.memory.stream import ParameterStream
from phalanx.precision import DTypes, Precision

FillParameters = Callable[[Callable[[str, torch.Tensor], None]], None]


class StateEngine:
    """Shards the state of `model` over `shard_axis` and replicates the shards over `replica_axis`.

    `blocks` are the model's layer stacks; `fill`, for a model without memory yet, produces (name, full value) one by one.
    Cost: bytes per rank as in `policy`; parameters are taken over chunk by chunk, so that one chunk exists twice at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        stage: int,
        precision: Precision,
        shard_axis: Axis,
        replica_axis: Axis,
        reduce_axis: Axis,
        device: torch.device,
        fill: FillParameters | None = None,
    ):
        self.model, self.device, self.precision = model, device, precision
        self.shard_axis, self.replica_axis, self.reduce_axis = shard_axis, replica_axis, reduce_axis
        self.policy = ZERO[stage if shard_axis.size > 1 else 0]
        self.units = find_units(model, blocks)
        for unit in self.units:
            self._make_chunks(unit, lazy=fill is not None)
        self.chunks = [chunk for unit in self.units for chunk in unit.chunks]
        self.slots = [(chunk, slot) for chunk in self.chunks for slot in chunk.slots]
        self.by_name = {slot.name: (chunk, slot) for chunk, slot in self.slots}
        if fill is not None:
            fill(self._adopt_by_name)
            for slot in (slot for _, slot in self.slots):
                for module, attribute in slot.owners:
                    module._parameters[attribute] = slot.parameter
        self.reducer = GradientReducer(self.chunks)
        self.stream: ParameterStream | None = None
        if self.policy.parameter:
            self.stream = ParameterStream(model, self.units, shard_axis)
            self.stream.release_all()
            self.reducer.on_complete = self.stream.chunk_complete
        model.register_load_state_dict_pre_hook(self._refuse_lost_load)
        self.refuse_state_dict = model.register_state_dict_pre_hook(self._refuse_sharded_state_dict)

    # -- construction --------------------------------------------------------------------------------------------------

    def _make_chunks(self, unit: Unit, lazy: bool) -> None:
        policy = self.policy if not (unit.stays and self.policy.parameter) else ZERO[2]
        kind_of = lambda slot: self.precision.for_parameter(slot.parameter.dtype)  # noqa: E731
        for number, (dtypes, slots) in enumerate(by_kind(unit, kind_of)):
            name = unit.name if number == 0 else f"{unit.name}#{number}"
            unit.chunks.append(self._make_chunk(name, slots, dtypes, policy, lazy))

    def _make_chunk(self, name: str, slots: list[Slot], dtypes: DTypes, policy: Policy, lazy: bool) -> Chunk:
        if lazy:
            for slot in slots:
                self._give_memory(slot, dtypes)
        chunk = Chunk(name, slots, dtypes, policy, self.shard_axis, self.reduce_axis, self.device)
        if not lazy:
            for slot in slots:
                value = slot.parameter.data.to(self.device)
                for axis in (self.shard_axis, self.replica_axis):
                    value = broadcast_from_first(value, axis)
                chunk.adopt(slot, value)
        if not lazy or not policy.parameter:
            chunk.bind()
        if policy.parameter:
            chunk.release()
        return chunk

    def _give_memory(self, slot: Slot, dtypes: DTypes) -> None:
        """Makes a parameter of this device for one without memory, whose place in the model it takes once it has values."""
        holder = torch.empty((), dtype=dtypes.compute, device=self.device).expand(slot.shape)
        slot.parameter = nn.Parameter(holder, requires_grad=slot.parameter.requires_grad)

    def _adopt_by_name(self, name: str, value: torch.Tensor) -> None:
        chunk, slot = self.by_name[name]
        chunk.adopt(slot, value.to(self.device))

    # -- one pass ------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, synchronise: bool = True) -> Iterator[None]:
        """Runs a backward inside: collects its gradients and reduces them where the policy or `synchronise` asks for it."""
        self._require_own_memory()
        self.reducer.begin(synchronise)
        if self.stream is not None:
            self.stream.begin_backward()
        try:
            yield
        except BaseException:
            self.reducer.abandon()
            raise
        if self.stream is not None:
            self.stream.end_backward()
        self.reducer.end()

    def _require_own_memory(self) -> None:
        """Parameters that were converted or moved after boost no longer show what the optimizer updates."""
        for chunk in self.chunks:
            first = chunk.slots[0].parameter
            moved = chunk.is_gathered and first.numel() and first.untyped_storage().data_ptr() != chunk.full.untyped_storage().data_ptr()
            if moved or first.dtype != chunk.dtypes.compute:
                raise ConfigError(
                    f"the parameters of '{chunk.name}' were replaced after boost (now {first.dtype} on {first.device})",
                    allowed="conversions such as model.double() or model.to(...) before boost",
                    remedy="a precision term in the plan, or convert first and boost then",
                )

    # -- one step ------------------------------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Sums what is still local, over shards and over their replicas.

        Cost: for grouped sharding 2(r-1)/r of a shard's gradient bytes over r replicas, once per step.
        """
        self.reducer.finish()
        for chunk in self.chunks:
            if chunk.is_natural:
                for slot in chunk.slots:
                    slot.used = slot.parameter.grad is not None
                    if slot.used and slot.parameter.grad.is_sparse:  # type: ignore[union-attr]
                        raise sparse_gradient(slot.name)
        if self.replica_axis.size > 1:
            sums = [chunk.reduced if chunk.policy.optimizer else chunk.gradient for chunk in self.chunks if chunk.is_reduced]
            for pending in [comm.all_reduce(as_real(part), self.replica_axis, wait=False) for part in sums if part is not None]:
                pending.wait()

    def used_flags(self) -> list[bool]:
        """For each parameter, whether this rank has a gradient of it."""
        return [slot.used for _, slot in self.slots]

    def set_used(self, used: Sequence[bool]) -> None:
        """Sets which parameters have a gradient on any rank; the others are not touched by the optimizer."""
        for (_, slot), flag in zip(self.slots, used):
            slot.used = flag

    def gradient_parts(self) -> Iterator[torch.Tensor]:
        """Flat parts of the summed gradient, such that over all ranks each logical element comes exactly once."""
        if self.replica_axis.index > 0:
            return
        for chunk in self.chunks:
            if chunk.is_trainable:
                yield from self._counted_parts(chunk)

    def _counted_parts(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        for slot in chunk.slots:
            if not slot.used:
                continue
            first, last = chunk.local_run(slot)
            if first < last:
                gradient = chunk.gradient_view(slot)
                yield gradient if chunk.policy.optimizer else gradient.reshape(-1)[first:last]

    def expose_gradients(self) -> None:
        for chunk in self.chunks:
            if chunk.is_trainable:
                chunk.expose_gradients()

    def publish(self) -> None:
        """Makes the optimizer's updates visible to the model."""
        pending = [chunk.publish() for chunk in self.chunks if chunk.is_trainable]
        for gather in pending:
            if gather is not None:
                gather.wait()

    def clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.clear_gradients()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Everything between a forward and its backward: what reads a released parameter there is found the first time."""
        with self.stream.watched() if self.stream is not None else nullcontext():
            yield

    def look_again(self) -> None:
        """A loss was not a number: looks for parameters that are read while they are away."""
        if self.stream is not None:
            self.stream.look_again()

    # -- whole tensors, one at a time ----------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole model in full on every rank while inside; what is changed there is not kept.

        Cost: the model's bytes in compute dtype.
        """
        if self.stream is None:
            yield
            return
        self.stream.hold()
        try:
            yield
        finally:
            self.stream.let_go()

    def full_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full value in master dtype), the same on every rank.

        Cost: one chunk's master bytes at a time.
        """
        for chunk in self.chunks:
            whole = self._whole(chunk, chunk.master)
            for slot in chunk.slots:
                yield slot.name, slot.view(whole)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full gradient summed over ranks) of the parameters in use, the same on every rank."""
        for chunk in self.chunks:
            if not chunk.is_trainable:
                continue
            if chunk.is_natural:
                yield from ((slot.name, slot.parameter.grad) for slot in chunk.slots if slot.parameter.grad is not None)
                continue
            part = chunk.reduced if chunk.policy.optimizer else chunk.gradient
            whole = self._whole(chunk, part) if part is not None else None
            for slot in chunk.slots:
                if slot.used and whole is not None:
                    yield slot.name, slot.view(whole)

    def _whole(self, chunk: Chunk, part: torch.Tensor) -> torch.Tensor:
        if not chunk.policy.optimizer:
            return part
        whole = torch.empty(chunk.num_elements, dtype=part.dtype, device=part.device)
        comm.all_gather(whole, part.contiguous(), self.shard_axis).wait()
        return whole

    def publish_all(self) -> None:
        """Like `publish`, for frozen parameters too: after masters were changed from outside."""
        for chunk in self.chunks:
            pending = chunk.publish()
            if pending is not None:
                pending.wait()

    # -- for saving ----------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[tuple[Chunk, Slot]]:
        """The parameters of which the optimizer holds something on this rank."""
        for chunk in self.chunks:
            for slot in chunk.shards:
                yield chunk, slot

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """This rank's part of every parameter, in master dtype, for a checkpoint."""
        for chunk, slot in self.shards():
            assert slot.shard is not None
            yield Piece(prefix + slot.name, slot.shard.detach().reshape(-1), chunk.layout(slot), owned=self.owns(chunk, slot))
        for chunk in self.chunks:
            for slot in chunk.slots:
                if slot.num_elements == 0 and slot.shard is None:
                    empty = torch.empty(0, dtype=chunk.dtypes.master)
                    yield Piece(prefix + slot.name, empty, Layout.whole(slot.shape), owned=self.is_first)

    @property
    def is_first(self) -> bool:
        return self.shard_axis.index == 0 and self.replica_axis.index == 0

    def owns(self, chunk: Chunk, slot: Slot) -> bool:
        """Whether this rank is the one that writes what it holds of a parameter."""
        return self.replica_axis.index == 0 and (chunk.policy.optimizer or self.shard_axis.index == 0)

    def _refuse_lost_load(self, module: nn.Module, *_: object) -> None:
        if any(_is_lost_by_loading(chunk) for chunk in self.chunks):
            raise ConfigError(
                "model.load_state_dict() would not last: the optimizer updates copies that it does not reach",
                allowed="booster.load_model(path), booster.load(path), or load_state_dict before boost",
                remedy="booster.load_model(path)",
            )

    def _refuse_sharded_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.stream is not None and not self.stream.held:
            raise sharded_state_dict()


def _is_lost_by_loading(chunk: Chunk) -> bool:
    """Whether values written into the model's own tensors would not reach what the optimizer updates."""
    return chunk.policy.parameter or chunk.dtypes.has_master


def broadcast_from_first(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The value that index 0 of the axis has, on every rank; start weights are that of the first rank."""
    if axis.size == 1 or value.numel() == 0:
        return value
    value = value.clone(memory_format=torch.contiguous_format)
    comm.broadcast(value, axis, source=0).wait()
    return value


def sharded_state_dict() -> ConfigError:
    """The refusal of `model.state_dict()` while a rank has no whole parameters."""
    return ConfigError(
        "model.state_dict() would hold no values: the parameters are sharded",
        allowed="booster.full_state_dict(), booster.save_model(path) or booster.save(path)",
        remedy="booster.full_state_dict()",
    )
