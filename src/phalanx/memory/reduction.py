"""Sums gradients over ranks while the backward still runs, in one order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress

import torch

from phalanx.cluster import comm
from phalanx.errors import CommError, ConfigError
from phalanx.memory.chunk import Chunk, Slot

IN_FLIGHT = 1  # reductions that run beside the backward; more would hold more gradient buffers at once


class GradientReducer:
    """Watches gradients arrive, and reduces each chunk as soon as it is complete.

    Reductions are issued in reverse order of the chunks given, whatever order gradients arrive in; a chunk that is ready early waits for
    the ones before it, and at the end of the backward the rest is issued with zeros for what was not reached. So all ranks issue
    the same sequence, even where one of them ran a module that another did not.
    """

    def __init__(self, chunks: Sequence[Chunk], in_flight: int = IN_FLIGHT):
        self.chunks, self.most_in_flight = list(reversed(chunks)), in_flight
        self.hooks = [self._watch(chunk, slot) for chunk in self.chunks for slot in chunk.slots if slot.can_learn and not chunk.is_natural]
        self.in_backward = False
        self.synchronise = True
        self.on_complete = lambda chunk: None
        self.early: list[tuple[Chunk, comm.Pending]] = []  # sums that were begun between two backwards
        self._reset()

    def _reset(self) -> None:
        self.queue: list[Chunk] = []
        self.missing: dict[int, int] = {}
        self.issued: set[int] = set()
        self.in_flight: list[tuple[Chunk, comm.Pending]] = []

    def _watch(self, chunk: Chunk, slot: Slot):
        def collect(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            self._arrived(chunk, slot, gradient)

        # A frozen parameter may be unfrozen later, so it is watched from the start.
        frozen = not slot.parameter.requires_grad
        if frozen:
            slot.parameter.requires_grad_(True)
        handle = slot.parameter.register_post_accumulate_grad_hook(collect)
        if frozen:
            slot.parameter.requires_grad_(False)
        return handle

    def begin(self, synchronise: bool, *, keeps_all: bool = False, within: Container[str] | None = None) -> None:
        """Before a backward. `synchronise` False leaves unsharded gradients local until a later backward or `finish`.

        `keeps_all` leaves sharded ones local too. `within` names the chunks that this backward may reach, all if None.
        """
        self._reset()
        self.in_backward, self.synchronise = True, synchronise
        for chunk in self.chunks:
            if chunk.is_trainable and not chunk.is_natural and (within is None or chunk.name in within):
                self._land_early(chunk)
                if chunk.is_reduced:
                    chunk.reopen_gradient()
                self.missing[id(chunk)] = sum(_is_awaited(slot) for slot in chunk.slots)
                if (synchronise or chunk.policy.gradient) and not keeps_all:
                    self.queue.append(chunk)

    def _arrived(self, chunk: Chunk, slot: Slot, gradient: torch.Tensor) -> None:
        if not self.in_backward:
            raise backward_outside()
        if gradient.is_sparse:
            raise sparse_gradient(slot.name)
        if id(chunk) in self.issued:
            raise ConfigError(
                f"a second gradient of '{slot.name}' arrived in one backward after its chunk was reduced",
                allowed="one gradient per parameter and backward",
                remedy="non-reentrant activation checkpointing (use_reentrant=False)",
            )
        chunk.add_gradient(slot, gradient)
        self.missing[id(chunk)] -= _is_awaited(slot)
        if self.missing[id(chunk)] == 0:
            self.on_complete(chunk)
            self._issue_ready()

    def _issue_ready(self) -> None:
        while self.queue and self.missing[id(self.queue[0])] <= 0 and not self.queue[0].is_occasional:
            self._issue(self.queue.pop(0))

    def _issue(self, chunk: Chunk) -> None:
        self.issued.add(id(chunk))
        self.in_flight.append((chunk, chunk.start_reduce()))
        while len(self.in_flight) > self.most_in_flight:
            self._land()

    def _land(self) -> None:
        chunk, pending = self.in_flight.pop(0)
        chunk.finish_reduce(pending)

    def end(self) -> None:
        """After a backward: reduces what is left and waits for all."""
        for chunk in self.queue:
            self._issue(chunk)
        while self.in_flight:
            self._land()
        comm.release_buffers()
        self.in_backward = False
        self.queue = []

    def abandon(self) -> None:
        """After a backward that raised: forgets its state, so that the error is what the person sees.

        Sums that are under way still write into gradients, which another try would use; they are waited for.
        """
        with suppress(CommError):
            for _, pending in self.in_flight:
                pending.wait()
        self.in_backward = False
        self._reset()

    def reduce(self, chunks: Container[Chunk]) -> None:
        """Outside of a backward: begins the sums of what passes without synchronisation left local in these chunks.

        They run beside what follows, until another backward reaches the chunk or `finish`.
        """
        for chunk in self.chunks:
            if chunk in chunks and self._is_local(chunk):
                self.early.append((chunk, chunk.start_reduce()))

    def _is_local(self, chunk: Chunk) -> bool:
        return chunk.is_trainable and not chunk.is_natural and not chunk.is_reduced

    def _land_early(self, chunk: Chunk | None = None) -> None:
        """Ends the sums that were begun between backwards, of one chunk or of all."""
        for entry in [entry for entry in self.early if chunk in (None, entry[0])]:
            self.early.remove(entry)
            entry[0].finish_reduce(entry[1])

    def forget(self) -> None:
        """Waits for sums that were begun between backwards, whose gradients nobody wants any more."""
        while self.early:
            self.early.pop()[1].wait()

    def finish(self) -> None:
        """Before the optimizer: reduces whatever passes without synchronisation left local."""
        self._land_early()
        for chunk in self.chunks:
            if self._is_local(chunk):
                chunk.finish_reduce(chunk.start_reduce())

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self.hooks:
            handle.remove()


def _is_awaited(slot: Slot) -> bool:
    """Whether a chunk is incomplete without a gradient of this parameter: experts that live elsewhere get none here."""
    return slot.parameter.requires_grad and (slot.num_elements > 0 or not slot.is_occasional)


def backward_outside() -> ConfigError:
    """The refusal of gradients that no `booster.backward` announced."""
    return ConfigError(
        "a backward ran outside of the booster, so its gradients cannot be reduced",
        allowed="booster.step(batch), booster.forward_backward(batch) or booster.backward(loss, optimizer)",
        remedy="replace loss.backward() by booster.backward(loss, optimizer)",
    )


def sparse_gradient(name: str) -> ConfigError:
    """The refusal of a gradient that does not hold every element."""
    return ConfigError(f"the gradient of '{name}' is sparse", allowed="dense gradients", remedy="sparse=False in the embedding")
