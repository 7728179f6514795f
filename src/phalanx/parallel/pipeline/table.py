"""What every rank of a pipeline does, as data: actions in order, for each rank one row.

A model is cut into *stages*; each rank holds one or several of them, its *chunks*. Micro-batches pass all stages forward and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of action; the value is how one is printed."""

    FORWARD = "F"
    INPUT = "B"  # the half of a backward that the previous stage waits for: gradients of the stage's inputs
    WEIGHT = "W"  # the other half: gradients of the stage's weights
    BACKWARD = "BW"  # both halves at once
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    UNSHARD = "U"
    RESHARD = "R"
    REDUCE = "G"

    __hash__ = str.__hash__  # searches look up actions by the million, and an Enum's own hash runs in Python


COMPUTE = frozenset({Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD})
SENDS = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}
RECEIVES = frozenset(SENDS.values())
STATE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})


class Action(NamedTuple):
    """One thing that a rank does with one micro-batch in one of its chunks; actions on state concern no micro-batch."""

    kind: Kind
    micro: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        micro = "" if self.micro < 0 else str(self.micro)
        return f"{self.kind}{micro}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule: `rows[rank]` lists the actions of a rank in order.

    `turns` is the way in which stages are dealt to ranks: False goes round (stage s to rank s mod p), True goes to and fro, so that
    the last stage of one chunk and the first of the next are on one rank.
    """

    name: str
    num_ranks: int
    num_micro: int
    num_chunks: int = 1
    turns: bool = False
    rows: tuple[tuple[Action, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that a rank holds as this chunk."""
        place = self.num_ranks - 1 - rank if self.turns and chunk % 2 else rank
        return chunk * self.num_ranks + place

    def home(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) of a stage."""
        chunk, place = divmod(stage, self.num_ranks)
        return (self.num_ranks - 1 - place if self.turns and chunk % 2 else place), chunk

    def needs(self, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
        """What a computation waits for, as (rank, action); a backward may be there as a whole or as its input half."""
        stage, micro = self.stage(rank, action.chunk), action.micro
        if action.kind is Kind.FORWARD:
            if stage > 0:
                before, chunk = self.home(stage - 1)
                yield before, Action(Kind.FORWARD, micro, chunk)
        elif action.kind is Kind.WEIGHT:
            yield rank, Action(Kind.INPUT, micro, action.chunk)
        else:
            yield rank, Action(Kind.FORWARD, micro, action.chunk)
            if stage < self.num_stages - 1:
                after, chunk = self.home(stage + 1)
                yield after, Action(Kind.INPUT, micro, chunk)

    def peer(self, rank: int, action: Action) -> int:
        """The rank at the other end of a send or receive."""
        stage = self.stage(rank, action.chunk)
        return self.home(stage + (1 if action.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD) else -1))[0]

    def partner(self, rank: int, action: Action) -> tuple[int, Action]:
        """The receive that takes what a send gives, as (rank, action)."""
        stage = self.stage(rank, action.chunk)
        other, chunk = self.home(stage + (1 if action.kind is Kind.SEND_FORWARD else -1))
        return other, Action(SENDS[action.kind], action.micro, chunk)

    def origin(self, rank: int, action: Action) -> tuple[int, Action]:
        """The send whose message a receive takes, as (rank, action): the inverse of `partner`."""
        forward = action.kind is Kind.RECV_FORWARD
        other, chunk = self.home(self.stage(rank, action.chunk) + (-1 if forward else 1))
        return other, Action(Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, action.micro, chunk)

    def with_rows(self, rows: list[list[Action]]) -> Table:
        return replace(self, rows=tuple(tuple(row) for row in rows))

    def computations(self, rank: int) -> list[Action]:
        """A rank's row without communication and state."""
        return [action for action in self.rows[rank] if action.kind in COMPUTE]


def done_as(action: Action) -> tuple[Action, ...]:
    """What counts as done once this action is: a whole backward is both halves."""
    if action.kind is Kind.BACKWARD:
        return action, action._replace(kind=Kind.INPUT), action._replace(kind=Kind.WEIGHT)
    return (action,)
