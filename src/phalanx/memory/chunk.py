"""A chunk: the parameters of one unit of execution, laid out flat, and the parts of its state that this rank holds.

A flat tensor of `num_elements` (padded so that all shards are equal) holds the parameters one after another. Cutting it into
`axis.size` equal shards needs no copy to gather and none to scatter, for any mixture of parameter shapes.

    full      what the forward computes with, in compute dtype; its storage is empty while a sharded chunk is released
    master    what the optimizer updates, in master dtype: this rank's shard, or everything where the optimizer is not sharded
    gradient  the local gradient of one or several passes, in gradient dtype
    reduced   this rank's part of the gradient summed over ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses import FakeTensor

from phalanx.cluster import comm
from phalanx.cluster.placement import Placement
from phalanx.errors import ConfigError
from phalanx.layout import Layout, round_up
from phalanx.memory.axes import StateAxes
from phalanx.memory.policy import Policy
from phalanx.precision import DTypes

ALIGNMENT_BYTES = 64  # a cache line, so that vectorised kernels run at full speed on a view of any parameter


@dataclass
class Slot:
    """One parameter's place in its chunk.

    `owners` are the (module, attribute) pairs under which the model reaches it; more than one where weights are tied.
    `dtype` is the one that the person's model has, `identity` the id of the parameter that it was built with. `placement` says which
    box of the parameter this rank holds: all that follows here is about that box. `is_occasional`: it belongs to an expert of a list,
    which some ranks call in a pass and others do not.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    placement: Placement = field(init=False)
    offset: int = 0
    shard: nn.Parameter | None = field(default=None, repr=False)
    dtype: torch.dtype = field(init=False)
    identity: int = field(init=False)
    is_occasional: bool = False
    version: int | None = None  # the parameter's count of changes in place, as of the last update
    used: bool = False  # a gradient arrived since the last optimizer step
    written: bool = False  # the chunk's gradient buffer holds a value for it
    seal: tuple[torch.Tensor, int] | None = None  # its `.grad` and the count of changes of that, while a person's code runs

    def __post_init__(self) -> None:
        self.dtype, self.identity = self.parameter.dtype, id(self.parameter)
        self.placement = Placement(Layout.whole(self.parameter.shape))

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.placement.layout.box_shape)

    @property
    def logical_shape(self) -> torch.Size:
        return torch.Size(self.placement.layout.shape)

    @property
    def num_elements(self) -> int:
        return self.placement.layout.num_elements

    @property
    def can_learn(self) -> bool:
        """Whether its dtype has gradients at all; quantised weights have none."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def stop(self) -> int:
        return self.offset + self.num_elements

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a full flat tensor, in its own shape."""
        return flat[self.offset : self.stop].view(self.shape)


