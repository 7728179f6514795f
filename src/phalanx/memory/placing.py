"""Where every part of the state lives, what stays on the device between uses, and what follows: bytes moved, waits, smallest budget.

All of it is arithmetic on one record, the sizes of the chunks and the budgets; nothing here touches a tensor.

Bytes per parameter with two float32 moments: below the device 12 where gradients are not counted, 16 with the float32 gradient; half
precision adds nothing there, since a weight is cast as it is fetched. On the device only what is in use, and what there is room for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import CapacityError
from phalanx.memory.eviction import Gap, choose_kept
from phalanx.memory.prefetch import Fetch, choose_starts, predict_seconds
from phalanx.memory.record import GATHER, GRADIENT, REDUCED, RELEASE, Event, Record

DEVICE, HOST, DISK = "device", "host", "disk"
BYTES_PER_S = {HOST: 12e9, DISK: 1.2e9}  # of a link whose bandwidth nobody stated; only their ratio decides anything


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One chunk on this rank.

    Units: bytes. `full` and `gradient` are of the whole chunk in compute and gradient dtype, `shard` and `gradient_shard` of this
    rank's part; `optimizer` is the part's master weights and moments. `is_cast`: the master is not what computes.
    """

    name: str
    full: int
    shard: int
    gradient: int
    gradient_shard: int
    optimizer: int
    is_cast: bool = False
    is_trainable: bool = True
    stays: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.shard < self.full

    @property
    def on_device(self) -> int:
        """What it holds on the device for good where all its parts live there."""
        # A master that computes itself is there once: as the shard, or within what stays.
        beside = (self.shard if self.is_cast and not self.stays else 0) - (self.shard if self.stays and not self.is_cast else 0)
        return self.optimizer + self.gradient_shard + beside


@dataclass(frozen=True)
class Home:
    """The tiers of a chunk's three parts. A part on the device never leaves it."""

    parameter: str = HOST
    gradient: str = HOST
    optimizer: str = HOST

    @property
    def is_device(self) -> bool:
        return self.optimizer == DEVICE


ON_DEVICE = Home(DEVICE, DEVICE, DEVICE)


@dataclass(frozen=True)
class MemoryPlan:
    """What one step does with the chunks, for `passes` passes of one record.

    `kept` are the numbers of the release events after which a chunk stays; `starts` lists, for the interval before each event, the
    gather events whose fetch begins there. `smallest` is the least device budget under which the record runs, `moved` the bytes
    over each link in a step: (tier, "read" or "written"). `stall_s` is what it waits for fetches: at most, as long as no step was timed.
    With `lags` a gradient leaves beside the work, and its memory is free when the next one is summed.
    """

    homes: tuple[Home, ...]
    kept: frozenset[int]
    starts: Mapping[int, tuple[int, ...]]
    smallest: int
    moved: Mapping[tuple[str, str], int]
    stall_s: float = 0.0
    lags: bool = False
    record: Record = field(repr=False, default=Record((), ()))
    passes: int = 1

    def moves_of(self, chunk: int) -> dict[str, list[int]]:
        """When one chunk's parameters move in a step, by the numbers of events: wanted, fetched for it and since when, left there."""
        numbered = list(enumerate(self.record.events * self.passes))
        began = {gather: start for start, gathers in self.starts.items() for gather in gathers}
        is_here = self.homes[chunk].is_device
        found: dict[str, list[int]] = {"used": [], "fetched": [], "begun": [], "stays": []}
        for number, event in numbered:
            if event == Event(GATHER, chunk):
                found["used"].append(number)
                if not is_here:
                    found["fetched"].append(number)
                    found["begun"].append(began.get(number, number))
            elif event == Event(RELEASE, chunk):
                is_here = self.homes[chunk].is_device or number in self.kept
                found["stays"] += [number] if is_here else []
        return found


