"""The one workload that every row of the benchmark runs: a Llama-shaped model, fixed tokens, AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SHAPE = dict(
    num_hidden_layers=8,
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=1408,
    vocab_size=8192,
    max_position_embeddings=512,
)
DISTINCT_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much each rank computes in a step, and how many steps a visit of a row takes."""

    name: str
    tokens: int
    micro_batch: int
    warmup: int
    steps: int


WORKLOADS = {
    # Multiplications dominate: shows whether a system gets in their way.
    "thick": Workload(name="thick", tokens=256, micro_batch=4, warmup=2, steps=3),
    # Overhead, optimizer and traffic dominate: shows what a system costs.
    "thin": Workload(name="thin", tokens=64, micro_batch=1, warmup=3, steps=10),
}


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights in every process and every row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa")
    return LlamaForCausalLM(config).to(dtype).train()


def input_ids(workload: Workload, step: int, rank: int) -> torch.Tensor:
    """Fixed tokens of one rank's micro-batch; they differ between ranks, and repeat after `DISTINCT_BATCHES` steps."""
    generator = torch.Generator().manual_seed(1 + 1000 * (step % DISTINCT_BATCHES) + rank)
    return torch.randint(0, SHAPE["vocab_size"], (workload.micro_batch, workload.tokens), generator=generator)


def adamw(parameters, fused: bool) -> torch.optim.Optimizer:
    """With the fused kernel, or with nothing said about it."""
    options = {"fused": True} if fused else {}
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options)


def num_parameters() -> dict[str, int]:
    """Elements of the whole model, of one layer and of the largest piece outside the layers (embedding or head)."""
    hidden, mlp, vocabulary = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    kv_width = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * mlp + 2 * hidden
    edge = hidden * vocabulary
    return {"model": SHAPE["num_hidden_layers"] * layer + 2 * edge + hidden, "layer": layer, "edge": edge}
