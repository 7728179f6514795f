"""Adds to a table when the state of each chunk is gathered, let go and reduced; whoever holds the state does it."""

from __future__ import annotations

from phalanx.parallel.pipeline.table import Action, Kind, Table


def add_state(table: Table, *, gathers: bool, reduces: bool) -> Table:
    """The table with one gathering (U), one letting go (R) and one reduction (G) of each chunk in a step.

    A chunk is gathered before the first thing that is done in it, a receive included, so that the gathering runs beside what comes
    before; its gradients are reduced after the last, beside what comes after. What the previous stage waits for leaves first.
    """
    before, after = [Kind.UNSHARD] if gathers else [], [*([Kind.REDUCE] if reduces else []), *([Kind.RESHARD] if gathers else [])]
    rows = []
    for row in table.rows:
        first = {action.chunk: place for place, action in reversed(list(enumerate(row)))}
        last = {action.chunk: place for place, action in enumerate(row)}
        out: list[Action] = []
        for place, action in enumerate(row):
            out += [Action(kind, chunk=action.chunk) for kind in before if first[action.chunk] == place]
            out.append(action)
            out += [Action(kind, chunk=action.chunk) for kind in after if last[action.chunk] == place]
        rows.append(out)
    return table.with_rows(rows)