def place_below(sizes: Sequence[Sizes], host: int, disk: int | None, device: int) -> list[Home]:
    """The tiers of every part before anything runs: the host first, what does not fit on the disk, what fits neither on the device.

    On the disk the parameters are the first to move up to the host (each step reads them twice), then gradients, then the rest.
    Raises: CapacityError where all tiers together are too small.
    """
    homes = [Home() for _ in sizes]
    below = sum(host_bytes(size, home) for size, home in zip(sizes, homes, strict=True))
    if below <= host:
        return homes
    if disk is None:
        return _leave_on_device(sizes, homes, host, device)
    homes = [Home(DISK, DISK, DISK) for _ in sizes]
    left = host - staging_bytes(sizes, homes)
    for step in ({"parameter": HOST}, {"gradient": HOST}, {"optimizer": HOST}):
        for number, size in enumerate(sizes):
            raised = replace(homes[number], **step)
            if raised.optimizer == HOST and (raised.parameter, raised.gradient) != (HOST, HOST):
                continue
            more = host_bytes(size, raised) - host_bytes(size, homes[number])
            if more <= left:
                homes[number], left = raised, left - more
    staging, needed = staging_bytes(sizes, homes), sum(disk_bytes(size, home) for size, home in zip(sizes, homes, strict=True))
    if left < 0:
        raise CapacityError(
            f"the host tier has {host} bytes, and a chunk of the disk is updated in {staging}",
            allowed=f"a host budget of {staging} bytes or more",
            remedy=f"host = {staging}",
        )
    if needed > disk:
        raise CapacityError(
            f"the state needs {needed} bytes on the disk beside {host} on the host, and the disk tier has {disk}",
            allowed=f"a disk budget of {needed} bytes or more, or a larger host",
            remedy=f"disk = {needed}",
        )
    return homes


def _leave_on_device(sizes: Sequence[Sizes], homes: list[Home], host: int, device: int) -> list[Home]:
    left, on_device = host, 0
    for number, size in enumerate(sizes):
        if host_bytes(size, homes[number]) <= left:
            left -= host_bytes(size, homes[number])
        else:
            homes[number] = ON_DEVICE
            on_device += size.on_device
    if on_device > device:
        below = sum(host_bytes(size, Home()) for size in sizes)
        raise CapacityError(
            f"the state needs {below} bytes below the device, the host tier has {host}, and the rest is more than the device's {device}",
            allowed="a host, a disk or a device that holds it",
            remedy=f"host = {below}, or a disk of as much",
        )
    return homes


def host_bytes(size: Sizes, home: Home) -> int:
    """What a chunk keeps on the host for good. Beside an optimizer part on the host, the parameter is cast from it or is its master."""
    optimizer = size.optimizer if home.optimizer == HOST else 0
    gradient = size.gradient_shard if home.gradient == HOST else 0
    parameter = size.shard if home.parameter == HOST and home.optimizer == DISK and not size.stays else 0
    return optimizer + gradient + parameter


def disk_bytes(size: Sizes, home: Home) -> int:
    optimizer = size.optimizer if home.optimizer == DISK else 0
    gradient = size.gradient_shard if home.gradient == DISK else 0
    parameter = size.shard if home.parameter == DISK and size.is_cast and not size.stays else 0
    return optimizer + gradient + parameter


