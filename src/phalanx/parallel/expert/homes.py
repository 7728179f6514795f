"""Which rank holds which experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch._guards import detect_fake_mode

from phalanx.errors import ConfigError
from phalanx.layout import split_range


@dataclass(frozen=True)
class Homes:
    """The experts of every rank, in the order in which it holds them; each expert has one home.

    Raises: ConfigError where an expert is missing or held twice.
    """

    held: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        everyone = sorted(expert for experts in self.held for expert in experts)
        if everyone != list(range(len(everyone))):
            raise ConfigError(f"the homes {self.held} do not hold experts 0 to {len(everyone) - 1} once each", allowed="one home an expert")

    @classmethod
    def even(cls, num_experts: int, size: int) -> Homes:
        """Neighbouring experts together, counts that differ by at most one; ranks beyond the number of experts hold none."""
        return cls(tuple(tuple(range(*split_range(num_experts, size, index))) for index in range(size)))

    @property
    def num_experts(self) -> int:
        return sum(len(experts) for experts in self.held)

    @property
    def most_held(self) -> int:
        return max(len(experts) for experts in self.held)

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """The experts of one rank as half-open ranges of neighbours; held experts are in ascending order."""
        found: list[tuple[int, int]] = []
        for expert in self.held[index]:
            if found and found[-1][1] == expert:
                found[-1] = (found[-1][0], expert + 1)
            else:
                found.append((expert, expert + 1))
        return tuple(found)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(home, place there) of every expert, on the device."""
        if detect_fake_mode() is not None:  # what a run without data makes is not kept for those with data
            return self._new_tables(device)
        if device not in self._tables:
            self._tables[device] = self._new_tables(device)
        return self._tables[device]

    def _new_tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        home, place = torch.zeros(2, self.num_experts, dtype=torch.int64)
        for rank, experts in enumerate(self.held):
            for at, expert in enumerate(experts):
                home[expert], place[expert] = rank, at
        return home.to(device), place.to(device)

    @cached_property
    def _tables(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor]]:
        return {}


def by_load(loads: Sequence[float], size: int) -> Homes:
    """Homes under which the busiest rank has little more than the mean load, with counts that differ by at most one.

    The heaviest expert first, each to the rank with the least load that still has room. The result depends on the loads alone.
    Source: longest processing time first (Graham 1969, Bounds on multiprocessing timing anomalies), with places limited.
    """
    room = [stop - start for start, stop in (split_range(len(loads), size, index) for index in range(size))]
    carried = [0.0] * size
    held: list[list[int]] = [[] for _ in range(size)]
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        rank = min((rank for rank in range(size) if len(held[rank]) < room[rank]), key=lambda rank: (carried[rank], rank))
        held[rank].append(expert)
        carried[rank] += loads[expert]
    return Homes(tuple(tuple(sorted(experts)) for experts in held))