class Chunk:
    """A group of parameters that is gathered, reduced and updated together.

    Cost: per rank, with n shards and P elements: parameter P or P/n, gradient P or P/n, optimizer state P or P/n, as `policy` says.
    """

    def __init__(self, name: str, slots: list[Slot], dtypes: DTypes, policy: Policy, axes: StateAxes, device: torch.device):
        self.name, self.slots, self.dtypes, self.policy, self.device = name, slots, dtypes, policy, device
        self.axis, self.reduce_axis = axes.shards, axes.reduce
        # After the sum over shards, sums over those that hold the same shards and those that do other parts of the same work.
        self.replica_axes = tuple(axis for axis in (axes.replicas, *slots[0].placement.sums) if axis.size > 1)
        self.is_first_replica = axes.replicas.index == 0
        self.num_elements = self._place_slots()
        self.shard_elements = self.num_elements // self.axis.size
        self.start = self.axis.index * self.shard_elements
        self.stop = self.start + self.shard_elements
        self.poison: dict[str, torch.Tensor] = {}
        self.is_gathered = True
        self.pending_gather: comm.Pending | None = None
        self.gradient: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.is_reduced = False  # what the buffers hold is the sum over ranks
        self.full = self.compute_shard = self.master = torch.empty(0, dtype=dtypes.compute, device=device)
        self.shards: list[Slot] = []

    def allocate(self) -> None:
        """Makes the memory of the parameters and of what the optimizer updates, for `adopt` to fill."""
        self.full = torch.empty(self.num_elements, dtype=self.dtypes.compute, device=self.device)
        self.compute_shard = self._new_compute_shard()
        self.master = self._new_master()
        self.shards = list(self._make_shards())

    def _place_slots(self) -> int:
        item = max(self.dtypes.compute.itemsize, 1)
        align, offset = max(1, ALIGNMENT_BYTES // item), 0
        for slot in self.slots:
            slot.offset = offset
            offset += round_up(slot.num_elements, align)
        return round_up(offset, align * self.axis.size)

    def _new_compute_shard(self) -> torch.Tensor:
        """What this rank contributes to a gather: its part of `full` itself, unless `full` comes and goes."""
        if not self.policy.parameter:
            return self.full[self.start : self.stop]
        return torch.empty(self.shard_elements, dtype=self.dtypes.compute, device=self.device)

    def _new_master(self) -> torch.Tensor:
        whole = not self.policy.optimizer
        if self.dtypes.master == self.dtypes.compute:
            return self.full if whole else self.compute_shard
        size = self.num_elements if whole else self.shard_elements
        return torch.empty(size, dtype=self.dtypes.master, device=self.device)

    def _make_shards(self) -> Iterator[Slot]:
        """Gives each slot that has elements here the parameter that the optimizer updates; yields those slots."""
        for slot in self.slots:
            if not self.policy.optimizer:
                slot.shard = slot.parameter if self.master is self.full else self._updated(slot, slot.view(self.master))
                yield slot
            elif slot.num_elements and self.local_run(slot)[0] < self.local_run(slot)[1]:
                slot.shard = self._updated(slot, self.shard_view(slot, self.master))
                yield slot

    def _updated(self, slot: Slot, value: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(value, requires_grad=slot.can_learn)

    # -- where things lie ----------------------------------------------------------------------------------------------

    def local_run(self, slot: Slot) -> tuple[int, int]:
        """The elements of a parameter that lie in this rank's shard, as a range of the flattened parameter."""
        first = min(max(self.start - slot.offset, 0), slot.num_elements)
        return first, max(first, min(self.stop - slot.offset, slot.num_elements))

    def shard_view(self, slot: Slot, shard: torch.Tensor) -> torch.Tensor:
        """A parameter's elements within a tensor that holds this rank's shard, flat."""
        first, last = self.local_run(slot)
        return shard[slot.offset + first - self.start : slot.offset + last - self.start]

    def layout(self, slot: Slot) -> Layout:
        """The logical place of what the optimizer holds of a parameter on this rank."""
        whole = slot.placement.layout
        return whole.with_run(*self.local_run(slot)) if self.policy.optimizer else whole

    def cut(self, slot: Slot, full: torch.Tensor) -> torch.Tensor:
        """What the optimizer holds on this rank of a tensor that is like the whole logical parameter."""
        box = slot.placement.layout.take(full)
        return box.reshape(-1)[slice(*self.local_run(slot))] if self.policy.optimizer else box

    def counts(self, slot: Slot) -> bool:
        """Whether this rank is the one, of all that hold the same elements as its shard, that counts and writes them."""
        return self.is_first_replica and slot.placement.is_first

    @property
    def is_trainable(self) -> bool:
        return any(slot.parameter.requires_grad for slot in self.slots)

    @property
    def is_occasional(self) -> bool:
        """Whether ranks may get gradients of other parts of it in one backward, and some rank none."""
        return any(slot.is_occasional for slot in self.slots)

    @property
    def is_natural(self) -> bool:
        """Whether gradients can stay where autograd puts them: one rank, and no dtype to change."""
        one_rank = self.axis.size == 1 and not self.replica_axes
        return one_rank and self.dtypes.master == self.dtypes.compute == self.dtypes.gradient

    @property
    def is_lost_by_loading(self) -> bool:
        """Whether values written into the model's own tensors would not reach what the optimizer updates."""
        return self.policy.parameter or self.dtypes.has_master

    @property
    def bytes_per_gather(self) -> int:
        return self.num_elements * self.dtypes.compute.itemsize

    # -- parameters ----------------------------------------------------------------------------------------------------

    def adopt(self, slot: Slot, value: torch.Tensor) -> None:
        """Takes a logical parameter's value into the parts that this rank keeps. Needs `full` only where it stays."""
        value = slot.placement.layout.take(value.detach())
        if not self.policy.parameter:
            slot.view(self.full).copy_(value)
        run = slice(*self.local_run(slot))
        if self.policy.optimizer:
            self.shard_view(slot, self.master).copy_(value.reshape(-1)[run])
        elif self.master is not self.full:
            slot.view(self.master).copy_(value)
        if self.compute_shard is not self.master:
            self.shard_view(slot, self.compute_shard).copy_(value.reshape(-1)[run])

    def bind(self) -> None:
        """Points the model's parameters at `full`, which from now on is their memory."""
        for slot in self.slots:
            slot.parameter.data = slot.view(self.full)
            if slot.version is None:
                slot.version = slot.parameter._version

    def start_gather(self) -> None:
        """Begins to fill `full` from all shards; a no-op while it is filled or being filled."""
        if self.is_gathered or self.pending_gather is not None:
            return
        self.full.untyped_storage().resize_(self.bytes_per_gather)
        self.pending_gather = comm.all_gather(self.full, self.compute_shard, self.axis, wait=False)

    def gather(self) -> None:
        """Fills `full` and lets the parameters show it.

        Cost: (n-1)/n of the chunk's bytes in compute dtype, received and sent.
        """
        if self.is_gathered:
            return
        with torch._C.DisableTorchFunction():  # a look at where a parameter lies is no read of it
            self.require_own_memory()
        self.start_gather()
        assert self.pending_gather is not None
        self.pending_gather.wait()
        self.pending_gather, self.is_gathered = None, True
        self.bind()

    def require_own_memory(self) -> None:
        """Raises: ConfigError for a parameter that no longer shows the chunk's memory: the optimizer's updates would not reach it."""
        if isinstance(self.full, FakeTensor):  # in a rehearsal nothing lies anywhere
            return
        place = self.full.untyped_storage().data_ptr()  # 0 where there are no elements
        for slot in self.slots if place or not self.is_gathered else ():
            parameter = slot.parameter
            if self.is_gathered:
                is_own = parameter.data_ptr() == place + slot.offset * self.full.itemsize
            else:
                is_own = parameter.untyped_storage().data_ptr() == self._placeholder(slot).untyped_storage().data_ptr()
            if (not is_own and slot.num_elements) or parameter.dtype != self.dtypes.compute:
                raise ConfigError(
                    f"the parameter '{slot.name}' was replaced after boost (now {parameter.dtype} on {parameter.device})",
                    allowed="conversions such as model.double() or model.to(...) before boost, and changes in place after it",
                    remedy="parameter.copy_(value) for parameter.data = value, or a precision term in the plan",
                )

    def release(self) -> None:
        """Drops gathered parameters, where they come and go. Whoever reads one while it is away reads NaN, never freed memory."""
        if not self.policy.parameter:
            return
        if self.pending_gather is not None:
            self.pending_gather.wait()
            self.pending_gather = None
        self.hide()

    def hide(self) -> None:
        """Drops the gathered parameters, and shows NaN in their place."""
        self.is_gathered = False
        for slot in self.slots:
            slot.parameter.data = self._placeholder(slot)
        self.full.untyped_storage().resize_(0)

    def _placeholder(self, slot: Slot) -> torch.Tensor:
        if slot.name not in self.poison:
            value = math.nan if self.dtypes.compute.is_floating_point else 0
            self.poison[slot.name] = torch.full((), value, dtype=self.dtypes.compute, device=self.device).expand(slot.shape)
        return self.poison[slot.name]

    def publish(self) -> comm.Pending | None:
        """Makes an update of `master` visible: casts it, and gathers where every rank keeps the whole parameter.

        Cost: for ZeRO-1 and 2 (n-1)/n of the chunk's bytes in compute dtype; else none.
        """
        if self.dtypes.has_master:
            self._refuse_lost_edits()
        if not self.policy.optimizer:
            if self.master is not self.full:
                self.full.copy_(self.master)
            return None
        if self.master is not self.compute_shard:
            self.compute_shard.copy_(self.master)
        if self.policy.parameter:
            if self.is_gathered:
                self.release()
            return None
        return comm.all_gather(self.full, self.compute_shard, self.axis, wait=False)

    def _refuse_lost_edits(self) -> None:
        """Values that were written into the model's own tensors are about to be replaced by those of the full-precision copies."""
        for slot in self.slots:
            before, slot.version = slot.version, slot.parameter._version
            if before not in (None, slot.version):
                raise ConfigError(
                    f"'{slot.name}' was changed in place, and the optimizer updates a full-precision copy that does not know of it",
                    allowed="changes through booster.load_model or before boost, or in place under fp32",
                    remedy="fp32 in place of the half precision",
                )

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Adds one pass's gradient of one parameter to the local sum."""
        if self.gradient is None and self._is_filled_by(gradient):
            self.gradient, slot.written, slot.used = gradient.detach().view(-1), True, True
            return
        if self.gradient is None:
            self.gradient = self._new_gradient()
        place = slot.view(self.gradient)
        if slot.written:
            place.add_(gradient.to(place.dtype))  # an add over mixed dtypes is several times slower than a cast and an add
        else:
            place.copy_(gradient)
            slot.written = True
        slot.used = True

    def _is_filled_by(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient may itself serve as the buffer, as that of an embedding alone in its chunk; nobody else holds it."""
        return gradient.numel() == self.num_elements and gradient.dtype == self.dtypes.gradient and gradient.is_contiguous()

    def _new_gradient(self) -> torch.Tensor:
        return torch.empty(self.num_elements, dtype=self.dtypes.gradient, device=self.device)

    def gradient_at_hand(self) -> AbstractContextManager[None]:
        """The summed gradient in memory while inside, wherever it lives."""
        return nullcontext()

    def _complete_gradient(self) -> torch.Tensor:
        """The local gradient with zeros for what no pass has reached."""
        if self.gradient is None:
            self.gradient = self._new_gradient()
        for slot in self.slots:
            if not slot.written:
                slot.view(self.gradient).zero_()
        return self.gradient

    def start_reduce(self) -> comm.Pending:
        """Begins the sum of the local gradients over all ranks; `finish_reduce` ends it."""
        gradient = self._complete_gradient()
        if not self.policy.optimizer:
            return comm.all_reduce(as_real(gradient), self.reduce_axis, wait=False)
        if not self.policy.gradient:
            # In place: this rank's part of the buffer becomes the sum, the rest is spent.
            self.reduced = gradient[self.start : self.stop]
            return comm.reduce_scatter(as_real(self.reduced), as_real(gradient), self.reduce_axis, wait=False)
        fresh = torch.empty(self.shard_elements, dtype=self.dtypes.gradient, device=self.device)
        self._fresh = fresh
        return comm.reduce_scatter(as_real(fresh), as_real(gradient), self.reduce_axis, wait=False)

    def finish_reduce(self, pending: comm.Pending) -> None:
        """Waits for `start_reduce` and adds its result to what earlier passes left."""
        pending.wait()
        self.is_reduced = True
        if not self.policy.gradient:
            return
        for slot in self.slots:
            slot.written = False
        self.gradient = None
        self.reduced = self._fresh if self.reduced is None else self.reduced.add_(self._fresh)
        del self._fresh

    def reopen_gradient(self) -> None:
        """Makes a reduced buffer a local one again, so that one more pass can be added and all reduced once more.

        The sum stays on one rank, the other ranks drop it: the next reduction then counts it once.
        """
        self.is_reduced = False
        if self.policy.gradient or self.gradient is None:
            return
        keep = slice(self.start, self.stop) if self.policy.optimizer else slice(0, self.num_elements if self.axis.index == 0 else 0)
        self.gradient[: keep.start].zero_()
        self.gradient[keep.stop :].zero_()
        for slot in self.slots:
            slot.written = True

    def seal_gradients(self) -> None:
        """Before a person's code runs: lets every `.grad` show NaN where the gradient lies elsewhere, and notes how the others look.

        What clips or reads `.grad` by hand would otherwise find nothing, and do nothing.
        """
        for slot in self.slots:
            if not slot.used and not self.is_natural:
                continue
            if not self.is_natural:
                slot.parameter.grad = torch.full((), math.nan, dtype=self.dtypes.compute, device=self.device).expand(slot.shape)
            gradient = slot.parameter.grad
            slot.seal = None if gradient is None else (gradient, gradient._version)

    def break_seal(self) -> None:
        """Raises: ConfigError for a gradient that was changed since `seal_gradients`, in place or for another."""
        for slot in self.slots:
            before, slot.seal = slot.seal, None
            if before is None:
                continue
            if slot.parameter.grad is not before[0] or before[0]._version != before[1]:
                raise changed_gradient(slot.name)
            if not self.is_natural:
                slot.parameter.grad = None

    def expose_gradients(self) -> None:
        """Sets `.grad` of what the optimizer holds, for the parameters that got a gradient on any rank."""
        for slot in self.shards:
            if self.is_natural:
                slot.parameter.grad = self.gradient_view(slot) if slot.used else None
                continue
            assert slot.shard is not None
            slot.shard.grad = self.gradient_view(slot).to(slot.shard.dtype) if slot.used else None

    def gradient_view(self, slot: Slot) -> torch.Tensor:
        """The summed gradient of what the optimizer holds of a parameter."""
        if self.is_natural:
            if slot.parameter.grad is None:  # only another rank's part of the parameter got one
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            return slot.parameter.grad
        if not self.policy.optimizer:
            assert self.gradient is not None
            return slot.view(self.gradient)
        assert self.reduced is not None
        return self.shard_view(slot, self.reduced)

    def clear_gradients(self) -> None:
        """Forgets every gradient; buffers that the policy keeps are kept."""
        for slot in self.slots:
            slot.used = slot.written = False
            slot.parameter.grad = slot.seal = None
            if slot.shard is not None:
                slot.shard.grad = None
        self.reduced, self.is_reduced = None, False
        if self.policy.gradient:
            self.gradient = None


def changed_gradient(name: str) -> ConfigError:
    """The refusal of a gradient that did not come from a backward."""
    return ConfigError(
        f"the gradient of '{name}' was changed by hand after its backward, and is neither normalised nor summed over ranks yet",
        allowed="Booster(clip_norm=...), and booster.gradients() for a look",
        remedy="Booster(plan, clip_norm=1.0) in place of torch.nn.utils.clip_grad_norm_",
    )


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, which every backend sums; the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
