"""What one layer sends under each kind of tensor parallelism, by the ledger of a rehearsal: `python -m bench.grids`.

Elements per rank, forward and backward, of a classic block (12 h^2 weights): the difference between models of three and of two layers.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from phalanx.booster import Booster
from phalanx.cluster import comm, launch
from phalanx.plan import Plan

ROWS, LENGTH, HIDDEN, HEADS = 16, 64, 256, 8

# The plan's text, with what only its file form can say; and the formula, in x (activations) and w (weights).
CASES: list[tuple[str, dict[str, bool], str]] = [
    ("tp4", {}, "8 * 3/4 * x"),
    ("tp4+sp", {}, "8 * 3/4 * x"),
    ("tp4+sp", {"tp_keep": False}, "10 * 3/4 * x"),
    ("tp4:2d", {}, "3 * 1/4 * (7*x + w)"),
    ("tp4:2d", {"tp_keep": True}, "2 * 1/4 * (7*x + w)"),
    ("tp4:2d", {"tp_outputs_move": True}, "1/4 * (10*x + 3*w)"),
    ("tp4:2d", {"tp_keep": True, "tp_outputs_move": True}, "1/4 * (8*x + 2*w)"),
    ("tp8", {}, "8 * 7/8 * x"),
    ("tp8:2.5d2", {}, "3 * 1/4 * (7*x/2 + w)"),
    ("tp8:2.5d2", {"tp_keep": True, "tp_outputs_move": True}, "1/4 * (8*x/2 + 2*w)"),
    ("tp8:3d", {}, "1/8 * (39*x + 3*w)"),
    ("tp8:3d", {"tp_keep": True}, "2 * 1/8 * (16*x + w)"),
]


def sent(plan: Plan, num_layers: int) -> int:
    """Elements that this rank sends in one forward and backward."""
    launch.shutdown()
    launch.rehearse(plan.tp, 0)
    booster = Booster(plan)
    with FakeTensorMode():
        model: Any = _model(num_layers)
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        with comm.ledger.record() as rows:
            booster.trainings[0].forward_backward({"input_ids": tokens, "labels": tokens})
    return sum(row[4] for row in rows if row[1] in ("tp", "plane", "row", "col", "row.col")) // 4


def _model(num_layers: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=HIDDEN, n_layer=num_layers, n_head=HEADS, bos_token_id=0, eos_token_id=0)
    config.embd_pdrop = config.resid_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def norms(plan: Plan) -> int:
    """The sums of two LayerNorms, which the formulas leave out."""
    if plan.tp_kind == "1d":
        return 0
    side = plan.tensor_axes["col"]
    rows, parts = ROWS * LENGTH // (side * plan.tp_depth), side * side if plan.tp_kind == "3d" else side
    return 2 * rows * (2 * (parts - 1) + 4 * (parts - 1) // parts)


def main() -> None:
    sizes = {"x": ROWS * LENGTH * HIDDEN, "w": 12 * HIDDEN**2}
    print("| plan | formula | elements | found, without norms | norms |\n| --- | --- | ---: | ---: | ---: |")
    for text, options, formula in CASES:
        plan = Plan.from_table({**{name: getattr(Plan.parse(text), name) for name in ("tp", "tp_kind", "tp_depth", "sp")}, **options})
        found = sent(plan, 3) - sent(plan, 2)
        shown = " ".join([f"`{text}`", *(f"`{name}`" if value else f"`{name} = false`" for name, value in options.items())])
        print(f"| {shown} | `{formula}` | {eval(formula, sizes):.0f} | {found - norms(plan)} | {norms(plan)} |", flush=True)


if __name__ == "__main__":
    main()