def staging_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What the host holds for a moment while a chunk of the disk is updated."""
    both = zip(sizes, homes, strict=True)
    return max((size.optimizer + size.gradient_shard for size, home in both if DISK in (home.optimizer, home.gradient)), default=0)


# -- a step ------------------------------------------------------------------------------------------------------------


class _Timeline:
    """The events of all passes of a step, and what the device must hold in each interval."""

    def __init__(self, sizes: Sequence[Sizes], homes: Sequence[Home], record: Record, passes: int, lags: bool = False):
        self.sizes, self.homes, self.lags = sizes, homes, lags
        self.events = record.events * passes
        self.length = len(self.events) + 1
        joint = max(record.others[0], record.others[-1]) if record.others else 0
        self.others = list(record.others[:-1]) * passes + [record.others[-1] if record.others else 0]
        for number in range(1, passes):  # the interval between two passes is the end of one and the start of the next
            self.others[number * len(record.events)] = joint
        self.fixed = sum(self._fixed(size, home) for size, home in zip(sizes, homes, strict=True))
        self.needed = [self.fixed + other for other in self.others]
        for start, stop, num_bytes in self._uses():
            for at in range(start, stop):
                self.needed[at] += num_bytes

    @staticmethod
    def _fixed(size: Sizes, home: Home) -> int:
        return (size.full if size.stays else 0) + (size.on_device - size.gradient_shard if home.is_device else 0)

    def _uses(self) -> Iterator[tuple[int, int, int]]:
        """(first interval, interval after the last, bytes) of everything that is there because it is being used."""
        since: dict[tuple[str, int], int] = {}
        end_of = {GATHER: RELEASE, GRADIENT: REDUCED}
        summed: set[int] = set()
        for at, event in enumerate(self.events):
            if event.kind == REDUCED and self.homes[event.chunk].is_device and event.chunk not in summed:
                summed.add(event.chunk)  # from the first pass on its sum is kept for the update
                yield at + 1, self.length, self.sizes[event.chunk].gradient_shard
            if event.kind in end_of:
                since[end_of[event.kind], event.chunk] = at + 1
            elif (start := since.pop((event.kind, event.chunk), None)) is not None:
                yield start, at + 1, self._bytes_in_use(event.kind, event.chunk)
        for (kind, chunk), start in since.items():
            yield start, self.length, self._bytes_in_use(kind, chunk)
        if self.lags:
            yield from self._leaving()

    def _leaving(self) -> Iterator[tuple[int, int, int]]:
        """A summed gradient that leaves beside the work is there until the next one is summed."""
        sums = [at for at, event in enumerate(self.events) if event.kind == REDUCED and not self.homes[event.chunk].is_device]
        for at, following in itertools.zip_longest(sums, sums[1:], fillvalue=self.length - 1):
            yield at + 1, following + 1, self.sizes[self.events[at].chunk].gradient_shard

    def _bytes_in_use(self, kind: str, chunk: int) -> int:
        size, home = self.sizes[chunk], self.homes[chunk]
        if kind == REDUCED:
            return size.gradient + (size.gradient_shard if size.is_sharded else 0)
        return (0 if home.is_device else size.shard) + (size.full if size.is_sharded else 0)

    def gathers(self) -> Iterator[tuple[int, int | None]]:
        """(gather event, the release event before it) of every chunk whose parameters come and go; None where it must come anew.

        What is not trained never changes, so the release before its first gather is the last one of the step before.
        """
        moving = [n for n, size in enumerate(self.sizes) if not size.stays and not self.homes[n].is_device]
        last: dict[int, int] = {}
        for at, event in enumerate(self.events):
            if event.kind == RELEASE and event.chunk in moving and not self.sizes[event.chunk].is_trainable:
                last[event.chunk] = at
        for at, event in enumerate(self.events):
            if event.chunk not in moving:
                continue
            if event.kind == GATHER:
                yield at, last.get(event.chunk)
            elif event.kind == RELEASE:
                last[event.chunk] = at


@dataclass(frozen=True, order=True)
class Need:
    """The least device budget under which a step runs, and how much of it is for what is not the chunks'. Units: bytes."""

    smallest: int = 0
    others: int = 0

    def require(self, device: int, placement: str) -> None:
        """Raises: CapacityError where the budget is too small, with the smallest that would do."""
        if self.smallest > device:
            raise CapacityError(
                f"a step needs {self.smallest} bytes on the device, up to {self.others} of them for activations and temporaries; "
                f"the budget is {device}",
                allowed=f"a device budget of {self.smallest} bytes or more" + (', or placement "auto"' if placement == DEVICE else ""),
                remedy=f"device = {self.smallest}, recompute, or smaller passes (acc)",
            )


def need_of(sizes: Sequence[Sizes], homes: Sequence[Home], record: Record, passes: int, placement: str) -> Need:
    """What a step needs of the device on this rank, with all chunks below it but where `placement` says otherwise."""
    homes = [ON_DEVICE for _ in sizes] if placement == DEVICE else homes
    return Need(max(_Timeline(sizes, homes, record, passes).needed), max(record.others, default=0))


def plan_step(
    sizes: Sequence[Sizes],
    homes: Sequence[Home],
    record: Record,
    device: int,
    *,
    passes: int = 1,
    placement: str = "auto",
    durations: Sequence[float] | None = None,
    bytes_per_s: Mapping[str, float] | None = None,
    may_lag: bool = False,
    need: Need | None = None,
) -> MemoryPlan:
    """The plan of a step under a device budget: which chunks move to the device for good, what stays between uses, what is fetched when.

    `may_lag`: links work beside the device, so that gradients leave while the backward goes on, if there is room for that.
    `need`: that of the rank that needs most, where others plan beside this one.
    Raises: CapacityError where the budget is too small, with the smallest that would do.
    """
    links = BYTES_PER_S | dict(bytes_per_s or {})
    need = need or need_of(sizes, homes, record, passes, placement)
    need.require(device, placement)
    homes = [ON_DEVICE for _ in sizes] if placement == DEVICE else homes
    lags = may_lag and max(_Timeline(sizes, homes, record, passes, lags=True).needed) <= device
    best, best_seconds = None, float("inf")
    for raised in _promotions(sizes, homes, record, passes, device, placement, lags):
        timeline = _Timeline(sizes, raised, record, passes, lags)
        kept = _choose(timeline, device, placement)
        moved = _moved(timeline, kept, passes)
        seconds = sum(count / links[tier] for (tier, _), count in moved.items())
        if seconds < best_seconds:
            best, best_seconds = (timeline, kept, moved), seconds
    assert best is not None
    timeline, kept, moved = best
    starts, stall = _fetches(timeline, kept, device, passes, durations, links)
    return MemoryPlan(tuple(timeline.homes), kept, starts, need.smallest, moved, stall, lags, record, passes)


