"""The automatic schedule: orders forwards and both halves of backwards by measured costs, under a limit of memory.

Every known schedule that fits is a candidate, so the result is never slower than the best of them; beside them stand orders that
ranks choose greedily as a simulated step goes on, and what becomes of the best by exchanging neighbours.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import PlanError
from phalanx.parallel.pipeline.balance import LayerCosts
from phalanx.parallel.pipeline.messages import add_messages
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.simulate import Costs, Timeline, peaks, ready_at, simulate
from phalanx.parallel.pipeline.table import Action, Kind, Table, done_as

CutCosts = Callable[[int], Costs | None]  # the costs of a cut into so many stages, None where there are too few layers
Limits = Sequence[float] | None


def auto_schedule(costs: CutCosts, num_ranks: int, num_micro: int, limits: Limits = None, *, tries: int = 40, seed: int = 0) -> Table:
    """The fastest table that is found for these costs whose ranks hold no more than `limits`.

    Cost: some hundred simulated steps.
    Raises: PlanError where no order fits the limits.
    """
    fitting: list[tuple[float, Table, Costs]] = []
    least: list[float] | None = None
    for table, cut in _candidates(costs, num_ranks, num_micro, limits):
        held = peaks(table, cut)
        if fits(held, limits):
            fitting.append((simulate(table, cut).step_s, table, cut))
        elif least is None or max(held) < max(least):
            least = held
    if not fitting:
        assert limits is not None
        raise PlanError(
            f"no order of {num_micro} micro-batches holds at most {min(limits):g} bytes of activations on each rank",
            allowed=f"{max(least or [0]):g} bytes or more",
            remedy="more micro-batches of fewer rows, or recompute",
        )
    step_s, table, cut = min(fitting, key=lambda found: found[0])
    table = _exchange_neighbours(table, cut, limits, step_s, tries, random.Random(seed))
    return add_messages(replace(table, name="auto-schedule"))


def plan_table(schedule: str, interleaved: int, num_ranks: int, num_micro: int, num_chunks: int, layers: LayerCosts) -> Table:
    """The table of a plan's schedule; `auto-schedule` may hold what `num_ranks` whole micro-batches do, as the other ones do."""
    if schedule != "auto-schedule":
        return make_table("interleaved" if interleaved > 1 else schedule, num_ranks, num_micro, num_chunks)
    whole = layers.cut(num_ranks)
    limits = None if whole is None else [num_ranks * max(whole.activation_bytes)] * num_ranks
    return auto_schedule(layers.cut, num_ranks, num_micro, limits)


def known_tables(costs: CutCosts, num_ranks: int, num_micro: int) -> Iterator[tuple[Table, Costs]]:
    """Every schedule for which the model has enough layers, with the costs of its cut."""
    for name, chunks in (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2), ("interleaved", 2), ("interleaved", 3)):
        cut = costs(num_ranks * chunks)
        if cut is not None:
            yield make_table(name, num_ranks, num_micro, chunks), cut


def _candidates(costs: CutCosts, num_ranks: int, num_micro: int, limits: Limits) -> Iterator[tuple[Table, Costs]]:
    yield from known_tables(costs, num_ranks, num_micro)
    for turns, chunks in ((False, 1), (True, 2), (False, 2)):
        cut = costs(num_ranks * chunks)
        if cut is None:
            continue
        blank = Table(name="greedy", num_ranks=num_ranks, num_micro=num_micro, num_chunks=chunks, turns=turns)
        for patience, backward_first, deepest_first in itertools.product((0.0, 0.5, 1.0), (True, False), (True, False)):
            choice = _Greedy(blank, cut, limits, patience, backward_first, deepest_first)
            table = choice.run()
            if table is not None:
                yield table, cut


def fits(held: Sequence[float], limits: Limits) -> bool:
    return limits is None or all(mine <= limit * (1 + 1e-12) for mine, limit in zip(held, limits))


