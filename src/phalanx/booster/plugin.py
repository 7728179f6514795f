"""Plugins: presets of a Plan under the names and arguments that people know from ColossalAI.

A plugin holds no strategy of its own. `plan` is what it asks for; `clip_norm` and `scaler` are what the Booster takes beside it.
Arguments that mean nothing here are accepted at the value that holds anyway, and refused at any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from phalanx.errors import PlanError
from phalanx.plan import Plan
from phalanx.plan.check import conflicts
from phalanx.plan.fields import raise_all
from phalanx.plan.file import parse_bytes, unknown_key

# The settings of the fp16 loss scale, and the values each may take.
SCALER: dict[str, tuple[Callable[[float], bool], str]] = {
    "initial_scale": (lambda value: value > 0, "above 0"),
    "min_scale": (lambda value: value > 0, "above 0"),
    "growth_factor": (lambda value: value >= 1, "from 1"),
    "backoff_factor": (lambda value: 0 < value <= 1, "above 0 and up to 1"),
    "growth_interval": (lambda value: value >= 1 and value % 1 == 0, "that is whole, from 1"),
}

# Familiar arguments that choose nothing here, each with the values that hold under Phalanx; any other is refused.
_COMMON: dict[str, tuple[object, ...]] = {
    "norm_type": (2.0,),
    "max_scale": (None,),  # the scale grows as far as gradients stay finite
    "hysteresis": (1,),  # the scale falls at the first step that overflows
    "verbose": (False,),
    "fp8_communication": (False,),
    "use_fp8": (False,),
}
_DDP: dict[str, tuple[object, ...]] = {
    "broadcast_buffers": (True,),
    "bucket_cap_mb": (25,),
    "find_unused_parameters": (False, True),  # parameters that a step does not use are always found
    "check_reduction": (False,),
    "gradient_as_bucket_view": (False, True),  # gradients always live in their chunk
    "static_graph": (False,),
}
_ZERO: dict[str, tuple[object, ...]] = {
    "reduce_bucket_size_in_m": (12,),
    "communication_dtype": (None,),
    "overlap_communication": (True,),
    "overlap_allgather": (False, True),
    "master_weights": (True,),
    "cast_inputs": (True,),
    "enable_gradient_accumulation": (False, True),  # several backward calls always add up
}
_KERNELS: dict[str, tuple[object, ...]] = {
    "enable_all_optimization": (False,),
    "enable_fused_normalization": (False,),
    "enable_flash_attention": (False,),
    "enable_jit_fused": (False,),
}
_FSDP: dict[str, tuple[object, ...]] = {
    "process_group": (None,),
    "sharding_strategy": (None,),
    "cpu_offload": (None, False),
    "auto_wrap_policy": (None,),
    "backward_prefetch": (None,),
    "mixed_precision": (None,),
    "ignored_modules": (None,),
    "param_init_fn": (None,),
    "sync_module_states": (False, True),  # start weights are always those of rank 0
}
_GEMINI: dict[str, tuple[object, ...]] = {
    "chunk_config_dict": (None,),
    "chunk_init_device": (None,),
    "max_prefetch": (0,),
    "shard_param_frac": (1.0,),
    "offload_optim_frac": (0.0,),
    "offload_param_frac": (0.0,),
    "warmup_non_model_data_ratio": (0.8,),
    "steady_cuda_cap_ratio": (0.9,),
    "pin_memory": (False,),
    "force_outputs_fp32": (False,),
    "strict_ddp_mode": (False,),
    "search_range_m": (32,),
    "hidden_dim": (None,),
    "min_chunk_size_m": (32,),
    "memstats": (None,),
    "gpu_margin_mem_ratio": (0.0,),
    "extra_dp_size": (1,),
    "enable_async_reduce": (True,),
}
_HYBRID: dict[str, tuple[object, ...]] = {
    "parallel_output": (True,),
    "microbatch_size": (None,),
    "ddp_bucket_cap_mb": (25,),
    "zero_bucket_size_in_m": (12,),
    "custom_policy": (None,),
    "scheduler_nodes": (None,),
    "num_layers_per_stage": (None,),
    "gradient_checkpoint_config": (None,),
    "enable_metadata_cache": (True,),
    "make_vocab_size_divisible_by": (64,),
    "dp_outside": (True,),
    "overlap_p2p": (True,),
    "inner_ring_size": (None,),
}
_MOE: dict[str, tuple[object, ...]] = {
    "moe_dp_outside": (True,),
    "use_ep_inside": (True,),
    "force_overlap_comm": (False,),
}

# What to write in place of an argument whose wish has another name here.
_INSTEAD = {
    "microbatch_size": "num_microbatches, of which the batch is cut into",
    "mixed_precision": 'precision="bf16"',
    "use_fp8": 'precision="fp8"',
    "offload_optim_frac": "max_memory={'cpu': '60GB'}",
    "offload_param_frac": "max_memory={'cpu': '60GB'}",
    "extra_dp_size": 'Booster("zero3:4"), which shards in groups of 4 and replicates between them',
    "gradient_checkpoint_config": 'Booster("recompute=0.5"), joined to the other terms',
    "cpu_offload": "LowLevelZeroPlugin(cpu_offload=True)",
}


class Preset:
    """What every plugin is: a plan, and the Booster's options that belong to it (`scaler`: what was said of the loss scale).

    Raises: PlanError for an argument that is unknown or cannot take effect, and for a plan that contradicts itself.
    """

    familiar: ClassVar[dict[str, tuple[object, ...]]] = {}

    def __init__(self, fields: Mapping[str, Any], *, max_norm: float = 0.0, arguments: Mapping[str, Any]):
        scaler = {name: value for name, value in arguments.items() if name in SCALER}
        self._refuse({name: value for name, value in arguments.items() if name not in scaler})
        self.plan = Plan.from_table(fields)
        raise_all(conflicts(self.plan), f"{type(self).__name__} ({self.plan})")
        if max_norm < 0:
            raise PlanError(f"max_norm is {max_norm}", allowed="0, which does not clip, or more", remedy="max_norm=1.0")
        self.clip_norm = max_norm or None
        self.scaler = self._read_scaler(scaler)

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        accepted = _COMMON | self.familiar
        for name, value in arguments.items():
            if name not in accepted:
                own = [name for name in inspect.signature(type(self)).parameters if name != "arguments"]
                raise unknown_key(name, [*own, *SCALER, *accepted], type(self).__name__)
            if value not in accepted[name]:
                allowed = " or ".join(repr(choice) for choice in accepted[name])
                found = f"{type(self).__name__}: {name}={value!r} cannot take effect"
                raise PlanError(found, allowed=allowed, remedy=_INSTEAD.get(name, f"leave {name} out"))

    def _read_scaler(self, given: Mapping[str, Any]) -> dict[str, float]:
        for name, value in given.items():
            fits, allowed = SCALER[name]
            if self.plan.precision != "fp16":
                found = f"{type(self).__name__}: {name} cannot take effect with {self.plan.precision}, which scales no loss"
                raise PlanError(found, allowed="with fp16", remedy=f'precision="fp16", or leave {name} out')
            if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
                raise PlanError(f"{type(self).__name__}: {name} is {value!r}", allowed=f"a number {allowed}", remedy=f"leave {name} out")
        return dict(given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan})"


class TorchDDPPlugin(Preset):
    """Data parallelism with the whole state on every rank: `zero0`."""

    familiar = _DDP

    def __init__(self, *, precision: str = "fp32", max_norm: float = 0.0, **arguments: Any):
        super().__init__({"precision": precision}, max_norm=max_norm, arguments=arguments)


class TorchFSDPPlugin(Preset):
    """PyTorch's own `fully_shard`, over data ranks only: `fsdp`."""

    familiar = _FSDP

    def __init__(self, *, precision: str = "fp32", max_norm: float = 0.0, **arguments: Any):
        super().__init__({"fsdp": True, "precision": precision}, max_norm=max_norm, arguments=arguments)


