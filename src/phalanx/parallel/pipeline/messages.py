"""Adds sends and receives to a table of computations."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.parallel.pipeline.table import COMPUTE, RECEIVES, SENDS, Action, Kind, Table

Channel = tuple[Kind, int, int]  # what is sent, from which rank, to which


def add_messages(table: Table, ahead: int = 1) -> Table:
    """The table with a send after each computation that another rank waits for, and the receive `ahead` computations before its use.

    Messages of one channel arrive in the order they are sent in, so receives are begun in that order, early enough for each use.
    """
    sent: dict[Channel, list[tuple[int, Action]]] = {}
    for rank, row in enumerate(table.rows):
        for action in row:
            for send in sends_after(table, rank, action):
                receiver, receive = table.partner(rank, send)
                sent.setdefault((send.kind, rank, receiver), []).append((receiver, receive))
    rows = [_with_messages(table, rank, sent, ahead) for rank in range(table.num_ranks)]
    return table.with_rows(rows)


def _with_messages(table: Table, rank: int, sent: dict[Channel, list[tuple[int, Action]]], ahead: int) -> list[Action]:
    row = [action for action in table.rows[rank] if action.kind in COMPUTE]
    begun: dict[int, list[Action]] = {}  # before which computation which receives begin
    waiting = {channel: [action for _, action in queue] for channel, queue in sent.items() if channel[2] == rank}
    for place, action in enumerate(row):
        for receive in receives_before(table, rank, action):
            queue = next(queue for queue in waiting.values() if receive in queue) if receive not in _flat(begun) else []
            while queue:
                begun.setdefault(max(place - ahead, 0), []).append(first := queue.pop(0))
                if first == receive:
                    break
    out: list[Action] = []
    for place, action in enumerate(row):
        out += [*begun.get(place, []), action, *sends_after(table, rank, action)]
    return out


def _flat(begun: dict[int, list[Action]]) -> set[Action]:
    return {action for actions in begun.values() for action in actions}


def receives_before(table: Table, rank: int, action: Action) -> Iterator[Action]:
    """The receive that a computation uses, if what it needs comes from another rank."""
    stage = table.stage(rank, action.chunk)
    if action.kind is Kind.FORWARD and stage > 0 and table.home(stage - 1)[0] != rank:
        yield Action(Kind.RECV_FORWARD, action.micro, action.chunk)
    if action.kind in (Kind.INPUT, Kind.BACKWARD) and stage < table.num_stages - 1 and table.home(stage + 1)[0] != rank:
        yield Action(Kind.RECV_BACKWARD, action.micro, action.chunk)


def sends_after(table: Table, rank: int, action: Action) -> Iterator[Action]:
    """The send of what a computation made, if another rank needs it."""
    stage = table.stage(rank, action.chunk)
    if action.kind is Kind.FORWARD and stage < table.num_stages - 1 and table.home(stage + 1)[0] != rank:
        yield Action(Kind.SEND_FORWARD, action.micro, action.chunk)
    if action.kind in (Kind.INPUT, Kind.BACKWARD) and stage > 0 and table.home(stage - 1)[0] != rank:
        yield Action(Kind.SEND_BACKWARD, action.micro, action.chunk)


def channels(table: Table) -> dict[Channel, tuple[list[tuple[int, Action]], list[tuple[int, Action]]]]:
    """For each channel what is sent and what is received on it, both in order and as the (rank, receive) they arrive at."""
    found: dict[Channel, tuple[list[tuple[int, Action]], list[tuple[int, Action]]]] = {}
    for rank, row in enumerate(table.rows):
        for action in row:
            if action.kind in SENDS:
                receiver, receive = table.partner(rank, action)
                found.setdefault((action.kind, rank, receiver), ([], []))[0].append((receiver, receive))
            elif action.kind in RECEIVES:
                kind = Kind.SEND_FORWARD if action.kind is Kind.RECV_FORWARD else Kind.SEND_BACKWARD
                found.setdefault((kind, table.peer(rank, action), rank), ([], []))[1].append((rank, action))
    return found


def arrivals(table: Table) -> list[dict[Action, list[Action]]]:
    """For each rank and each of its receives, the sends that have arrived by then.

    A message comes from a rank that has used, earlier in its row, what it was sent before: no further sign is needed.
    """
    known: list[dict[Action, list[Action]]] = [{} for _ in table.rows]
    for rank, row in enumerate(table.rows):
        used: dict[int, list[Action]] = {}
        for action in row:
            if action.kind in COMPUTE:
                for receive in receives_before(table, rank, action):
                    sender, send = table.origin(rank, receive)
                    used.setdefault(sender, []).append(send)
            elif action.kind in SENDS:
                receiver, receive = table.partner(rank, action)
                known[receiver][receive] = used.pop(receiver, [])
    return known
