"""Says whether a table can be run: each action once, what it needs before it, messages in order, no dead-lock, bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.messages import channels, receives_before, sends_after
from phalanx.parallel.pipeline.table import COMPUTE, RECEIVES, SENDS, STATE, Action, Kind, Table, done_as


def require_valid(table: Table, memory_limits: Sequence[int] | None = None) -> None:
    """Does nothing if the table can be run.

    Raises: PlanError, listing everything that is wrong with it.
    """
    faults = find_faults(table, memory_limits)
    if faults:
        lines = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
        raise PlanError(f"the table {table.name} cannot be run:\n{lines}")


def find_faults(table: Table, memory_limits: Sequence[int] | None = None) -> list[str]:
    """Everything that keeps the table from running; `memory_limits` are the micro-batch activations each rank may hold at once."""
    faults = [*_counts(table), *_messages(table), *_states(table)]
    if not faults:
        faults = [*_run(table)]
    if memory_limits is not None:
        for rank, (held, limit) in enumerate(zip(most_held(table), memory_limits)):
            if held > limit:
                faults.append(f"rank {rank} holds the activations of {held} micro-batches at once, and may hold {limit}")
    return faults


def _counts(table: Table) -> Iterator[str]:
    """Each micro-batch goes once forward and once back through each chunk, the backward whole or in two halves."""
    if len(table.rows) != table.num_ranks:
        yield f"{len(table.rows)} rows for {table.num_ranks} ranks"
    for rank, row in enumerate(table.rows):
        done = Counter(half for action in row for half in done_as(action) if half.kind in COMPUTE and half.kind is not Kind.BACKWARD)
        for chunk in range(table.num_chunks):
            for micro in range(table.num_micro):
                for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
                    count = done.pop(Action(kind, micro, chunk), 0)
                    if count != 1:
                        yield f"rank {rank} does {Action(kind, micro, chunk)} {count} times"
        yield from (f"rank {rank} does {action}, which there is not" for action in done)


def _messages(table: Table) -> Iterator[str]:
    """What is sent is received, in the same order, after it was made and before it is used."""
    for (kind, source, target), (sent, received) in channels(table).items():
        if sent != received:
            shown = [" ".join(str(action) for _, action in side) for side in (sent, received)]
            yield f"rank {source} sends {kind} to rank {target} as [{shown[0]}], which receives [{shown[1]}]"
    for rank, row in enumerate(table.rows):
        place = {action: number for number, action in enumerate(row)}
        for action, number in place.items():
            for receive in receives_before(table, rank, action):
                if place.get(receive, len(row)) > number:
                    yield f"rank {rank} does {action} before {receive}"
            sends = list(sends_after(table, rank, action))
            yield from (f"rank {rank} does not {send} after {action}" for send in sends if place.get(send, -1) < number)
        wanted = sum(1 for action in row if action.kind in COMPUTE for _ in receives_before(table, rank, action))
        given = sum(action.kind in RECEIVES for action in row)
        if given != wanted:
            yield f"rank {rank} receives {given} messages and uses {wanted}"


def _states(table: Table) -> Iterator[str]:
    """Where a table moves state: with a U, every computation is between one and an R of its chunk; with a G, gradients end in one."""
    kinds = {action.kind for row in table.rows for action in row}
    gathers, reduces = Kind.UNSHARD in kinds, Kind.REDUCE in kinds
    for rank, row in enumerate(table.rows):
        gathered: set[int] = set()
        open_gradients: set[int] = set()
        for action in row:
            if action.kind is Kind.UNSHARD:
                gathered.add(action.chunk)
            elif action.kind is Kind.RESHARD:
                gathered.discard(action.chunk)
            elif action.kind is Kind.REDUCE:
                open_gradients.discard(action.chunk)
            elif action.kind in COMPUTE:
                if gathers and action.chunk not in gathered:
                    yield f"rank {rank} does {action} while chunk {action.chunk} is not gathered"
                if reduces and action.kind is not Kind.FORWARD:
                    open_gradients.add(action.chunk)
        yield from (f"rank {rank} never reduces the gradients of chunk {chunk}" for chunk in sorted(open_gradients))


def _run(table: Table) -> Iterator[str]:
    """Goes through all rows as far as what each action needs is done; what is left waits for itself.

    A receive begins without waiting and ends at its use; a send waits for nothing but what it sends.
    """
    done: set[tuple[int, Action]] = set()
    place = [0] * table.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while place[rank] < len(row) and _is_ready(table, rank, row[place[rank]], done):
                done.update((rank, half) for half in done_as(row[place[rank]]))
                place[rank] += 1
                moved = True
    for rank, row in enumerate(table.rows):
        if place[rank] < len(row):
            action = row[place[rank]]
            missing = [f"{need} of rank {other}" for other, need in table.needs(rank, action) if (other, need) not in done]
            yield f"rank {rank} waits for ever before {action}, for {', '.join(missing)}"


def _is_ready(table: Table, rank: int, action: Action, done: set[tuple[int, Action]]) -> bool:
    if action.kind in RECEIVES or action.kind in SENDS or action.kind in STATE:
        return True
    return all(need in done for need in table.needs(rank, action))


def most_held(table: Table) -> list[int]:
    """For each rank the most (micro-batch, chunk) activations that it holds at once: from the forward to the end of the backward."""
    peaks = []
    for row in table.rows:
        held = peak = 0
        for action in row:
            held += action.kind is Kind.FORWARD
            peak = max(peak, held)
            held -= action.kind in (Kind.WEIGHT, Kind.BACKWARD)
        peaks.append(peak)
    return peaks
