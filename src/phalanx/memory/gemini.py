"""Training larger than the device: the state lives in tiers, what is needed next is there, what is needed last is away.

The order of uses and the bytes beside the chunks are found before the first step, by a dry run of its largest pass; from them follows
the plan that every step keeps to (`placing`), or the refusal with the smallest budget that would do. A pass that leaves the order is
served on demand, within the same budget.

The update is exact with clipping and skipped steps: gradients leave for their tier during the backward, the norm over all ranks
decides, and then chunk by chunk the optimizer runs where its part lives, in the order of next use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.log import get_logger
from phalanx.memory.arena import Arena, Budget
from phalanx.memory.partition import Unit
from phalanx.memory.placing import DEVICE, DISK, HOST, Home, MemoryPlan, Need, Sizes, need_of, place_below, plan_step
from phalanx.memory.record import GATHER, RELEASE, DryRun, Event, Pass, Record, agreed_orders, reads_numbers
from phalanx.memory.stream import ParameterStream
from phalanx.memory.tier import Copy, Disk, Host, Place, Tier
from phalanx.memory.tiered import TieredChunk


@dataclass(frozen=True, kw_only=True)
class TierSizes:
    """The budgets of one rank. Units: bytes; a link with a stated `bytes_per_s` is no faster."""

    device: int
    host: int
    disk: int | None = None
    disk_path: str | None = None
    placement: str = "auto"
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)


class Gemini:
    """The tiers of one model's state on this rank, and the plan that its chunks follow.

    `moments` are the element-wise parts of the optimizer's state, by key; a dtype of None is that of the master weights.
    Cost: on the host or the disk 12 bytes per parameter of this rank's shard, 16 with the gradient, for two float32 moments.
    """

    def __init__(self, sizes: TierSizes, device: torch.device, moments: Sequence[tuple[str, torch.dtype | None]]):
        self.sizes, self.moments = sizes, tuple(moments)
        self.arena = Arena(Budget(DEVICE, sizes.device), device)
        self.host = Host(sizes.host, device, sizes.bytes_per_s.get(HOST))
        self.disk = Disk(sizes.disk, sizes.disk_path, sizes.bytes_per_s.get(DISK)) if sizes.disk and sizes.disk_path else None
        self.chunks: list[TieredChunk] = []
        self.came_from: dict[int, Home] = {}  # of chunks that moved to the device for good
        self.plan: MemoryPlan | None = None
        self.planned_for: list[tuple[Any, ...]] = []
        self.is_unplannable = False
        self.optimizer_state: dict[Any, dict[str, Any]] = {}
        self.follows = False
        self.at = 0
        self.pending: dict[TieredChunk, Copy] = {}
        self.leaving: tuple[Copy, torch.Tensor] | None = None
        self.clock = _Clock()

    def below(self, tier: str) -> Tier:
        if tier == DISK:
            assert self.disk is not None
            return self.disk
        return self.host

    def settle(self, chunks: Sequence[Any]) -> None:
        """Decides where each chunk begins, before any of them has memory.

        Raises: CapacityError where the tiers together are too small for the state.
        """
        self.chunks = list(chunks)
        for number, chunk in enumerate(self.chunks):
            chunk.number = number
        found = [chunk.sizes() for chunk in self.chunks]
        fixed = sum(size.full for size in found if size.stays)
        homes = place_below(found, self.sizes.host, self.sizes.disk, self.sizes.device - fixed)
        for chunk, home in zip(self.chunks, homes, strict=True):
            chunk.home = home

    # -- planning ------------------------------------------------------------------------------------------------------

    def prepare(
        self, model: nn.Module, units: Sequence[Unit], stream: ParameterStream, largest: Pass, passes: int, shards: Axis, world: Axis
    ) -> None:
        """Before the passes of a step: makes the plan for the largest of them, unless a plan for one as large is there.

        Collective over `shards` and `world` the first time.
        Raises: CapacityError where no order of moves keeps within the device's budget, the first time on every rank.
        """
        shapes = (passes, tuple(chunk.learns for chunk in self.chunks), _shapes(largest.rows))
        if self.is_unplannable or any(_covers(known, shapes) for known in self.planned_for):
            return
        in_flight = 1 if shards.size > 1 else 0
        with stream.aside():
            record = self._record(DryRun(model, units, self.chunks, self.arena.device, in_flight), largest)
        record = record and _joined(record, self.plan, passes)
        if not self.planned_for:
            orders = agreed_orders(record, shards)
            if orders is not None:
                forward, backward, read_outside = orders
                stream.follow(forward, backward, [self.chunks[number] for number in read_outside])
        need = self._need(record, passes)
        if not self.planned_for:  # all ranks have the same budget: they go on together, or none does
            need = max(comm.gather_objects(need, world))
            need.require(self.sizes.device, self.sizes.placement)
        self.planned_for.append(shapes)
        self.is_unplannable = record is None
        if record is not None:
            self._carry_out(self._plan_for(record, passes, need))

    def _record(self, run: DryRun, largest: Pass) -> Record | None:
        try:
            return run.record(largest)
        except RuntimeError as error:
            if not reads_numbers(error):
                raise
            get_logger().warning(
                f"the order of a pass cannot be found without running it ({error}): chunks come on demand, and the device's budget "
                "does not count activations"
            )
            return None

    def _need(self, record: Record | None, passes: int) -> Need:
        return need_of(*self._below(), record, passes, self.sizes.placement) if record is not None else Need()

    def _below(self) -> tuple[list[Sizes], list[Home]]:
        """The sizes of all chunks, and where their parts live as long as none is on the device for good."""
        return [chunk.sizes() for chunk in self.chunks], [self.came_from.get(chunk.number, chunk.home) for chunk in self.chunks]

    def _plan_for(self, record: Record, passes: int, need: Need, durations: Sequence[float] | None = None) -> MemoryPlan:
        options = {"passes": passes, "placement": self.sizes.placement, "durations": durations, "bytes_per_s": self.sizes.bytes_per_s}
        options["may_lag"] = self.host.is_asynchronous or self.disk is not None
        return plan_step(*self._below(), record, self.sizes.device, need=need, **options)  # type: ignore[arg-type]

    def _carry_out(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self._let_go_of_all()
        moves = [(chunk, home) for chunk, home in zip(self.chunks, plan.homes, strict=True) if chunk.home != home]
        self.came_from |= {chunk.number: chunk.home for chunk, home in moves if home.is_device}
        for chunk, home in sorted(moves, key=lambda move: move[1].is_device):  # what leaves the device makes room first
            chunk.move_to(home, self.optimizer_state)

    def _let_go_of_all(self) -> None:
        for chunk in self.chunks:
            if not chunk.stays and not chunk.home.is_device and not chunk.is_gathered:
                self.forget(chunk)

    # -- the plan in a pass --------------------------------------------------------------------------------------------

    def begin_pass(self, number: int) -> None:
        """A pass of a planned step begins: the one of this number."""
        if self.plan is None:
            return
        events = len(self.plan.record.events)
        self.follows, self.at = True, number % self.plan.passes * events
        self.clock.begin(events)
        self._enter_interval()

    def end_passes(self) -> None:
        self.follows = False
        self.arena.budget.reserve(0)

    def _enter_interval(self) -> None:
        """Keeps free what the interval before the next event needs beside the chunks, and begins the fetches that are due."""
        assert self.plan is not None
        record = self.plan.record
        self.arena.budget.reserve(record.others[self.at % len(record.events) if self.at else 0])
        self._begin_fetches()

    def _begin_fetches(self) -> None:
        assert self.plan is not None
        events = self.plan.record.events
        for gather in self.plan.starts.get(self.at, ()):
            chunk = self.chunks[events[gather % len(events)].chunk]
            if not chunk.is_here:
                self.pending[chunk] = chunk.fetch()

    def note(self, kind: str, chunk: TieredChunk) -> int | None:
        """An event happens; returns its number where it is the next of the plan."""
        if not self.follows:
            return None
        assert self.plan is not None
        events = self.plan.record.events
        if self.at >= len(events) * self.plan.passes or events[self.at % len(events)] != Event(kind, chunk.number):
            self.follows = False
            return None
        self.clock.tick(self.at % len(events))
        self.at += 1
        place = self.at % len(events)
        last = self.at == len(events) * self.plan.passes
        others = self.plan.record.others
        joint = max(others[0], others[-1]) if place == 0 else others[place]
        self.arena.budget.reserve(others[-1] if last else joint)
        if kind not in (GATHER, RELEASE):
            self._begin_fetches()
        return self.at - 1

    def want(self, chunk: TieredChunk) -> None:
        """A chunk is about to be used: returns when its shard is on the device."""
        follows = self.note(GATHER, chunk) is not None
        begin = time.perf_counter()
        if not chunk.is_here:
            if not follows:
                self._make_room(chunk)
            self.pending[chunk] = chunk.fetch()
        if (copy := self.pending.pop(chunk, None)) is not None:
            copy.wait()
        self.clock.waited += time.perf_counter() - begin
        if follows:
            self._begin_fetches()

    def let_leave(self, copy: Copy, gradient: torch.Tensor) -> None:
        """A gradient is on its way down: it is waited for now, or when the next one leaves, as there is room."""
        self.leaving = copy, gradient
        if not (self.follows and self.plan is not None and self.plan.lags):
            self.land()

    def land(self) -> None:
        """Waits for the gradient that is on its way, and gives its memory back."""
        if self.leaving is not None:
            begin = time.perf_counter()
            (copy, gradient), self.leaving = self.leaving, None
            copy.wait()
            self.arena.empty(gradient)
            self.clock.waited += time.perf_counter() - begin

    def _make_room(self, chunk: TieredChunk) -> None:
        """Off the plan: whatever is not in use leaves, if there is no room beside it."""
        self.land()
        wanted = chunk.compute_shard.nbytes + (chunk.full.nbytes if chunk.full is not chunk.compute_shard else 0)
        for other in self.chunks:
            if self.arena.budget.free >= wanted:
                return
            if other.is_here and not (other.is_gathered or other.home.is_device or other.stays):
                self.forget(other)

    def done_with(self, chunk: TieredChunk) -> None:
        """A chunk was used: it stays or leaves, as the plan says."""
        stays = self.follows and self.plan is not None and self.at in self.plan.kept
        if not (stays or chunk.home.is_device or chunk.stays):
            chunk.drop()
        if self.note(RELEASE, chunk) is not None:
            self._begin_fetches()
        elif stays and not chunk.home.is_device:
            chunk.drop()

    def forget(self, chunk: TieredChunk) -> None:
        """What the device holds of a chunk is old, or in the way."""
        if (copy := self.pending.pop(chunk, None)) is not None:
            copy.wait()
        chunk.drop()

    # -- the update ----------------------------------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        """Runs the optimizer chunk by chunk, in the order of next use, each part where it lives."""
        self.end_passes()
        self.land()
        self.optimizer_state = optimizer.state
        for chunk in self.chunks:
            if not chunk.learns:
                continue
            with chunk.gradient_at_hand(), chunk.optimizer_at_hand(optimizer.state):
                chunk.expose_gradients()
                with _only(optimizer, chunk):
                    step()
                for slot in chunk.shards:
                    slot.shard.grad = None  # type: ignore[union-attr]
            chunk.publish()
        self._follow_durations()

    def _follow_durations(self) -> None:
        """After the first step that kept to the plan: fetches begin as late as the measured time between events allows."""
        if self.plan is None or self.plan.record.events == () or not self.clock.is_complete:
            return
        durations, self.clock.is_done = self.clock.durations(), True
        if DISK in {home.parameter for home in self.plan.homes} or self.sizes.bytes_per_s:
            self.plan = self._plan_for(self.plan.record, self.plan.passes, Need(self.plan.smallest), durations)

    def restore(self) -> None:
        """After masters and moments were changed from outside."""
        for chunk in self.chunks:
            if chunk.home.optimizer == DISK:
                chunk._file_moments(self.optimizer_state)
            chunk.refresh_copies()
            if not (chunk.stays or chunk.home.is_device):
                self.forget(chunk)

    @contextmanager
    def staged(self, tier: Tier, place: Place, num_bytes: int) -> Iterator[torch.Tensor]:
        """The content of a place of the disk in the host's memory, for a moment."""
        self.host.budget.take(num_bytes)
        staged = torch.empty(num_bytes, dtype=torch.uint8)
        tier.read(place, 0, staged).wait()
        try:
            yield staged
        finally:
            self.host.budget.give(num_bytes)

    def budgets(self) -> dict[str, Budget]:
        """The budget of each tier, with what it holds now."""
        found = {DEVICE: self.arena.budget, HOST: self.host.budget}
        return found | ({DISK: self.disk.budget} if self.disk else {})

    def moved(self) -> dict[tuple[str, str], int]:
        """The bytes that moved over each link so far."""
        found: dict[tuple[str, str], int] = {}
        for name, tier in ((HOST, self.host), (DISK, self.disk)):
            found[name, "read"] = tier.read_bytes if tier else 0
            found[name, "written"] = tier.written_bytes if tier else 0
        return found


