"""The rows of tensor parallelism: every rank sees the same rows, and holds a part of each layer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.workload import adamw, build_model, input_ids


def ids_of_all(setting, step: int) -> torch.Tensor:
    """The rows that all ranks share: those that the plain loop takes."""
    return input_ids(setting.workload, step, 0)


def tensor_loop(setting, model, optimizer) -> Callable[[int], float]:
    def step(index: int) -> float:
        ids = ids_of_all(setting, index)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.half):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step


def parallelize_module(setting) -> Callable[[int], float]:
    """PyTorch's styles as its tutorial puts them on a Llama, with the embedding and the head split by vocabulary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module as parallelize

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (setting.world,))
    model = build_model()
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize(layer, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize(model, mesh, ends)
    # The fused kernel refuses groups in which some parameters are DTensors and others are not.
    split, whole = _by_kind(model)
    return tensor_loop(setting, model, adamw([{"params": split}, {"params": whole}], fused=True))


def transformers_plan(setting) -> Callable[[int], float]:
    """The plan that the model's own config carries."""
    from transformers import LlamaForCausalLM

    dist.init_process_group("gloo")
    folder = Path(tempfile.gettempdir()) / f"bench-tp-{os.environ['MASTER_PORT']}"
    if setting.rank == 0:
        build_model().save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="sdpa").train()
    model.config.use_cache = False
    for parameter in model.parameters():  # out of the mapped file, into memory that is counted as that of the others
        if hasattr(parameter, "_local_tensor"):  # a DTensor's own data cannot be set from outside
            parameter._local_tensor = parameter._local_tensor.clone()
    split, whole = _by_kind(model)
    return tensor_loop(setting, model, adamw([{"params": group} for group in (split, whole) if group], fused=True))


def _by_kind(model) -> tuple[list, list]:
    from torch.distributed.tensor import DTensor

    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return split, [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]


def phalanx_plan(plan: str) -> Callable:
    def build(setting) -> Callable[[int], float]:
        import phalanx as px

        px.launch()
        booster = px.Booster(plan + ("+bf16" if setting.half else ""))
        model = build_model()
        booster.boost(model, adamw(model.parameters(), fused=True))

        def step(index: int) -> float:
            ids = ids_of_all(setting, index)
            return float(booster.step({"input_ids": ids, "labels": ids}).loss)

        return step

    return build
