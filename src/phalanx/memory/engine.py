"""The sharded state engine of one model: it owns parameters, gradients and what the optimizer updates, under one policy.

A step through it:  begin_backward -> [hooks collect, reduce, gather, release] -> end_backward  (once per pass)
                    finish_gradients -> agree on statistics -> expose_gradients -> optimizer.step -> publish -> clear
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.cluster.placement import Placements
from phalanx.errors import ConfigError
from phalanx.layout import Piece
from phalanx.memory.assemble import assemble
from phalanx.memory.axes import StateAxes
from phalanx.memory.chunk import Chunk, Slot, as_real
from phalanx.memory.gemini import Gemini
from phalanx.memory.partition import Unit, by_kind, find_units, order_of_completion
from phalanx.memory.parts import Parts
from phalanx.memory.policy import ZERO, Policy
from phalanx.memory.record import Pass
from phalanx.memory.reduction import IN_FLIGHT, GradientReducer, sparse_gradient
from phalanx.memory.stream import ParameterStream
from phalanx.memory.tiered import TieredChunk
from phalanx.precision import DTypes, Precision

FillParameters = Callable[[Callable[[str, torch.Tensor], None]], None]


class StateEngine:
    """Holds this rank's part of the state of `model`, in the boxes of `placements`, each sharded over the ranks that share it.

    `axes_of` cuts a data axis for the state (None: the model's own). `blocks` are the model's layer stacks; `fill`, for a model
    without memory yet, produces (name, full value) one by one. All ranks give the same start weights.
    Cost: bytes per rank as in `policy`; parameters are taken over chunk by chunk, so that one chunk exists twice at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        stage: int,
        precision: Precision,
        axes_of: Callable[[Axis | None], StateAxes],
        world: Axis,
        device: torch.device,
        placements: Placements,
        fill: FillParameters | None = None,
        tiers: Gemini | None = None,
    ):
        self.model, self.device, self.precision, self.world, self.placements = model, device, precision, world, placements
        self.stage, self.axes_of, self.axes, self.tiers = stage, axes_of, axes_of(None), tiers
        self.policy = self._policy(self.axes)
        self.units = find_units(model, blocks, placements)
        for unit in self.units:
            self._make_chunks(unit)
        self.chunks = [chunk for unit in self.units for chunk in unit.chunks]
        if tiers is not None:
            tiers.settle(self.chunks)
        for chunk in self.chunks:
            self._take_over(chunk, lazy=fill is not None)
        self.slots = [(chunk, slot) for chunk in self.chunks for slot in chunk.slots]
        self.by_name = {slot.name: (chunk, slot) for chunk, slot in self.slots}
        if fill is not None:
            fill(self._adopt_by_name)
            for slot in (slot for _, slot in self.slots):
                for module, attribute in slot.owners:
                    module._parameters[attribute] = slot.parameter
        self.reducer = GradientReducer(
            order_of_completion(self.units), in_flight=0 if tiers is not None and self.axes.shards.size == 1 else IN_FLIGHT
        )
        self.stream: ParameterStream | None = None
        if self.policy.parameter:
            self.stream = ParameterStream(model, self.units, self.axes.shards)
            self.stream.release_all()
            self.reducer.on_complete = self.stream.chunk_complete
        model.register_load_state_dict_pre_hook(self._refuse_lost_load)
        self.is_sealed = False
        self.refuse_state_dict = model.register_state_dict_pre_hook(self._refuse_sharded_state_dict)

    # -- construction --------------------------------------------------------------------------------------------------

    def _policy(self, axes: StateAxes) -> Policy:
        return ZERO[self.stage if axes.shards.size > 1 or self.tiers is not None else 0]

    def _make_chunks(self, unit: Unit) -> None:
        kind_of = lambda slot: self.precision.for_parameter(slot.parameter.dtype)  # noqa: E731
        for number, (dtypes, slots) in enumerate(by_kind(unit, kind_of)):
            name = unit.name if number == 0 else f"{unit.name}#{number}"
            axes = self.axes_of(slots[0].placement.data)
            policy = self._policy(axes)
            if unit.stays and policy.parameter:
                policy = ZERO[2]
            if self.tiers is not None:
                unit.chunks.append(TieredChunk(name, slots, dtypes, policy, axes, self.device, self.tiers))
            else:
                unit.chunks.append(Chunk(name, slots, dtypes, policy, axes, self.device))

    def _take_over(self, chunk: Chunk, lazy: bool) -> None:
        """Gives a chunk its memory, and the values of the person's parameters where there are some; theirs is then free."""
        if lazy:
            for slot in chunk.slots:
                self._give_memory(slot, chunk.dtypes)
        chunk.allocate()
        if not lazy:
            for slot in chunk.slots:
                chunk.adopt(slot, slot.parameter.data.to(self.device))
        if chunk.policy.parameter:
            chunk.hide()
        else:
            chunk.bind()

    def _give_memory(self, slot: Slot, dtypes: DTypes) -> None:
        """Makes a parameter of this device for one without memory, whose place in the model it takes once it has values."""
        holder = torch.empty((), dtype=dtypes.compute, device=self.device).expand(slot.shape)
        slot.parameter = nn.Parameter(holder, requires_grad=slot.parameter.requires_grad)

    def _adopt_by_name(self, name: str, value: torch.Tensor) -> None:
        if name in self.by_name:  # another rank may hold what this one does not
            chunk, slot = self.by_name[name]
            chunk.adopt(slot, value.to(self.device))

    # -- one pass ------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(
        self, synchronise: bool = True, *, keeps_all: bool = False, within: Container[str] | None = None, reads: bool = True
    ) -> Iterator[None]:
        """Runs a backward inside: collects its gradients and reduces them where the policy or `synchronise` asks for it.

        `keeps_all` leaves all of them local; `within` names the chunks that it may reach; `reads` False says that it needs no values
        of parameters.
        """
        self._require_own_memory()
        self._require_let_go()
        self._break_seal()
        self.reducer.begin(synchronise, keeps_all=keeps_all, within=within)
        stream = self.stream if reads else None
        if stream is not None:
            stream.begin_backward()
        try:
            yield
        except BaseException:
            self.reducer.abandon()
            raise
        if stream is not None:
            stream.end_backward()
        self.reducer.end()

    def _require_own_memory(self) -> None:
        """Parameters that were converted or moved after boost no longer show what the optimizer updates."""
        for chunk in self.chunks:
            chunk.require_own_memory()

    def _require_let_go(self) -> None:
        """A step would change and release parameters that are promised in full."""
        if self.stream is not None and self.stream.held:
            raise ConfigError(
                "a step was taken inside booster.gathered(), where parameters are held in full",
                allowed="training outside of it",
                remedy="leave the block before booster.step",
            )

    # -- one step ------------------------------------------------------------------------------------------------------

    def parts(self, names: Mapping[Hashable, Collection[str]]) -> Parts:
        """The state of parts of the model, each given by its chunks, for a table that says itself when it moves."""
        return Parts(names, self.chunks, self.stream, self.reducer)

    def finish_gradients(self) -> None:
        """Sums what is still local, over shards, over their replicas, and over ranks that do other parts of the same work.

        Cost: 2(r-1)/r of a shard's gradient bytes over r replicas, once per step.
        """
        self._break_seal()
        self.reducer.finish()
        for chunk in self.chunks:
            if chunk.is_natural:
                for slot in chunk.slots:
                    slot.used = slot.parameter.grad is not None
                    if slot.used and slot.parameter.grad.is_sparse:  # type: ignore[union-attr]
                        raise sparse_gradient(slot.name)
        for number in range(max((len(chunk.replica_axes) for chunk in self.chunks), default=0)):
            self._sum_over_replicas(number)

    def _sum_over_replicas(self, number: int) -> None:
        pending = []
        for chunk in self.chunks:
            part = chunk.reduced if chunk.policy.optimizer else chunk.gradient
            if chunk.is_reduced and part is not None and number < len(chunk.replica_axes):
                pending.append(comm.all_reduce(as_real(part), chunk.replica_axes[number], wait=False))
        for sum_ in pending:
            sum_.wait()

    def used(self) -> set[str]:
        """The parameters of which this rank has a gradient."""
        return {slot.name for _, slot in self.slots if slot.used}

    def set_used(self, names: Container[str]) -> None:
        """Sets which parameters have a gradient on any rank; the others are not touched by the optimizer."""
        for _, slot in self.slots:
            slot.used = slot.name in names

    def gradient_parts(self) -> Iterator[torch.Tensor]:
        """Flat parts of the summed gradient, such that over all ranks each logical element comes exactly once."""
        for chunk in self.chunks:
            if chunk.is_trainable:
                with chunk.gradient_at_hand():
                    yield from self._counted_parts(chunk)

    def _counted_parts(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        for slot in chunk.slots:
            if not (slot.used and chunk.counts(slot)):
                continue
            first, last = chunk.local_run(slot)
            if first < last:
                gradient = chunk.gradient_view(slot)
                yield gradient if chunk.policy.optimizer else gradient.reshape(-1)[first:last]

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        """Runs the optimizer's `step` on this rank's shards with their gradients, and makes the updates visible to the model."""
        self._require_let_go()
        if self.tiers is not None:
            self.tiers.update(optimizer, step)
            return
        for chunk in self.chunks:
            if chunk.is_trainable:
                chunk.expose_gradients()
        step()
        self.publish()

    def prepare(self, largest: Pass, passes: int) -> None:
        """Before the passes of a step: plans its moves, where the state lives in tiers."""
        if self.tiers is not None and self.stream is not None:
            self.tiers.prepare(self.model, self.units, self.stream, largest, passes, self.axes.shards, self.world)

    def begin_pass(self, number: int) -> None:
        if self.tiers is not None:
            self.tiers.begin_pass(number)

    def publish(self) -> None:
        """Makes the optimizer's updates visible to the model."""
        pending = [chunk.publish() for chunk in self.chunks if chunk.is_trainable]
        for gather in pending:
            if gather is not None:
                gather.wait()

    def seal_gradients(self) -> None:
        """Between a backward and the step a person's code runs: what it does to a `.grad` is found."""
        self.is_sealed = True
        for chunk in self.chunks:
            chunk.seal_gradients()

    def _break_seal(self) -> None:
        for chunk in self.chunks if self.is_sealed else ():
            chunk.break_seal()
        self.is_sealed = False

    def clear_gradients(self) -> None:
        self.is_sealed = False
        self.reducer.forget()
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

        Cost: one parameter's master bytes at a time.
        """
        return assemble(self.pieces(""), self.world, self.device)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full gradient summed over ranks) of the parameters in use, the same on every rank."""
        return assemble(self._gradient_pieces(), self.world, self.device)

    def _gradient_pieces(self) -> Iterator[Piece]:
        for chunk in self.chunks:
            for slot in chunk.slots if chunk.is_trainable else ():
                if slot.used:
                    yield from self._piece(chunk, slot, chunk.gradient_view, slot.name)

    def publish_all(self) -> None:
        """Like `publish`, for frozen parameters too: after masters were changed from outside."""
        if self.tiers is not None:
            self.tiers.restore()
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
        for chunk, slot in self.slots:
            yield from self._piece(chunk, slot, lambda slot: slot.shard.detach(), prefix + slot.name)

    def _piece(self, chunk: Chunk, slot: Slot, value: Callable[[Slot], torch.Tensor], name: str) -> Iterator[Piece]:
        """This rank's part of something like a parameter; parameters without elements belong to the first rank."""
        if slot.shard is not None:
            yield Piece(name, value(slot).detach().reshape(-1), chunk.layout(slot), owned=self.owns(chunk, slot))
        elif slot.num_elements == 0:
            owned = chunk.axis.index == 0 and chunk.counts(slot)
            yield Piece(name, torch.empty(0, dtype=chunk.dtypes.master), slot.placement.layout, owned=owned)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that hold the same modules: it writes what is not sharded."""
        return self.axes.shards.index == 0 and self.axes.replicas.index == 0 and self.placements.is_first

    def owns(self, chunk: Chunk, slot: Slot) -> bool:
        """Whether this rank is the one that writes what it holds of a parameter."""
        return chunk.counts(slot) and (chunk.policy.optimizer or chunk.axis.index == 0)

    def _refuse_lost_load(self, module: nn.Module, *_: object) -> None:
        if any(chunk.is_lost_by_loading for chunk in self.chunks):
            raise ConfigError(
                "model.load_state_dict() would not last: the optimizer updates copies that it does not reach",
                allowed="booster.load_model(path), booster.load(path), or load_state_dict before boost",
                remedy="booster.load_model(path)",
            )

    def _refuse_sharded_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.stream is not None and not self.stream.held:
            raise sharded_state_dict()


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