class _Clock:
    """How long each interval between two events takes, without the waits for fetches, over the first steps."""

    def __init__(self) -> None:
        self.waited = self.last = 0.0
        self.sums: list[float] = []
        self.seen: set[int] = set()
        self.is_done = False

    def begin(self, events: int) -> None:
        if len(self.sums) != events:
            self.sums, self.seen = [0.0] * events, set()
        self.last, self.waited = time.perf_counter(), 0.0

    def tick(self, event: int) -> None:
        now = time.perf_counter()
        if event not in self.seen:
            self.sums[event] = max(now - self.last - self.waited, 0.0)
            self.seen.add(event)
        self.last, self.waited = now, 0.0

    @property
    def is_complete(self) -> bool:
        return not self.is_done and len(self.seen) == len(self.sums) > 0

    def durations(self) -> list[float]:
        return list(self.sums)


@contextmanager
def _only(optimizer: torch.optim.Optimizer, chunk: TieredChunk) -> Iterator[None]:
    """The optimizer with the parameters of one chunk alone, in their own groups."""
    own = {id(slot.shard) for slot in chunk.shards}
    before = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


def _shapes(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in tree_iter(rows) if isinstance(leaf, torch.Tensor))


def _covers(known: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """Whether a plan for `known` does for `wanted`: the same passes and trained chunks, and no tensor that is larger in any dimension."""
    if known[:2] != wanted[:2] or len(known[2]) != len(wanted[2]):
        return False
    pairs = zip(known[2], wanted[2], strict=True)
    return all(len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in pairs)


def _joined(record: Record, plan: MemoryPlan | None, passes: int) -> Record:
    """The record of a pass that serves the passes planned for before as well, where they have the same events."""
    if plan is None or plan.passes != passes or plan.record.events != record.events:
        return record
    return replace(record, others=tuple(map(max, record.others, plan.record.others)))
