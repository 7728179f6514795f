"""Messages between stages: tensors of any shape, announced once for each shape of micro-batch, received while others are computed.

Both ends see the same micro-batches, and what a forward hands on has shapes that follow from theirs. So a header goes before the
tensors of the first micro-batch of each signature; from then on receives begin before the message is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import PlanError
from phalanx.parallel.pipeline.handed import Entry, Header
from phalanx.parallel.pipeline.table import Action

Key = tuple[int, int]  # (micro-batch, chunk)


class Outbox:
    """Sends in the background and keeps what was sent until it has left: as the device tells, or as a later message shows."""

    def __init__(self) -> None:
        self._leaving: list[tuple[Action, comm.Pending, torch.Tensor]] = []

    def send(self, action: Action, tensor: torch.Tensor, axis: Axis, peer: int) -> None:
        """Sends a tensor of the message that `action` sends."""
        tensor = tensor.detach().contiguous()
        self._leaving.append((action, comm.send(tensor, axis, peer, wait=False), tensor))
        while self._leaving and self._leaving[0][1].done():
            self._leaving.pop(0)[1].wait()

    def forget(self, arrived: Container[Action]) -> None:
        """Lets go of what is known to have arrived; gloo does not tell of a send whether it is over."""
        for action, pending, _ in self._leaving:
            if action in arrived:
                pending.wait()
        self._leaving = [entry for entry in self._leaving if entry[0] not in arrived]

    def flush(self) -> None:
        """Waits until everything has left."""
        for _, pending, _ in self._leaving:
            pending.wait()
        self._leaving.clear()


class Announcements:
    """The headers that one boundary between two stages has seen, by the signature of the micro-batch."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Header] = {}

    def announce(self, action: Action, signature: Hashable, header: Header, outbox: Outbox, axis: Axis, peer: int) -> None:
        """Sends the header where the signature is new.

        Raises: PlanError where equal inputs led to other shapes than before: the receiver expects those.
        """
        known = self.known.get(signature)
        if known is None:
            self.known[signature] = header
            data = torch.frombuffer(bytearray(header.dumps()), dtype=torch.uint8)
            outbox.send(action, torch.tensor([len(data)]), axis, peer)
            outbox.send(action, data, axis, peer)
        elif known.entries != header.entries:
            shapes = [[tuple(entry.shape) for entry in one.entries] for one in (known, header)]
            if shapes[0] == shapes[1]:
                raise PlanError(
                    "a stage hands on tensors of which others have a gradient than before, as where parameters were frozen or unfrozen",
                    allowed="parameters of which the same learn in all steps of a pipeline",
                    remedy="requires_grad before booster.boost",
                )
            raise PlanError(
                f"a stage hands on tensors of shapes {shapes[1]}, and for inputs of the same shapes it handed on {shapes[0]} before",
                allowed="hidden states whose shapes follow from those of the batch",
                remedy="zero3 in place of the pipeline",
            )

    def receive(self, signature: Hashable, axis: Axis, peer: int) -> Header:
        """Waits for the header of a new signature."""
        length = torch.zeros(1, dtype=torch.int64)
        comm.recv(length, axis, peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        comm.recv(data, axis, peer)
        self.known[signature] = Header.loads(data.numpy().tobytes())
        return self.known[signature]


@dataclass
class Arrival:
    """One message on its way: the tensors it fills."""

    tensors: list[torch.Tensor]
    pending: list[comm.Pending] = field(default_factory=list)

    def wait(self) -> list[torch.Tensor]:
        for pending in self.pending:
            pending.wait()
        self.pending = []
        return self.tensors


class Inbox:
    """Receives the messages of one channel in the order in which they are sent.

    `entries_of(key, must)` tells what a message holds; where that is not known yet it returns None, or, if it `must`, waits for it.
    """

    def __init__(self, axis: Axis, peer: int, device: torch.device, entries_of: Callable[[Key, bool], Sequence[Entry] | None]):
        self.axis, self.peer, self.device, self.entries_of = axis, peer, device, entries_of
        self._expected: list[Key] = []
        self._landing: dict[Key, Arrival] = {}

    def begin(self, key: Key) -> None:
        """Begins a receive, as far as what comes before it is known."""
        self._expected.append(key)
        while self._expected and (entries := self.entries_of(self._expected[0], False)) is not None:
            self._land(self._expected.pop(0), entries)

    def take(self, key: Key) -> list[torch.Tensor]:
        """The tensors of a message that was begun; waits for them."""
        while key not in self._landing:
            first = self._expected.pop(0)
            entries = self.entries_of(first, True)
            assert entries is not None
            self._land(first, entries)
        return self._landing.pop(key).wait()

    def _land(self, key: Key, entries: Sequence[Entry]) -> None:
        arrival = Arrival([torch.empty(entry.shape, dtype=entry.dtype, device=self.device) for entry in entries])
        arrival.pending = [comm.recv(tensor, self.axis, self.peer, wait=False) for tensor in arrival.tensors]
        self._landing[key] = arrival
