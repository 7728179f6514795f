"""Bytes of tensor parallelism on the benchmark's model, counted by the kernel and by the ledger: `python -m bench.wire`.

Two steps of two depths are taken, so that what the ends of the model and the agreement on a step send drops out. The kernel counts what
all ranks send on the loopback device of a private network; the headers of its packets are subtracted.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.ranks import run_forked
from bench.train import commit
from bench.workload import SHAPE

ROWS, TOKENS, DEPTHS, STEPS = 8, 64, (4, 2), 2
PLANS = {"tp2": 2, "tp2+sp": 2, "tp4:2d": 4, "tp8:2.5d2": 8, "tp8:3d": 8}
# Ethernet, IPv4, and TCP with its time stamps.
HEADER_BYTES = 14 + 20 + 32


def sent_payload() -> int:
    """Bytes that all ranks have sent so far, without headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.strip().partition(":")
        if interface == "lo":
            numbers = [int(number) for number in counters.split()]
            return numbers[8] - HEADER_BYTES * numbers[9]
    raise OSError("no loopback device")


def measure(plan: str) -> dict:
    """For each depth what one step sends: the kernel's count of all ranks, and the ledger's of this one."""
    import phalanx as px
    from phalanx.cluster import comm

    torch.set_num_threads(1)
    px.launch()
    kernel, ledger = [], []
    for depth in DEPTHS:
        booster = px.Booster(plan)
        booster.boost(_model(depth))
        world = booster.mesh.world
        ids = torch.randint(SHAPE["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "labels": ids}
        booster.forward_backward(batch)
        comm.barrier(world)
        before, counted = sent_payload(), comm.ledger.total_wire_bytes()
        comm.barrier(world)
        for _ in range(STEPS):
            booster.forward_backward(batch)
        counted = comm.ledger.total_wire_bytes() - counted
        comm.barrier(world)
        kernel.append((sent_payload() - before) / STEPS)
        ledger.append(counted / STEPS)
        comm.barrier(world)
    return {"kernel": kernel[0] - kernel[1], "ledger": ledger[0] - ledger[1]}


def _model(depth: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": depth}, use_cache=False, attn_implementation="sdpa"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.wire", description=__doc__)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    options = parser.parse_args()
    print(f"commit {commit()}, {ROWS} rows of {TOKENS} tokens, {DEPTHS[0] - DEPTHS[1]} layers, all ranks together")
    print("| plan | ledger MB | kernel MB, no headers | kernel over ledger |\n| --- | ---: | ---: | ---: |")
    for plan in options.plans:
        answer = run_forked(lambda rank, plan=plan: measure(plan), PLANS[plan], timeout_s=600)
        if "error" in answer:
            raise SystemExit(answer["error"])
        ledger, kernel = sum(rank["ledger"] for rank in answer["ranks"]), answer["ranks"][0]["kernel"]
        note = "" if answer["private"] else " (no private network)"
        print(f"| `{plan}` | {ledger / 1e6:.3f} | {kernel / 1e6:.3f} | {kernel / ledger:.4f}{note} |", flush=True)


if __name__ == "__main__":
    main()