class LowLevelZeroPlugin(Preset):
    """ZeRO stage 1 or 2; `cpu_offload` keeps the optimizer's state in host memory."""

    familiar = _ZERO

    def __init__(self, stage: int = 1, precision: str = "fp16", *, max_norm: float = 0.0, cpu_offload: bool = False, **arguments: Any):
        if stage not in (1, 2):
            raise PlanError(
                f"LowLevelZeroPlugin with stage {stage!r}", allowed="1 or 2", remedy=f'Booster("zero{stage}")' if stage == 3 else "stage=1"
            )
        super().__init__({"zero": stage, "precision": precision, "offload": cpu_offload}, max_norm=max_norm, arguments=arguments)


class GeminiPlugin(Preset):
    """ZeRO-3 with a budget for each memory tier: `max_memory={0: '30GB', 'cpu': '60GB', 'disk': '/scratch:500GB'}`.

    A number names a device; all must have one budget. Without `max_memory` the tiers take what is free.
    """

    familiar = _GEMINI | _ZERO | _KERNELS

    def __init__(
        self,
        *,
        max_memory: Mapping[int | str, int | str] | None = None,
        placement: str = "auto",
        placement_policy: str | None = None,
        precision: str = "fp16",
        tp_size: int = 1,
        enable_sequence_parallelism: bool = False,
        max_norm: float = 0.0,
        **arguments: Any,
    ):
        if placement_policy not in (None, placement) and placement != "auto":
            found = f"GeminiPlugin with placement {placement!r} and placement_policy {placement_policy!r}"
            raise PlanError(found, allowed="one of them", remedy=f'placement="{placement}"')
        table = {"placement": placement_policy or placement} | _read_memory(max_memory or {})
        fields = {"gemini": table if table != {"placement": "auto"} else True, "precision": precision}
        super().__init__(fields | {"tp": tp_size, "sp": enable_sequence_parallelism}, max_norm=max_norm, arguments=arguments)