def _promotions(
    sizes: Sequence[Sizes], homes: Sequence[Home], record: Record, passes: int, device: int, placement: str, lags: bool
) -> Iterator[list[Home]]:
    """The homes with more and more chunks on the device for good, those of the slowest tier first, as far as the budget goes."""
    homes = list(homes)
    yield list(homes)
    if placement == HOST:
        return
    rank = {DISK: 0, HOST: 1}
    order = [n for n in range(len(sizes)) if not homes[n].is_device]
    for number in sorted(order, key=lambda n: (rank[homes[n].optimizer], sizes[n].on_device)):
        homes[number] = ON_DEVICE
        if max(_Timeline(sizes, homes, record, passes, lags).needed) > device:
            return
        yield list(homes)


def _choose(timeline: _Timeline, device: int, placement: str) -> frozenset[int]:
    """The release events after which a chunk stays."""
    if placement == HOST:
        return frozenset()
    pairs = [(gather, release) for gather, release in timeline.gathers() if release is not None]
    room = [device - needed for needed in timeline.needed]
    if placement == "static":
        return _all_or_nothing(timeline, pairs, room)
    shards = [timeline.sizes[timeline.events[gather].chunk].shard for gather, _ in pairs]
    gaps = [Gap(release + 1, gather + 1, size, size) for (gather, release), size in zip(pairs, shards, strict=True)]
    return frozenset(pairs[number][1] for number in choose_kept(gaps, room))


def _all_or_nothing(timeline: _Timeline, pairs: Sequence[tuple[int, int]], room: list[int]) -> frozenset[int]:
    """Static placement: a chunk stays between all its uses or between none."""
    kept: set[int] = set()
    for chunk in dict.fromkeys(timeline.events[gather].chunk for gather, _ in pairs):
        own = [(gather, release) for gather, release in pairs if timeline.events[gather].chunk == chunk]
        size = timeline.sizes[chunk].shard
        covered = list(itertools.chain(*(Gap(r + 1, g + 1, size, size).positions(timeline.length) for g, r in own)))
        if all(room[at] >= size for at in covered):
            kept |= {release for _, release in own}
            for at in covered:
                room[at] -= size
    return frozenset(kept)


def _moved(timeline: _Timeline, kept: frozenset[int], passes: int) -> dict[tuple[str, str], int]:
    """The bytes over each link in a step that is not the first."""
    moved = dict.fromkeys(itertools.product((HOST, DISK), ("read", "written")), 0)
    for gather, release in timeline.gathers():
        if release not in kept:
            chunk = timeline.events[gather].chunk
            moved[timeline.homes[chunk].parameter, "read"] += timeline.sizes[chunk].shard
    for size, home in zip(timeline.sizes, timeline.homes, strict=True):
        if not size.is_trainable or home.is_device:
            continue
        moved[home.gradient, "written"] += size.gradient_shard * passes
        if home.gradient == DISK:  # each pass adds to the one before; then the norm is taken, and the update made
            moved[DISK, "read"] += size.gradient_shard * (passes - 1 + 2)
        if home.optimizer == DISK:
            moved[DISK, "read"] += size.optimizer
            moved[DISK, "written"] += size.optimizer
        if home.parameter == DISK and size.is_cast and not size.stays:
            moved[DISK, "written"] += size.shard
        if size.stays:
            moved[HOST, "read"] += size.shard
    return moved


def _fetches(
    timeline: _Timeline,
    kept: frozenset[int],
    device: int,
    passes: int,
    durations: Sequence[float] | None,
    links: Mapping[str, float],
) -> tuple[dict[int, tuple[int, ...]], float]:
    """For each interval the gather events whose fetch begins in it, and the waits that are foreseen."""
    room = [device - needed for needed in timeline.needed]
    fetches, events = [], []
    for gather, release in timeline.gathers():
        size = timeline.sizes[timeline.events[gather].chunk].shard
        if release is not None and release in kept:
            for at in Gap(release + 1, gather + 1, size, size).positions(timeline.length):
                room[at] -= size
            continue
        seconds = size / links[timeline.homes[timeline.events[gather].chunk].parameter]
        earliest = release + 1 if release is not None and release < gather else 0
        fetches.append(Fetch(gather + 1, size, seconds, earliest))
        events.append(gather)
    spans = list(durations) * passes if durations is not None else [0.0] * (timeline.length - 1)
    spans = [*spans[: timeline.length - 1], 0.0]
    chosen = choose_starts(fetches, room, spans)
    starts: dict[int, tuple[int, ...]] = {}
    for event, start in zip(events, chosen, strict=True):
        if start <= event:
            starts[start] = (*starts.get(start, ()), event)
    return starts, predict_seconds(fetches, chosen, spans)[1]
