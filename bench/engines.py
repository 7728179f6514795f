"""The rows: how each system is set up by the book, and what one training step is under it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench import tensor_rows
from bench.pipelines import phalanx_pipeline, torch_pipeline
from bench.workload import Workload, adamw, build_model, input_ids

Step = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a row is built for."""

    workload: Workload
    precision: str
    rank: int
    world: int

    @property
    def half(self) -> bool:
        return self.precision == "bf16"

    def ids(self, step: int) -> torch.Tensor:
        return input_ids(self.workload, step, self.rank)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; `family` names what it competes with. Ranks see different rows, or with `shares_rows` the same."""

    key: str
    title: str
    family: str
    build: Callable[[Setting], Step]
    world: int = 2
    needs: str = "torch"
    shares_rows: bool = False


def plain_loop(setting: Setting, model, optimizer, keep_gradients: bool = False) -> Step:
    """The loop that people write, with autocast in bf16."""

    def step(index: int) -> float:
        ids = setting.ids(index)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.half):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_gradients)
        return loss.item()

    return step


def one_process(fused: bool) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        model = build_model()
        return plain_loop(setting, model, adamw(model.parameters(), fused))

    return build


def activations_only(setting: Setting) -> Step:
    """A loop whose gradients stay allocated, in the compute dtype: what it takes above its start are activations alone."""
    model = build_model(torch.bfloat16 if setting.half else torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    exact = Setting(workload=setting.workload, precision="fp32", rank=setting.rank, world=setting.world)
    return plain_loop(exact, model, adamw(model.parameters(), fused=True), keep_gradients=True)


def ddp(fused: bool, bucket_view: bool) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(build_model(), gradient_as_bucket_view=bucket_view)
        return plain_loop(setting, model, adamw(model.parameters(), fused))

    return build


def fsdp2(reshard: bool, fused: bool) -> Callable[[Setting], Step]:
    """`fully_shard` on every layer and the root; without resharding after forward it is ZeRO-2 in effect."""

    def build(setting: Setting) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dist.init_process_group("gloo")
        options = {"mesh": init_device_mesh("cpu", (setting.world,)), "reshard_after_forward": reshard}
        if setting.half:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = build_model()
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        exact = Setting(workload=setting.workload, precision="fp32", rank=setting.rank, world=setting.world)
        return plain_loop(exact, model, adamw(model.parameters(), fused))  # its policy casts, so no autocast

    return build


def deepspeed(stage: int) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        import deepspeed

        deepspeed.init_distributed("gloo")
        # Its buckets hold 500 million elements as they come, which would be all a model of this size ever holds.
        buckets = {"reduce_bucket_size": 10_000_000, "allgather_bucket_size": 10_000_000, "stage3_prefetch_bucket_size": 10_000_000}
        zero = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True, **buckets}
        config = {
            "train_micro_batch_size_per_gpu": setting.workload.micro_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "bf16": {"enabled": setting.half},
        }
        model = build_model()
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters(), fused=True), config=config)

        def step(index: int) -> float:
            ids = setting.ids(index)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    return build


def phalanx(stage: int, fused: bool = True) -> Callable[[Setting], Step]:
    def build(setting: Setting) -> Step:
        import phalanx as px

        px.launch()
        booster = px.Booster(f"zero{stage}" + ("+bf16" if setting.half else ""))
        model = build_model()
        model, _optimizer, *_ = booster.boost(model, adamw(model.parameters(), fused))

        def step(index: int) -> float:
            ids = setting.ids(index)
            return float(booster.step({"input_ids": ids, "labels": ids}).loss)

        return step

    return build


def phalanx_ledger_bytes() -> int:
    """Bytes on the wire of this rank by Phalanx's own count."""
    from phalanx.cluster import comm

    return comm.ledger.total_wire_bytes()


ROWS = {
    row.key: row
    for row in (
        Row(key="plain", title="plain loop", family="plain", build=one_process(False), world=1),
        Row(key="plain-fused", title="plain loop, fused AdamW", family="plain", build=one_process(True), world=1),
        Row(key="ddp", title="DDP, bucket view", family="ddp", build=ddp(False, True)),
        Row(key="ddp-fused", title="DDP, bucket view, fused AdamW", family="ddp", build=ddp(True, True)),
        Row(key="ddp-copy-fused", title="DDP as it comes, fused AdamW", family="ddp", build=ddp(True, False)),
        Row(key="fsdp2-zero2", title="FSDP2 kept after forward, fused AdamW", family="fsdp2-zero2", build=fsdp2(False, True)),
        Row(key="fsdp2-zero3", title="FSDP2", family="fsdp2-zero3", build=fsdp2(True, False)),
        Row(key="fsdp2-zero3-fused", title="FSDP2, fused AdamW", family="fsdp2-zero3", build=fsdp2(True, True)),
        *(
            Row(key=f"deepspeed{n}", title=f"DeepSpeed ZeRO {n}, fused AdamW", family="deepspeed", build=deepspeed(n), needs="deepspeed")
            for n in (1, 2, 3)
        ),
        Row(key="phalanx-one", title="Phalanx, one process", family="phalanx", build=phalanx(0), world=1),
        *(Row(key=f"phalanx-zero{n}", title=f"Phalanx zero{n}", family="phalanx", build=phalanx(n)) for n in range(4)),
        Row(key="torch-tp", title="parallelize_module", family="tensor", build=tensor_rows.parallelize_module, shares_rows=True),
        Row(key="transformers-tp", title="transformers tp_plan", family="tensor", build=tensor_rows.transformers_plan, shares_rows=True),
        *(
            Row(key=f"phalanx-{key}", title=f"Phalanx {plan}", family="phalanx", build=tensor_rows.phalanx_plan(plan), shares_rows=True)
            for key, plan in (("tp2", "tp2"), ("tp2-sp", "tp2+sp"))
        ),
        Row(key="torch-1f1b", title="torch pipelining 1F1B, even cut", family="pipelining", build=torch_pipeline(1), shares_rows=True),
        Row(key="torch-interleaved", title="torch pipelining interleaved", family="pipelining", build=torch_pipeline(2), shares_rows=True),
        Row(
            key="phalanx-pp2-even",
            title="Phalanx pp2, the same cut",
            family="phalanx",
            build=phalanx_pipeline("", (4, 4)),
            shares_rows=True,
        ),
        Row(key="phalanx-pp2", title="Phalanx pp2, its own cut", family="phalanx", build=phalanx_pipeline(""), shares_rows=True),
        Row(
            key="phalanx-interleaved-even",
            title="Phalanx interleaved2, the same cut",
            family="phalanx",
            build=phalanx_pipeline("interleaved2+", (2, 2, 2, 2)),
            shares_rows=True,
        ),
    )
}
# Not a competitor: the memory targets need to know what activations take by themselves.
ACTIVATIONS = Row(key="activations", title="activations alone", family="reference", build=activations_only, world=1)


def find_row(key: str) -> Row:
    return ACTIVATIONS if key == ACTIVATIONS.key else ROWS[key]


def setting_of(workload: Workload, precision: str, rank: int) -> Setting:
    return Setting(workload=workload, precision=precision, rank=rank, world=int(os.environ["WORLD_SIZE"]))
