"""A chunk whose parts live in tiers: its parameters come to the device for their use, its gradient leaves when it is summed.

full           as in any chunk; with one rank it is the shard itself
compute_shard  this rank's part in compute dtype, on the device while it is wanted or there is room
master         where the optimizer's part lives: the device, the host, or a mapped place of the disk
copy           the parameters below the device beside a master on the disk, or None where the master serves
reduced        the summed gradient, in its own tier
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from phalanx.cluster import comm
from phalanx.memory.axes import StateAxes
from phalanx.memory.chunk import Chunk, Slot, as_real
from phalanx.memory.placing import DEVICE, DISK, HOST, Home, Sizes
from phalanx.memory.policy import Policy
from phalanx.memory.record import GRADIENT, REDUCED
from phalanx.memory.tier import Copy, Place, Tier
from phalanx.precision import DTypes

if TYPE_CHECKING:
    from phalanx.memory.gemini import Gemini


class TieredChunk(Chunk):
    """The same chunk under a policy with budgets; `tiers` decides where its parts are, and is told what happens to it."""

    def __init__(self, name: str, slots: list[Slot], dtypes: DTypes, policy: Policy, axes: StateAxes, device: torch.device, tiers: Gemini):
        self.tiers, self.number = tiers, -1
        self.home = Home()
        self.places: dict[str, Place] = {}
        self.copy: torch.Tensor | None = None
        self.promised_bytes = 0  # of moments, which the optimizer itself makes
        super().__init__(name, slots, dtypes, policy, axes, device)

    # -- sizes and places ----------------------------------------------------------------------------------------------

    @property
    def is_natural(self) -> bool:
        return False

    @property
    def is_lost_by_loading(self) -> bool:
        return True

    @property
    def stays(self) -> bool:
        return not self.policy.parameter

    @property
    def learns(self) -> bool:
        return self.is_trainable and any(slot.can_learn for slot in self.slots)

    @property
    def master_bytes(self) -> int:
        return self.shard_elements * self.dtypes.master.itemsize

    @property
    def moment_bytes(self) -> int:
        return self.shard_elements * sum(dtype.itemsize for _, dtype in self.moments)

    @property
    def moments(self) -> list[tuple[str, torch.dtype]]:
        """The element-wise state that the optimizer keeps, by key."""
        return [(key, dtype or self.dtypes.master) for key, dtype in self.tiers.moments] if self.learns else []

    def sizes(self) -> Sizes:
        compute, gradient = self.dtypes.compute.itemsize, self.dtypes.gradient.itemsize if self.learns else 0
        return Sizes(
            name=self.name,
            full=self.num_elements * compute,
            shard=self.shard_elements * compute,
            gradient=self.num_elements * gradient,
            gradient_shard=self.shard_elements * gradient,
            optimizer=self.master_bytes + self.moment_bytes,
            is_cast=self.dtypes.has_master,
            is_trainable=self.learns,
            stays=self.stays,
        )

    def allocate(self) -> None:
        arena = self.tiers.arena
        if self.stays:
            self.full = arena.new(self.num_elements, self.dtypes.compute)
            self.compute_shard = self.full[self.start : self.stop]
        else:
            self.compute_shard = arena.hollow(self.shard_elements, self.dtypes.compute)
            one = self.axis.size == 1
            self.full = self.compute_shard if one else arena.hollow(self.num_elements, self.dtypes.compute)
        self._settle()
        self.shards = list(self._make_shards())

    def _settle(self) -> None:
        """Makes the places of the parts for the present home; their content is the caller's."""
        home, tiers = self.home, self.tiers
        if home.is_device:
            self.promised_bytes = self.moment_bytes
            tiers.arena.budget.take(self.promised_bytes)
            if not self.stays:
                tiers.arena.fill(self.compute_shard)
            self.master = self._new_device_master()
        else:
            optimizer = self._room("optimizer", home.optimizer, self.master_bytes + (self.moment_bytes if home.optimizer == DISK else 0))
            self.master = optimizer.bytes[: self.master_bytes].view(self.dtypes.master)
            if home.optimizer == HOST:
                self.promised_bytes = self.moment_bytes
                tiers.host.budget.take(self.promised_bytes)
            if self.learns:
                self._room("gradient", home.gradient, self.shard_elements * self.dtypes.gradient.itemsize)
        self.copy = None
        if home.optimizer == DISK and not self.stays and (home.parameter == HOST or self.dtypes.has_master):
            self.copy = self._room("parameter", home.parameter, self.compute_shard.nbytes).view(self.dtypes.compute)

    def _new_device_master(self) -> torch.Tensor:
        if not self.dtypes.has_master:
            return self.compute_shard
        return self.tiers.arena.new(self.shard_elements, self.dtypes.master)

    def _room(self, part: str, tier: str, num_bytes: int) -> Place:
        self.places[part] = self.tiers.below(tier).room(num_bytes)
        return self.places[part]

    def _leave(self) -> None:
        """Gives the room of all parts back; their tensors still hold what they held."""
        budget = self.tiers.arena.budget if self.home.is_device else self.tiers.host.budget
        budget.give(self.promised_bytes)
        self.promised_bytes = 0
        for place in self.places.values():
            place.tier.budget.give(place.num_bytes)
        self.places.clear()

    def move_to(self, home: Home, state: dict[Any, dict[str, Any]]) -> None:
        """Moves all parts to other tiers, the optimizer's moments of the shards included."""
        if home == self.home:
            return
        master, was_device_master = self.master.clone(), self.home.is_device and self.dtypes.has_master
        moments = {(slot.name, key): value.clone() for slot, key, value in self._moment_tensors(state)}
        if was_device_master:
            self.tiers.arena.empty(self.master)
        if self.home.is_device and not self.stays:
            self.tiers.arena.empty(self.compute_shard)
        self._leave()
        self.home = home
        self._settle()
        self.master.copy_(master)
        self._show(self.master)
        for slot, key, value in list(self._moment_tensors(state)):
            value.data = moments[slot.name, key].to(self.master.device)
        if home.optimizer == DISK:
            self._file_moments(state)
        self.refresh_copies()

    def refresh_copies(self) -> None:
        """Makes everything that is derived from the master follow it."""
        if self.copy is not None:
            self.copy.copy_(self.master)
        is_derived = self.stays or (self.home.is_device and self.dtypes.has_master)
        if is_derived and self.compute_shard.data_ptr() != self.master.data_ptr():
            self.compute_shard.copy_(self.master)

    def adopt(self, slot: Slot, value: torch.Tensor) -> None:
        value = slot.placement.layout.take(value.detach())
        if self.stays:
            slot.view(self.full).copy_(value)
        run = value.reshape(-1)[slice(*self.local_run(slot))]
        self.shard_view(slot, self.master).copy_(run)
        if self.copy is not None:
            self.shard_view(slot, self.copy).copy_(run)
        if self.home.is_device and self.dtypes.has_master and not self.stays:
            self.shard_view(slot, self.compute_shard).copy_(run)

    # -- parameters ----------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        return None  # the plan of the tiers says what is fetched ahead

    def gather(self) -> None:
        if self.is_gathered:
            return
        self.tiers.want(self)
        if self.full is not self.compute_shard:
            self.tiers.arena.fill(self.full)
            comm.all_gather(self.full, self.compute_shard, self.axis)
        self.is_gathered = True
        self.bind()

    def release(self) -> None:
        if not self.is_gathered:
            return
        self.hide()
        if self.full is not self.compute_shard:
            self.tiers.arena.empty(self.full)
        self.tiers.done_with(self)

    def hide(self) -> None:
        """Lets the parameters read NaN."""
        self.is_gathered = False
        for slot in self.slots:
            slot.parameter.data = self._placeholder(slot)

    @property
    def is_here(self) -> bool:
        """Whether this rank's part is on the device, or on its way."""
        return self.compute_shard.nbytes == 0 or self.compute_shard.untyped_storage().nbytes() > 0

    def fetch(self) -> Copy:
        """Begins to bring this rank's part to the device; half precision is cast on the way.

        Cost: the shard's bytes in compute dtype, from its tier.
        """
        self.tiers.arena.fill(self.compute_shard)
        if self.home.parameter == DISK:
            place = self.places["parameter" if self.dtypes.has_master else "optimizer"]
            return self.tiers.below(DISK).read(place, 0, self.compute_shard)
        return self.tiers.host.raise_up(self.master if self.copy is None else self.copy, self.compute_shard)

    def drop(self) -> None:
        """Lets this rank's part on the device go; what is below is the same or newer."""
        self.tiers.arena.empty(self.compute_shard)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _is_filled_by(self, gradient: torch.Tensor) -> bool:
        return False  # every buffer of the device comes from the arena

    def _new_gradient(self) -> torch.Tensor:
        self.tiers.note(GRADIENT, self)
        return self.tiers.arena.new(self.num_elements, self.dtypes.gradient)

    def start_reduce(self) -> comm.Pending:
        gradient = self._complete_gradient()
        self._fresh = gradient
        if self.axis.size > 1:
            self._fresh = self.tiers.arena.new(self.shard_elements, self.dtypes.gradient)
        return comm.reduce_scatter(as_real(self._fresh), as_real(gradient), self.reduce_axis, wait=False)

    def finish_reduce(self, pending: comm.Pending) -> None:
        pending.wait()
        self.is_reduced = True
        for slot in self.slots:
            slot.written = False
        fresh, gradient, self.gradient = self._fresh, self.gradient, None
        del self._fresh
        if gradient is not fresh and gradient is not None:
            self.tiers.arena.empty(gradient)
        if self.home.gradient != DEVICE:
            self.tiers.land()
            self.tiers.let_leave(self._store(fresh), fresh)
        elif self.reduced is None:
            self.reduced = fresh
        else:
            self.reduced.add_(fresh)
            self.tiers.arena.empty(fresh)
        self.tiers.note(REDUCED, self)

    def _store(self, fresh: torch.Tensor) -> Copy:
        """Moves a summed gradient to its tier, added to what earlier passes left there."""
        place, tier = self.places["gradient"], self.tiers.below(self.home.gradient)
        if self.reduced is None:
            self.reduced = place.view(self.dtypes.gradient)
            return tier.write(place, 0, fresh)
        if self.home.gradient == HOST:
            tier.count_written(fresh.nbytes)
            self.reduced.add_(fresh.to(self.reduced.device))
        else:
            with self.tiers.staged(tier, place, place.num_bytes) as staged:
                staged.view(self.dtypes.gradient).add_(fresh.to("cpu"))
                tier.write(place, 0, staged).wait()
        return Copy()

    @contextmanager
    def gradient_at_hand(self) -> Iterator[None]:
        """The summed gradient in memory while inside, where it lives on the disk."""
        self.tiers.land()
        if self.home.gradient != DISK or self.reduced is None:
            yield
            return
        place, reduced = self.places["gradient"], self.reduced
        with self.tiers.staged(self.tiers.below(DISK), place, place.num_bytes) as staged:
            self.reduced = staged.view(self.dtypes.gradient)
            try:
                yield
            finally:
                self.reduced = reduced

    def clear_gradients(self) -> None:
        self.tiers.land()
        if self.home.is_device and self.reduced is not None:
            self.tiers.arena.empty(self.reduced)
        if self.gradient is not None:
            self.tiers.arena.empty(self.gradient)
        super().clear_gradients()

    # -- the update ----------------------------------------------------------------------------------------------------

    @contextmanager
    def optimizer_at_hand(self, state: dict[Any, dict[str, Any]]) -> Iterator[None]:
        """Master weights and moments in memory while inside, and what was changed there kept."""
        if self.home.optimizer != DISK:
            yield
            return
        place, disk, mapped = self.places["optimizer"], self.tiers.below(DISK), self.master
        with self.tiers.staged(disk, place, place.num_bytes) as staged:
            self.master = staged[: self.master_bytes].view(self.dtypes.master)
            self._show(self.master)
            self._file_moments(state, staged, keep=True)
            yield
            self._file_moments(state, staged, keep=False)
            disk.write(place, 0, staged).wait()
            self._publish_from_staged(disk)
        self.master = mapped
        self._show(mapped)
        self._file_moments(state, place.bytes, keep=True)

    def _publish_from_staged(self, disk: Tier) -> None:
        if self.copy is not None and self.home.parameter == HOST:
            self.copy.copy_(self.master)
        elif self.copy is not None:
            disk.write(self.places["parameter"], 0, self.master.to(self.dtypes.compute)).wait()
        if self.stays:
            self._raise_master()

    def _raise_master(self) -> None:
        self.tiers.host.raise_up(self.master, self.compute_shard).wait()

    def _show(self, master: torch.Tensor) -> None:
        """Lets what the optimizer holds show a master that lies elsewhere now."""
        for slot in self.shards:
            assert slot.shard is not None
            slot.shard.data = self.shard_view(slot, master)

    def _moment_tensors(self, state: dict[Any, dict[str, Any]]) -> Iterator[tuple[Slot, str, torch.Tensor]]:
        for slot in self.shards:
            for key, value in state.get(slot.shard, {}).items():
                if isinstance(value, torch.Tensor) and slot.shard is not None and value.shape == slot.shard.shape and value.dim():
                    yield slot, key, value

    def _file_moments(self, state: dict[Any, dict[str, Any]], region: torch.Tensor | None = None, keep: bool = False) -> None:
        """Lets moments lie in a region behind the master; with `keep` the region's content is theirs, else theirs is copied into it."""
        region = self.places["optimizer"].bytes if region is None else region
        flats, offset = {}, self.master_bytes
        for key, dtype in self.moments:
            size = self.shard_elements * dtype.itemsize
            flats[key] = region[offset : offset + size].view(dtype)
            offset += size
        for slot, key, value in self._moment_tensors(state):
            view = self.shard_view(slot, flats[key])
            if not keep and view.data_ptr() != value.data_ptr():
                view.copy_(value)
            value.data = view

    def publish(self) -> None:
        """Makes an update of the master visible; what the device holds of the old one goes."""
        if self.dtypes.has_master:
            self._refuse_lost_edits()
        if self.stays:
            if self.home.optimizer == HOST:
                self._raise_master()
            elif self.home.is_device and self.dtypes.has_master:
                self.compute_shard.copy_(self.master)
            comm.all_gather(self.full, self.compute_shard, self.axis)
            return None
        if self.is_gathered:
            self.release()
        if self.home.is_device:
            if self.dtypes.has_master:
                self.compute_shard.copy_(self.master)
            return None
        self.tiers.forget(self)
        return None
