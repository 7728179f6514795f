"""Where the state lives, the smallest budget, and the bytes of a step: arithmetic on a record."""

from dataclasses import replace

import pytest

from phalanx.errors import CapacityError
from phalanx.memory.placing import DEVICE, DISK, HOST, Home, Sizes, host_bytes, place_below, plan_step
from phalanx.memory.record import GATHER, GRADIENT, REDUCED, RELEASE, Event, Record

GB = 10**9


def chunk(number, elements=100, **options):
    """A chunk in float32 under Adam."""
    sizes = dict(full=4 * elements, shard=4 * elements, gradient=4 * elements, gradient_shard=4 * elements, optimizer=12 * elements)
    return Sizes(name=f"chunk {number}", **(sizes | options))


def record_of(num_chunks, others=0):
    """The order of a plain stack: forward, backward, each gradient summed when it is complete."""
    last = num_chunks - 1
    events = [Event(kind, n) for n in range(last) for kind in (GATHER, RELEASE)] + [Event(GATHER, last)]
    for n in reversed(range(num_chunks)):
        events += [Event(GATHER, n)] if n < last else []
        events += [Event(GRADIENT, n), Event(RELEASE, n), Event(REDUCED, n)]
    return Record(tuple(events), (others,) * (len(events) + 1))


def plan(sizes, device, record=None, homes=None, **options):
    return plan_step(sizes, homes or place_below(sizes, GB, None, GB), record or record_of(len(sizes)), device, **options)


def test_the_host_holds_16_bytes_per_parameter_and_half_precision_adds_none():
    assert host_bytes(chunk(0, 1), Home()) == 16
    assert host_bytes(chunk(0, 1, shard=2, full=2, is_cast=True), Home()) == 16
    assert host_bytes(chunk(0, 1, gradient=0, gradient_shard=0), Home()) == 12
    assert host_bytes(chunk(0, 1, shard=2, full=2, is_cast=True), Home(HOST, DISK, DISK)) == 2


def test_the_smallest_budget_is_exact():
    sizes = [chunk(n) for n in range(4)]
    smallest = plan(sizes, GB).smallest
    assert smallest == 400 + 400, "the parameters in use and their gradient"
    assert plan(sizes, smallest).smallest == smallest
    with pytest.raises(CapacityError, match=r"needs 800 bytes on the device.*Try: device = 800"):
        plan(sizes, smallest - 1)
    assert plan(sizes, GB, record_of(4, others=50)).smallest == 850
    assert plan(sizes, GB, placement=DEVICE).smallest == 4 * 1200 + 4 * 400, "everything, and the sum of the gradients at the end"


def test_bytes_fall_as_the_budget_grows():
    sizes = [chunk(n) for n in range(6)]
    moved = [sum(plan(sizes, device).moved.values()) for device in range(800, 12_000, 200)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0
    least = plan(sizes, 800)
    # Each chunk comes for the forward and again for the backward, but for the last, which stays in between; each gradient leaves.
    assert least.moved == {(HOST, "read"): 11 * 400, (HOST, "written"): 6 * 400, (DISK, "read"): 0, (DISK, "written"): 0}


def test_placements():
    sizes = [chunk(n) for n in range(6)]
    host = plan(sizes, 5000, placement=HOST)
    assert not host.kept
    assert all(not home.is_device for home in host.homes)
    static, auto = plan(sizes, 5000, passes=3, placement="static"), plan(sizes, 5000, passes=3)
    assert sum(auto.moved.values()) <= sum(static.moved.values()) < sum(plan(sizes, 5000, passes=3, placement=HOST).moved.values())
    assert all(home.is_device for home in plan(sizes, GB, placement=DEVICE).homes)
    with pytest.raises(CapacityError, match='or placement "auto"'):
        plan(sizes, 5000, placement=DEVICE)


def test_what_is_not_trained_stays_over_the_end_of_a_step():
    sizes = [replace(chunk(n), is_trainable=False, gradient=0, gradient_shard=0) for n in range(4)]
    events = [event for event in record_of(4).events if event.kind in (GATHER, RELEASE)]
    frozen = plan(sizes, 4 * 400, Record(tuple(events), (0,) * (len(events) + 1)), homes=[Home()] * 4)
    assert sum(frozen.moved.values()) == 0
    tight = plan(sizes, 2 * 400, Record(tuple(events), (0,) * (len(events) + 1)), homes=[Home()] * 4, placement="auto")
    assert 0 < tight.moved[HOST, "read"] < 7 * 400


def test_the_disk_takes_what_the_host_cannot_and_parameters_move_up_first():
    sizes = [chunk(n, is_cast=True, shard=200, full=200) for n in range(4)]
    below = sum(host_bytes(size, Home()) for size in sizes)
    assert place_below(sizes, below, None, 0) == [Home()] * 4
    staging = 1200 + 400
    assert place_below(sizes, staging + 2 * 200, GB, 0) == [Home(HOST, DISK, DISK)] * 2 + [Home(DISK, DISK, DISK)] * 2
    with_gradient = place_below(sizes, staging + 4 * 200 + 400, GB, 0)
    assert with_gradient == [Home(HOST, HOST, DISK)] + [Home(HOST, DISK, DISK)] * 3
    with pytest.raises(CapacityError, match="a chunk of the disk is updated in 1600"):
        place_below(sizes, staging - 1, GB, 0)
    with pytest.raises(CapacityError, match=r"needs 7200 bytes on the disk.*disk = 7200"):
        place_below(sizes, staging, 7199, 0)
    with pytest.raises(CapacityError, match="needs 6400 bytes below the device"):
        place_below(sizes, 0, None, 0)
    assert [home.is_device for home in place_below(sizes, below // 2, None, GB)] == [False, False, True, True]


def test_the_disk_is_counted():
    sizes = [chunk(n, is_cast=True, shard=200, full=200) for n in range(3)]
    homes = [Home(DISK, DISK, DISK)] * 3
    moved = plan(sizes, 600, homes=homes, passes=2, placement=HOST).moved
    fetched = (3 + 2) * 2 * 200
    assert moved[DISK, "read"] == fetched + 3 * (1200 + 400 * 3), "states once; gradients for the second pass, the norm and the update"
    assert moved[DISK, "written"] == 3 * (1200 + 200 + 400 * 2)
    assert moved[HOST, "read"] == moved[HOST, "written"] == 0


def test_gradients_leave_beside_the_work_where_there_is_room():
    sizes = [chunk(n) for n in range(4)]
    assert not plan(sizes, 800, may_lag=True).lags
    roomy = plan(sizes, 1200, placement=HOST, may_lag=True)
    assert roomy.lags
    assert roomy.smallest == 800, "the smallest budget is that without"
    assert roomy.moved == plan(sizes, 800).moved | {(HOST, "read"): 8 * 400 - 400}


def test_fetches_are_foreseen():
    sizes = [chunk(n) for n in range(4)]
    events = len(record_of(4).events)
    fast = plan(sizes, 4000, placement=HOST, durations=[1.0] * events, bytes_per_s={HOST: 400.0})
    assert fast.starts
    assert fast.stall_s == 0.0
    slow = plan(sizes, 4000, placement=HOST, durations=[1.0] * events, bytes_per_s={HOST: 100.0})
    assert slow.stall_s >= 7 * 4.0 - events
