"""The bytes that a rank of a pipeline holds through a step, from its row of the table and what one micro-batch takes in each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.parallel.pipeline.messages import arrivals
from phalanx.parallel.pipeline.table import Action, Kind, Table


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """What one micro-batch takes in a stage, beside the state of the stage.

    `received` and `handed` are the tensors that come from the stage before and go to the next (their gradients are as large). `kept`
    stays beside them from the forward to the end of the backward, `kept_for_weights`, the received tensors included, between its halves.
    `forward`, `backward`, `input` and `weight` are the most that each rises above what was there when it began. The step's first one that
    makes the weights' gradients leaves `gradients` behind: a whole backward then rises by `first`, a weight half by `first_weight`.
    """

    received: int = 0
    handed: int = 0
    kept: int = 0
    kept_for_weights: int = 0
    forward: int = 0
    backward: int = 0
    input: int = 0
    weight: int = 0
    first: int = 0
    first_weight: int = 0
    gradients: int = 0

    def rise(self, kind: Kind) -> int:
        return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}[kind]


def peak_bytes(table: Table, stages: Sequence[StageBytes]) -> list[int]:
    """For each rank the most that it holds above its state; as many `stages` as the table has.

    What is sent stays until a later message shows that it has arrived; a receive has its memory from when it begins.
    """
    return [_Row(table, rank, stages).peak() for rank in range(table.num_ranks)]


class _Row:
    """Goes through the actions of one rank with a running sum."""

    def __init__(self, table: Table, rank: int, stages: Sequence[StageBytes]):
        self.table, self.rank, self.stages = table, rank, stages
        self.arrived = arrivals(table)[rank]
        self.level = self.highest = 0
        self.has_gradients: set[int] = set()  # by chunk
        self.halved: set[Action] = set()
        self.leaving: dict[Action, int] = {}

    def peak(self) -> int:
        for action in self.table.rows[self.rank]:
            self._do(action, self.stages[self.table.stage(self.rank, action.chunk)])
        return self.highest

    def _do(self, action: Action, stage: StageBytes) -> None:
        match action.kind:
            case Kind.RECV_FORWARD:
                self.level += stage.received
            case Kind.RECV_BACKWARD:
                self.level += stage.handed
            case Kind.FORWARD:
                self._learn(Kind.RECV_FORWARD, action)
                self._rise(stage.forward, stage.kept + stage.handed)
            case Kind.INPUT | Kind.BACKWARD:
                self._learn(Kind.RECV_BACKWARD, action)
                self._backward(action, stage)
            case Kind.WEIGHT if stage.kept_for_weights:
                self._make_gradients(action, stage, -stage.kept_for_weights)
            case Kind.SEND_FORWARD:
                self.leaving[action] = stage.handed
            case Kind.SEND_BACKWARD:
                self.leaving[action] = stage.received
                if action._replace(kind=Kind.INPUT) not in self.halved:
                    self.level -= stage.received  # the tensors themselves, beside whose gradients nothing needs them

    def _backward(self, action: Action, stage: StageBytes) -> None:
        """What comes from the next stage goes; gradients of what was received are new, and replace it where they stay on this rank."""
        change = -stage.handed - stage.kept
        if action.kind is Kind.INPUT and stage.kept_for_weights:
            self.halved.add(action)
            self._rise(stage.input, change + stage.kept_for_weights)
            return
        is_sent = action._replace(kind=Kind.SEND_BACKWARD) in self.table.rows[self.rank]
        self._make_gradients(action, stage, change + (stage.received if is_sent else 0))

    def _make_gradients(self, action: Action, stage: StageBytes, change: int) -> None:
        is_first = action.chunk not in self.has_gradients
        self.has_gradients.add(action.chunk)
        first = stage.first_weight if action.kind is Kind.WEIGHT else stage.first
        self._rise(first if is_first else stage.rise(action.kind), change + (stage.gradients if is_first else 0))

    def _rise(self, most: int, change: int) -> None:
        self.highest = max(self.highest, self.level + most)
        self.level += change

    def _learn(self, receive: Kind, action: Action) -> None:
        """What a message shows to have arrived is let go."""
        for send in self.arrived.get(action._replace(kind=receive), ()):
            self.level -= self.leaving.pop(send, 0)
