"""Cut sequences against one process: CPU seconds of a step, peak bytes of activations, and rehearsals of long rows.

    python -m bench.sequence time [--tokens 4096] [--rounds 7]
    python -m bench.sequence memory [--tokens 8192]
    python -m bench.sequence rehearse [--tokens 131072]

`time`: the rounds of one process and of every plan take turns. A plan is held against half of one process, plus the bytes it sends
times the CPU seconds per byte of a bare all-to-all of 1 MB messages in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

import phalanx as px
from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.testing import run_ranks
from phalanx.train.memory import TensorCount

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
EIGHT_BILLION = {**BILLION, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
MESSAGE_BYTES = 2**20


def llama(**sizes: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=2**20, **sizes))


def batch_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, SMALL["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def boosted(plan: str, sizes: dict[str, int] = SMALL) -> px.Booster:
    booster, model = px.Booster(plan), llama(**sizes)
    booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    return booster


def step_seconds(plan: str, tokens: int, steps: int) -> tuple[float, int]:
    """CPU seconds of this rank's step, and the bytes it sends."""
    booster, batch = boosted(plan), batch_of(tokens)
    booster.step(batch)
    comm.ledger.reset()
    begin = time.process_time()
    for _ in range(steps):
        booster.step(batch)
    return (time.process_time() - begin) / steps, comm.ledger.total_wire_bytes() // steps


def exchange_seconds() -> float:
    """CPU seconds per byte sent of an all-to-all of two ranks."""
    axis = Mesh({"cp": launch.world().size}).axis("cp")
    sent, received = torch.zeros(axis.size * MESSAGE_BYTES // 4), torch.empty(axis.size * MESSAGE_BYTES // 4)
    comm.all_to_all(received, sent, axis)
    begin = time.process_time()
    for _ in range(64):
        comm.all_to_all(received, sent, axis)
    return (time.process_time() - begin) / (64 * MESSAGE_BYTES * (axis.size - 1))


def compare_time(options: argparse.Namespace) -> None:
    plans = options.plans.split(",")
    one: list[float] = []
    per_byte: list[float] = []
    found: dict[str, list[tuple[float, int]]] = {plan: [] for plan in plans}
    for _ in range(options.rounds):
        one.append(run_ranks(step_seconds, 1, "zero0", options.tokens, options.steps)[0][0])
        per_byte.append(max(run_ranks(exchange_seconds, 2)))
        for plan in plans:
            found[plan].append(max(run_ranks(step_seconds, 2, plan, options.tokens, options.steps)))
    print(f"one process: {statistics.median(one):.3f} CPU s a step; all-to-all {statistics.median(per_byte) * 1e9:.2f} ns a byte sent")
    for plan, rounds in found.items():
        ratios = [seconds / (alone / 2 + sent * byte) for (seconds, sent), alone, byte in zip(rounds, one, per_byte, strict=True)]
        seconds, sent = statistics.median(row[0] for row in rounds), rounds[0][1]
        low, high = min(ratios), max(ratios)
        spread = f"{statistics.median(ratios):.3f}, {low:.3f} to {high:.3f}"
        print(f"  {plan:24} {seconds:.3f} s a rank, {sent / 1e6:7.1f} MB sent, ratio {spread}")


def activation_bytes(plan: str, tokens: int) -> int:
    """The most that lives within a step beyond what lives between steps, without gradients and optimizer temporaries."""
    booster, batch = boosted(plan), batch_of(tokens)
    booster.step(batch)
    with TensorCount(list(batch.values())) as count:
        booster.forward_backward(batch)
    return count.peak - count.kept


def compare_memory(options: argparse.Namespace) -> None:
    whole = run_ranks(activation_bytes, 1, "zero0", options.tokens, timeout_s=600)[0]
    print(f"one process, {options.tokens} tokens: {whole / 2**20:.1f} MiB above what is kept")
    for plan, size in (("ulysses2", 2), ("ring2", 2), ("ulysses2+ring2", 4)):
        parts = run_ranks(activation_bytes, size, plan, options.tokens, timeout_s=600)
        worst = max(parts)
        print(f"  {plan:16} {worst / 2**20:.1f} MiB a rank, {worst * size / whole:.3f} of its share")


def rehearse(options: argparse.Namespace) -> None:
    """One step under fake tensors: no data, the peak of all tensors and the bytes sent, for a rank of a long row."""
    for title, sizes, plan, world in (
        ("1B", BILLION, "zero3+bf16+recompute+ulysses4+ring2", 8),
        ("8B", EIGHT_BILLION, "zero3+bf16+recompute+ulysses8+ring2", 16),
    ):
        launch.shutdown()
        launch.rehearse(world, 1)
        booster = px.Booster(plan)
        with FakeTensorMode():
            model: Any = llama(**sizes)
            booster.boost(model, torch.optim.AdamW(model.parameters()))
            ids = torch.zeros(1, options.tokens, dtype=torch.long)
            comm.ledger.reset()
            with TensorCount() as count:
                booster.step({"input_ids": ids, "labels": ids})
        sent = {(operation, axis): wire for operation, axis, _, _, wire in comm.ledger.rows() if axis in ("ring", "ulysses")}
        shown = ", ".join(f"{axis} {wire / 1e9:.2f} GB" for (_, axis), wire in sent.items())
        print(f"{title}, {plan} on {world}: {count.kept / 2**30:.1f} GiB kept, {count.peak / 2**30:.1f} GiB at the peak, {shown} sent")
    launch.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "rehearse"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--plans", default="zero1+ulysses2,zero1+ring2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.tokens = options.tokens or {"time": 4096, "memory": 8192, "rehearse": 131072}[options.what]
    {"time": compare_time, "memory": compare_memory, "rehearse": rehearse}[options.what](options)


if __name__ == "__main__":
    main()