@dataclass
class _Greedy:
    """Lets every rank choose its next action as soon as it is free.

    `patience`: the part of a weight half's time that a rank rather waits for a message; `backward_first`: backwards go before
    forwards; `deepest_first`: among chunks, the one nearer to the loss goes first.
    """

    blank: Table
    costs: Costs
    limits: Limits
    patience: float
    backward_first: bool
    deepest_first: bool
    ends: dict[tuple[int, Action], float] = field(default_factory=dict)

    def run(self) -> Table | None:
        """The table of the orders chosen, or None where memory does not let it end."""
        table = self.blank
        self.rows: list[list[Action]] = [[] for _ in range(table.num_ranks)]
        self.clock, self.held = [0.0] * table.num_ranks, [0.0] * table.num_ranks
        self.next = {(rank, kind, chunk): 0 for rank in range(table.num_ranks) for kind in _HALVES for chunk in range(table.num_chunks)}
        for _ in range(3 * table.num_stages * table.num_micro):
            offers = [offer for rank in range(table.num_ranks) if (offer := self._choose(rank)) is not None]
            if not offers:
                return None
            self._do(*min(offers, key=lambda offer: offer[0]))
        return table.with_rows(self.rows)

    def _choose(self, rank: int) -> tuple[float, int, Action] | None:
        """What a rank does next, as (start, rank, action)."""
        messages: list[tuple[float, bool, int, Action]] = []
        weights: list[tuple[float, bool, int, Action]] = []
        for chunk in range(self.blank.num_chunks):
            for kind in _HALVES:
                action = Action(kind, self.next[rank, kind, chunk], chunk)
                if action.micro >= self.blank.num_micro or (kind is Kind.FORWARD and not self._has_room(rank, chunk)):
                    continue
                ready = ready_at(self.blank, rank, action, self.ends, self.costs.transfer)
                if ready is None:
                    continue
                depth = -chunk if self.deepest_first == (kind is Kind.FORWARD) else chunk
                rank_of_kind = (kind is Kind.FORWARD) == self.backward_first
                start = max(ready, self.clock[rank])
                (weights if kind is Kind.WEIGHT else messages).append((start, rank_of_kind, depth, action))
        soonest = min(messages, default=None)
        if weights:
            start, _, _, action = min(weights)
            waits = self.patience * self.costs.seconds(Kind.WEIGHT, self.blank.stage(rank, action.chunk))
            if soonest is None or soonest[0] > start + waits:
                return start, rank, action
        return None if soonest is None else (soonest[0], rank, soonest[3])

    def _has_room(self, rank: int, chunk: int) -> bool:
        needs = self.costs.held(self.blank.stage(rank, chunk))
        if self.limits is None:
            return True
        # The last room of a rank is for its deepest chunk: what is there can always end.
        deeper = sum(self.costs.held(self.blank.stage(rank, other)) for other in range(chunk + 1, self.blank.num_chunks))
        return self.held[rank] + needs + deeper <= self.limits[rank] * (1 + 1e-12)

    def _do(self, start: float, rank: int, action: Action) -> None:
        stage = self.blank.stage(rank, action.chunk)
        self.rows[rank].append(action)
        self.next[rank, action.kind, action.chunk] += 1
        self.clock[rank] = start + self.costs.seconds(action.kind, stage)
        self.ends.update(((rank, half), self.clock[rank]) for half in done_as(action))
        self.held[rank] += self.costs.held(stage) if action.kind is Kind.FORWARD else -self.costs.freed(action.kind, stage)


_HALVES = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)


def _exchange_neighbours(table: Table, costs: Costs, limits: Limits, step_s: float, tries: int, draw: random.Random) -> Table:
    """Exchanges two neighbours of one rank at a time where the step gets shorter and memory still fits."""
    rows = [table.computations(rank) for rank in range(table.num_ranks)]
    best = table.with_rows(rows)
    for _ in range(tries):
        row = draw.randrange(len(rows))
        place = draw.randrange(len(rows[row]) - 1)
        tried = [list(order) for order in rows]
        tried[row][place], tried[row][place + 1] = tried[row][place + 1], tried[row][place]
        changed = best.with_rows(tried)
        shorter = _step_or_none(changed, costs)
        if shorter is not None and shorter.step_s < step_s and fits(peaks(changed, costs), limits):
            rows, best, step_s = tried, changed, shorter.step_s
    return best


def _step_or_none(table: Table, costs: Costs) -> Timeline | None:
    try:
        return simulate(table, costs)
    except PlanError:
        return None