class HybridParallelPlugin(Preset):
    """Tensor, pipeline, sequence and data parallelism with ZeRO."""

    familiar = _HYBRID | _ZERO | _DDP | _KERNELS

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        *,
        zero_stage: int = 0,
        precision: str = "fp16",
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        sp_size: int | None = None,
        num_microbatches: int | None = None,
        pp_style: str = "1f1b",
        num_model_chunks: int | None = None,
        cpu_offload: bool = False,
        ep_size: int = 1,
        max_norm: float = 0.0,
        **arguments: Any,
    ):
        fields: dict[str, Any] = {"tp": tp_size, "pp": pp_size, "zero": zero_stage, "precision": precision, "offload": cpu_offload}
        fields |= {"ep": ep_size, "micro": num_microbatches}
        fields |= _read_schedule(pp_style, num_model_chunks)
        fields |= _read_sequence(enable_sequence_parallelism, sequence_parallelism_mode, sp_size, tp_size)
        super().__init__(fields, max_norm=max_norm, arguments=arguments)


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """The same for mixtures of experts, whose experts are spread over `ep_size` data ranks."""

    familiar = HybridParallelPlugin.familiar | _MOE


def _read_memory(max_memory: Mapping[int | str, int | str]) -> dict[str, Any]:
    """The budget table that a `max_memory` mapping says."""
    table: dict[str, Any] = {}
    for key, value in max_memory.items():
        if isinstance(key, int) and not isinstance(key, bool):
            size = parse_bytes(value)
            if table.setdefault("device", size) != size:
                raise PlanError(
                    f"max_memory gives device {key} another budget", allowed="one budget for every device", remedy=f"{key}: {value!r} alone"
                )
        elif key == "cpu":
            table["host"] = parse_bytes(value)
        elif key == "disk":
            path, _, size_text = str(value).rpartition(":")
            if not path:
                raise PlanError(f"max_memory gives disk {value!r}", allowed="path:size", remedy="'disk': '/scratch:500GB'")
            table |= {"disk": parse_bytes(size_text), "disk_path": path}
        else:
            raise unknown_key(str(key), ["0", "cpu", "disk"], "max_memory")
    return table


def _read_schedule(style: str, num_chunks: int | None) -> dict[str, Any]:
    """The schedule fields that ColossalAI's pipeline style and number of model chunks say."""
    if style == "interleaved":
        return {"interleaved": num_chunks or 2}
    if num_chunks not in (None, 2 if style == "zbv" else 1):
        found = f"num_model_chunks={num_chunks} cannot take effect with pp_style {style!r}"
        raise PlanError(found, allowed="with interleaved", remedy='pp_style="interleaved"')
    return {"schedule": style}


def _read_sequence(enabled: bool, mode: str | None, size: int | None, tp_size: int) -> dict[str, Any]:
    """The sequence fields that ColossalAI's four modes say: over the tensor ranks, or over ranks of their own."""
    if not enabled:
        if mode is None and size in (None, 1):
            return {}
        name = "sequence_parallelism_mode" if mode is not None else "sp_size"
        raise PlanError(f"{name} cannot take effect by itself", remedy="enable_sequence_parallelism=True")
    if mode in ("split_gather", "ring"):
        if size not in (None, tp_size):
            raise PlanError(f"sp_size {size} with mode {mode!r}", allowed="the ranks of tp", remedy=f"sp_size={tp_size}")
        return {"sp": True}
    if mode not in (None, "all_to_all", "ring_attn"):
        allowed = "split_gather, ring, all_to_all, ring_attn"
        raise PlanError(f"sequence_parallelism_mode is {mode!r}", allowed=allowed, remedy='sequence_parallelism_mode="all_to_all"')
    if size in (None, 1):
        raise PlanError("sequence parallelism over ranks of its own has no size", allowed="2 or more", remedy="sp_size=2")
    return {"ring" if mode == "ring_attn" else "ulysses": size}
