"""Reports of all ranks through the store, for a thread beside the one that trains.

Such a thread runs no collective: it could not keep one order with those of the step, and its waits would look like a rank's own.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from phalanx.cluster import failure, launch
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError

# Ranks that are still well may end what they do together after another one has failed; then nobody waits any longer.
GRACE_S = 3.0
POLL_S = (0.001, 0.05)  # at first, and at most


class Meeting:
    """The ranks that do one thing together; `name` is theirs alone, and the same on all of them.

    Cost: per round one message to the store and one from it for each rank, and one of each for the first one.
    """

    def __init__(self, name: str):
        current = launch.world()
        self._name, self._round, self._timeout_s = name, 0, current.timeout_s
        store: Any = current.store  # the stubs of dist.Store lack clone()
        # A connection of its own: no call of this thread holds up one of another thread.
        self._store: Any = store.clone() if store is not None else None

    def gather(self, report: object, axis: Axis) -> list[Any]:
        """The reports of all ranks in the order of the axis, on every rank, as `comm.gather_objects`.

        Raises: PeerError where a rank has failed; CommError where one does not come in time.
        """
        if axis.size == 1 or self._store is None:
            return [report] * axis.size
        self._round += 1
        place, store = f"meeting/{self._name}/{self._round}", self._store
        store.set(f"{place}/{axis.index}", _pack(report))
        if axis.index == 0:
            keys = [f"{place}/{index}" for index in range(axis.size)]
            self._await(keys)
            store.set(f"{place}/all", _pack([_unpack(store.get(key)) for key in keys]))
        self._await([f"{place}/all"])
        everyone = _unpack(store.get(f"{place}/all"))
        store.delete_key(f"{place}/{axis.index}")
        if store.add(f"{place}/read", 1) == axis.size:  # the last one clears the table
            store.delete_key(f"{place}/all")
            store.delete_key(f"{place}/read")
        return everyone

    def _await(self, keys: list[str]) -> None:
        pause_s, failed_at, deadline = POLL_S[0], None, time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            now, failed = time.monotonic(), failure.noticed()
            if failed is not None:
                failed_at = failed_at or now
                if now - failed_at > GRACE_S:
                    raise failure.peer_error(failed, "waiting for what the other ranks report")
            if now > deadline:
                raise CommError(f"not all ranks have reported within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])


def _pack(report: object) -> str:
    return pickle.dumps(report).hex()


def _unpack(text: bytes) -> Any:
    return pickle.loads(bytes.fromhex(text.decode()))
