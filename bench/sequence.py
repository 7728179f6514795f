"""Cut sequences against one process: CPU seconds of a step, peak bytes of activations, and rehearsals of long rows.

    python -m bench.sequence time [--tokens 4096] [--rounds 7]
    python -m bench.sequence memory [--tokens 8192]
    python -m bench.sequence rehearse [--tokens 131072]
    python -m bench.sequence ring [--tokens 4096]

`time`: the rounds of one process and of every plan take turns. A plan is held against half of one process, plus the bytes it sends
times the CPU seconds per byte of a bare all-to-all of 1 MB messages in the same run. `memory` counts the tensors of real steps,
`rehearse` what forward, chunked loss and backward make and hold in a dry run without data. `ring` holds one causal attention, forward
and backward, against that of ring-attention-pytorch where it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import phalanx as px
from phalanx.booster.sequences import SplitSequences
from phalanx.cluster import comm, launch
from phalanx.cluster.mesh import Mesh
from phalanx.kernels.attention import Form
from phalanx.kernels.attention_sight import Sight
from phalanx.parallel.sequence import Cut, Grid, Rows, attention
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
    """The most that lives within a forward and backward beyond what lives before it, gradients of an earlier one included."""
    booster, batch = boosted(plan), batch_of(tokens)
    booster.forward_backward(batch)
    with TensorCount(list(batch.values())) as count:
        booster.forward_backward(batch)
    return count.peak - count.kept


def compare_memory(options: argparse.Namespace) -> None:
    whole = run_ranks(activation_bytes, 1, "zero0", options.tokens, timeout_s=900)[0]
    print(f"one process, {options.tokens} tokens: {whole / 2**20:.1f} MiB above what is kept", flush=True)
    for plan, size in (("ulysses2", 2), ("ring2", 2), ("ulysses2+ring2", 4)):
        worst = max(run_ranks(activation_bytes, size, plan, options.tokens, timeout_s=900))
        print(f"  {plan:16} {worst / 2**20:.1f} MiB a rank, {worst * size / whole:.3f} of its share", flush=True)


class HollowCount(TorchDispatchMode):
    """Counts the bytes of storages that operations make while it is entered, in a rehearsal, where none of them has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {self._key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in before:
                self._add(tensor)
        self.peak = max(self.peak, self.live)
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _add(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), self._key(tensor)
        if key not in self.known:
            size = storage.nbytes()
            self.live += size
            self.known[key] = weakref.ref(storage, lambda _: self._drop(key, size))

    def _drop(self, key: int, size: int) -> None:
        del self.known[key]
        self.live -= size


def rehearsed_bytes(plan: str, world: int, sizes: dict[str, int], lengths: Sequence[int]) -> list[int]:
    """The most that one rank makes and holds at a time in forward, loss and backward of one row of each length, in a rehearsal.

    Gradient buffers exist before. The loss is chunked: whole logits would be half of all bytes.
    """
    launch.shutdown()
    launch.rehearse(world, 1 if world > 1 else 0)
    booster, peaks = px.Booster(replace(px.Plan.parse(plan), chunked_loss=True)), []
    with FakeTensorMode():
        model: Any = llama(**sizes)
        booster.boost(model, torch.optim.AdamW(model.parameters()))
        training = booster.trainings[0]
        # In a dry run transformers cannot see that rows are not packed, and would make a mask of all tokens for one process.
        alone = Grid(booster.mesh.axis("cp"), booster.mesh.axis("cp"))
        split = training.sequences or SplitSequences(model, alone, training.objective.own, lambda batch: batch, uses_own_loss=True)
        for tokens in (4 * world, *lengths):
            ids = torch.zeros(1, tokens, dtype=torch.long)
            with split.running({"input_ids": ids, "labels": ids}) as part, HollowCount() as count:
                loss_sum, counted = training.objective(model, part)
                training.backward(loss_sum, counted, synchronise=True)
                del loss_sum, counted
            peaks.append(count.peak)
    launch.shutdown()
    return peaks[1:]


def rehearse(options: argparse.Namespace) -> None:
    """What grows with the tokens is activations; the rest is the head's gradient and one chunk of logits, which no cut makes less."""
    lengths = (options.tokens // 2, options.tokens)
    for title, sizes, ulysses, ring in (("1B", BILLION, 4, 2), ("8B", EIGHT_BILLION, 8, 2)):
        size = ulysses * ring
        half, whole = rehearsed_bytes("bf16", 1, sizes, lengths)
        own_half, own = rehearsed_bytes(f"bf16+ulysses{ulysses}+ring{ring}", size, sizes, lengths)
        activations, own_activations = 2 * (whole - half), 2 * (own - own_half)
        print(
            f"{title}, {options.tokens} tokens, ulysses{ulysses}+ring{ring}: {own / 2**30:.2f} GiB at the peak of a rank, "
            f"{whole / 2**30:.2f} of one process, {own * size / whole:.3f} of its share; of these activations "
            f"{own_activations / 2**30:.2f} and {activations / 2**30:.2f} GiB, {own_activations * size / activations:.3f} of the share",
            flush=True,
        )


def ring_seconds(tokens: int, peer: bool) -> float:
    """CPU seconds of this rank for one causal attention of 8 heads of 32, forward and backward, over a ring of all ranks."""
    axis = Mesh({"ring": launch.world().size}).axis("ring")
    shape = (1, 8, tokens // axis.size, 32)
    q, k, v, grad = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    if peer:
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

        q, k, v, grad = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v, grad))
        run = lambda: ring_flash_attn(q, k, v, causal=True, bucket_size=512, ring_reduce_col=True)  # noqa: E731
    else:
        grid = Grid(axis, Mesh({"world": axis.size, "one": 1}).axis("one"))
        rows = Rows(Cut(tokens, axis.size, 1))
        run = lambda: attention(q, k, v, Sight(after=0), Form(scale=32**-0.5), rows, grid)  # noqa: E731
    for tensor in (q, k, v):
        tensor.requires_grad_()
    run().backward(grad)
    begin = time.process_time()
    for _ in range(3):
        run().backward(grad)
    return (time.process_time() - begin) / 3


def compare_rings(options: argparse.Namespace) -> None:
    found = {peer: [sum(run_ranks(ring_seconds, 2, options.tokens, peer)) for _ in range(options.rounds)] for peer in (False, True)}
    own, peer = (statistics.median(found[key]) for key in (False, True))
    print(f"a ring of 2, {options.tokens} tokens: {own:.3f} CPU s in all, ring-attention-pytorch {peer:.3f}, ratio {own / peer:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "rehearse", "ring"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--plans", default="zero1+ulysses2,zero1+ring2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.tokens = options.tokens or {"time": 4096, "memory": 8192, "rehearse": 131072, "ring": 4096}[options.what]
    {"time": compare_time, "memory": compare_memory, "rehearse": rehearse, "ring": compare_rings}[options.what](options)


if __name__ == "__main__":
    main()
