"""Debug mode: before a collective runs, its ranks compare what they are about to do, so that drift is named and not hung on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import NoReturn

import torch
import torch.distributed as dist

from phalanx.cluster import failure, launch
from phalanx.cluster.mesh import Axis
from phalanx.errors import CommError

# A rank that is later than this is reported as missing, whatever the time-out of collectives is.
ARRIVE_S = 60.0


@dataclass(frozen=True)
class Record:
    """What one rank is about to do. `detail` is the reduction, the source or the dtype of the result."""

    rank: int
    operation: str
    call_site: str
    shape: list[int]
    dtype: str
    detail: str
    splits: list[list[int]] | None = None


_sequence: Counter[tuple[int, ...]] = Counter()


def compare(
    operation: str,
    axis: Axis,
    tensor: torch.Tensor | None,
    call_site: str,
    *,
    detail: str = "",
    splits: tuple[list[int], list[int]] | None = None,
    peer: int | None = None,
) -> None:
    """Meets the other ranks of the operation in the shared store and compares.

    Cost: one store message to write and one to read for each other rank; only for debugging.
    Raises: CommError on every rank where two differ, or where one does not come.
    """
    current = launch.world()
    if current.store is None:
        return
    shape = list(tensor.shape) if tensor is not None else []
    mine = Record(
        current.rank, operation, call_site, shape, str(tensor.dtype) if tensor is not None else "", detail, list(splits) if splits else None
    )
    if peer is not None:
        _compare_message(current.store, axis, peer, mine)
        return
    _sequence[axis.ranks] += 1
    number = _sequence[axis.ranks]
    records = _exchange(current.store, "-".join(map(str, axis.ranks)), number, mine, axis.ranks)
    difference = _difference(records, axis.ranks)
    if difference:
        _raise(f"collective {number} on axis {axis.name}: {difference}")


def _compare_message(store: dist.Store, axis: Axis, peer: int, mine: Record) -> None:
    """Compares a message with its other end, by whichever rank comes second: the first may have more to do before it waits."""
    here, there = axis.ranks[axis.index], axis.ranks[peer]
    pair = (here, there) if mine.operation == "send" else (there, here)
    _sequence[(*pair, -1)] += 1
    number = _sequence[(*pair, -1)]
    place = f"debug/{pair[0]}>{pair[1]}/{number}"
    store.set(f"{place}/{here}", json.dumps(asdict(mine)))
    if not store.check([f"{place}/{there}"]):
        return
    records = {here: mine, there: Record(**json.loads(store.get(f"{place}/{there}")))}
    sender, receiver = records[pair[0]], records[pair[1]]
    differing = [name for name in ("shape", "dtype") if getattr(sender, name) != getattr(receiver, name)]
    if differing:
        _raise(f"message {number} on axis {axis.name}: {_tell(sender, receiver, differing)}")


def _exchange(store: dist.Store, name: str, number: int, mine: Record, ranks: tuple[int, ...]) -> dict[int, Record]:
    """Every rank's record; ends with an error that names those that did not come."""
    place = f"debug/{name}"
    store.set(f"{place}/{number}/{mine.rank}", json.dumps(asdict(mine)))
    if number > 2:  # everyone has read that one, or could not have come to the last
        store.delete_key(f"{place}/{number - 2}/{mine.rank}")
    keys = {rank: f"{place}/{number}/{rank}" for rank in ranks}
    missing = failure.wait_for_keys(
        store, list(keys.values()), min(ARRIVE_S, launch.world().timeout_s), f"about to {mine.operation} at {mine.call_site}"
    )
    if missing:
        names = ", ".join(str(rank) for rank, key in keys.items() if key in missing)
        _raise(f"rank {names} did not come to {mine.operation} at {mine.call_site}, collective {number} of ranks {list(ranks)}")
    return {rank: Record(**json.loads(store.get(key))) for rank, key in keys.items()}


def _difference(records: dict[int, Record], ranks: tuple[int, ...]) -> str:
    """The first difference to the first rank, with both call sites; "" where all agree."""
    first = records[ranks[0]]
    for rank in ranks[1:]:
        other = records[rank]
        names = [entry.name for entry in fields(Record) if entry.name not in ("rank", "splits")]
        if first.operation == other.operation == "all_to_all":
            names.remove("shape")  # parts may be uneven: what counts is that both ends agree on each
        differing = [name for name in names if getattr(first, name) != getattr(other, name)]
        if differing:
            return _tell(first, other, differing)
    return _split_difference(records, ranks) if first.splits is not None else ""


def _split_difference(records: dict[int, Record], ranks: tuple[int, ...]) -> str:
    for here, sender in enumerate(ranks):
        for there, receiver in enumerate(ranks):
            sent, expected = records[sender].splits, records[receiver].splits
            if sent is not None and expected is not None and sent[1][there] != expected[0][here]:
                return (
                    f"rank {sender} sends {sent[1][there]} elements to rank {receiver}, which expects {expected[0][here]}; "
                    f"call sites {records[sender].call_site} and {records[receiver].call_site}"
                )
    return ""


def _tell(first: Record, other: Record, differing: list[str]) -> str:
    def say(record: Record) -> str:
        return f"rank {record.rank} {record.operation} of {record.dtype}{record.shape} {record.detail}".rstrip() + f" at {record.call_site}"

    return f"{' and '.join(differing)} differ: {say(first)}; {say(other)}"


def _raise(message: str) -> NoReturn:
    error = CommError(message)
    failure.publish(error)
    raise error
