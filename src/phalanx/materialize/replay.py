"""Running the part of a recording that some values need, with the memory of about one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.errors import ConfigError
from phalanx.materialize.operations import Operation, Point, Value, Window, name_of


class Replay:
    """Runs the operations that some values need, and hands each storage over when nothing more touches it.

    `reader` names what asks for the values while recording; random operations are then refused.
    """

    def __init__(self, operations: list[Operation], wanted: Iterable[Value], deliver: Callable, reader: str | None = None):
        self.wanted, self.deliver, self.reader = dict.fromkeys(wanted), deliver, reader
        self.order, self.advancing = _needed(operations, self.wanted)
        self.storages: dict[Value, torch.UntypedStorage] = {}
        self.uses: dict[Value, int] = {}
        self.last: dict[Value, Operation] = {}
        self.waits_for, self.stage = self._dependencies()
        self.done: set[Operation] = set()
        self.generator_state = torch.get_rng_state()

    def _changed(self, operation: Operation) -> set[Value]:
        return set() if operation in self.advancing else operation.written | set(operation.creates)

    def _touched(self, operation: Operation) -> set[Value]:
        return operation.read - operation.written if operation in self.advancing else self._changed(operation) | operation.read

    def _dependencies(self) -> tuple[dict[Operation, list[Operation]], dict[Operation, int]]:
        """What each operation waits for, and the number of the last random one among all that it waits for and itself."""
        waits_for: dict[Operation, list[Operation]] = {}
        stage: dict[Operation, int] = {}
        writer: dict[Value, Operation] = {}
        readers: dict[Value, list[Operation]] = {}
        num_random = 0
        for operation in self.order:
            changed, touched = self._changed(operation), self._touched(operation)
            before = [writer[value] for value in touched if value in writer]
            before += [reader for value in changed for reader in readers.get(value, ())]
            num_random += operation.is_random
            waits_for[operation] = before
            stage[operation] = num_random if operation.is_random else max((stage[other] for other in before), default=0)
            for value in touched:
                self.uses[value] = self.uses.get(value, 0) + 1
                self.last[value] = operation
                if value in changed:
                    writer[value], readers[value] = operation, []
                else:
                    readers.setdefault(value, []).append(operation)
        return waits_for, stage

    def run(self) -> None:
        by_stage: dict[int, list[Operation]] = {}
        for operation in self.order:
            by_stage.setdefault(self.stage[operation], []).append(operation)
        for number in sorted(by_stage):
            if number:
                for operation in by_stage[number]:
                    self._run_after_what_it_waits_for(operation)
        for value in self.wanted:
            self._run_after_what_it_waits_for(self.last[value])

    def _run_after_what_it_waits_for(self, operation: Operation) -> None:
        stack = [operation]
        while stack:
            waiting = [other for other in self.waits_for[stack[-1]] if other not in self.done]
            if waiting:
                stack += waiting
            elif (ready := stack.pop()) not in self.done:
                self.done.add(ready)
                self._execute(ready)

    def _execute(self, operation: Operation) -> None:
        if not operation.is_random:
            self._call(operation)
        elif not self.reader:
            self._draw(operation)
        elif operation not in self.advancing:
            raise ConfigError(
                f"{self.reader} reads a value that {name_of(operation.function)} draws at random, under lazy()",
                allowed="reading values that are not random",
                remedy="draw this one before the context, or build without lazy()",
            )
        for value in self._touched(operation):
            self.uses[value] -= 1
            if not self.uses[value]:
                storage = self.storages.pop(value)
                if value in self.wanted:
                    self.deliver(value, storage)

    def _draw(self, operation: Operation) -> None:
        """Calls a random operation at its own state of the generator, which is the program's again afterwards."""
        if operation.starts_at is not None:
            self.generator_state = _state_at(operation.starts_at)
        program_state = torch.get_rng_state()
        torch.set_rng_state(self.generator_state)
        try:
            self._call(operation)
            self.generator_state = torch.get_rng_state()
        finally:
            torch.set_rng_state(program_state)
        if operation.ends_at is not None and operation.ends_at.is_resumed:
            operation.ends_at.state = self.generator_state

    def _call(self, operation: Operation) -> None:
        scratch = operation.written if operation in self.advancing else ()
        args, kwargs = tree_map(lambda leaf: self._tensor(leaf, scratch), (operation.args, operation.kwargs))
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(operation.default_dtype)
        try:
            with torch.no_grad():
                result = operation.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(default_dtype)
        if operation in self.advancing:
            return
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = dict.fromkeys(leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.storages.update(zip(operation.creates, (storage for storage in made if storage not in given)))

    def _tensor(self, leaf: Any, scratch: Iterable[Value]) -> Any:
        if not isinstance(leaf, Window):
            return leaf
        if leaf.value in scratch:
            return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=leaf.value.device)
        if leaf.value not in self.storages:
            self.storages[leaf.value] = torch.UntypedStorage(leaf.value.num_bytes, device=leaf.value.device)
        return leaf.over(self.storages[leaf.value])


def _state_at(place: torch.Tensor | Point) -> torch.Tensor:
    """The generator's state at a point; the draws before it are repeated where that was not yet done."""
    if isinstance(place, torch.Tensor):
        return place
    if place.state is None:
        Replay(place.recording.operations, (), lambda value, storage: None).run()
    assert place.state is not None
    return place.state


def _needed(operations: list[Operation], wanted: Iterable[Value]) -> tuple[list[Operation], set[Operation]]:
    """The operations a replay makes, in order, and those among them that only advance the generator."""
    live, order, advancing = set(wanted), [], set()
    for operation in reversed(operations):
        if (operation.written | set(operation.creates)) & live:
            live -= set(operation.creates)
            if operation.overwrites:
                live -= operation.written
            live |= operation.read
        elif operation.is_random:
            # The number of draws may depend on tensors that are read; those are then needed.
            live |= operation.read - operation.written
            advancing.add(operation)
        else:
            continue
        order.append(operation)
    return order[::-1], advancing
