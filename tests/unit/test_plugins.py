"""Plugins: the familiar names and arguments, and the plan that each is a preset of."""

import pytest

from phalanx.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from phalanx.errors import PlanError
from phalanx.plan import Budgets, Plan


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        (lambda: TorchDDPPlugin(), "zero0"),
        (lambda: TorchDDPPlugin(precision="bf16", find_unused_parameters=True, gradient_as_bucket_view=True), "bf16"),
        (lambda: TorchFSDPPlugin(), "fsdp"),
        (lambda: TorchFSDPPlugin(precision="bf16", sync_module_states=True), "fsdp+bf16"),
        (lambda: LowLevelZeroPlugin(), "zero1+fp16"),
        (lambda: LowLevelZeroPlugin(2, "bf16", overlap_communication=True), "zero2+bf16"),
        (lambda: LowLevelZeroPlugin(stage=1, precision="fp32", cpu_offload=True), "zero1+offload"),
        (lambda: GeminiPlugin(precision="bf16", placement_policy="auto"), "gemini+bf16"),
        (lambda: GeminiPlugin(precision="fp32", tp_size=2, enable_sequence_parallelism=True), "gemini+tp2+sp"),
        (lambda: HybridParallelPlugin(), "fp16"),
        (lambda: HybridParallelPlugin(2, 4, zero_stage=1, precision="fp32"), "zero1+tp2+pp4"),
        (
            lambda: HybridParallelPlugin(pp_size=2, num_microbatches=4, pp_style="interleaved", num_model_chunks=3),
            "pp2+interleaved3+micro4+fp16",
        ),
        (lambda: HybridParallelPlugin(pp_size=2, pp_style="zbv", num_model_chunks=2), "pp2+zbv+fp16"),
        (lambda: HybridParallelPlugin(2, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"), "tp2+sp+fp16"),
        (lambda: HybridParallelPlugin(enable_sequence_parallelism=True, sp_size=2), "ulysses2+fp16"),
        (lambda: HybridParallelPlugin(enable_sequence_parallelism=True, sp_size=2, sequence_parallelism_mode="ring_attn"), "ring2+fp16"),
        (lambda: MoeHybridParallelPlugin(1, 2, ep_size=4, zero_stage=1, precision="bf16"), "zero1+pp2+ep4+bf16"),
    ],
)
def test_a_plugin_is_a_preset_of_a_plan(plugin, text):
    assert plugin().plan == Plan.parse(text)
    assert text == str(plugin().plan)


def test_the_gemini_call_of_the_field_says_budgets():
    plugin = GeminiPlugin(max_memory={0: "30GB", "cpu": "60GB"})
    assert plugin.plan.budgets == Budgets(device=30 * 10**9, host=60 * 10**9)
    plugin.plan.require(None, 1)


def test_gemini_budgets():
    memory = {0: "30GB", 1: "30GB", "disk": "/scratch/a:b:500GB"}
    plan = GeminiPlugin(max_memory=memory, placement="host").plan
    assert plan.budgets == Budgets(device=30 * 10**9, disk=500 * 10**9, disk_path="/scratch/a:b", placement="host")


def test_what_the_booster_takes_beside_the_plan():
    plugin = LowLevelZeroPlugin(stage=1, max_norm=1.5, initial_scale=2**10, growth_interval=100)
    assert (plugin.clip_norm, plugin.scaler) == (1.5, {"initial_scale": 2**10, "growth_interval": 100})
    assert (LowLevelZeroPlugin().clip_norm, LowLevelZeroPlugin().scaler) == (None, {})


@pytest.mark.parametrize(
    ("plugin", "found"),
    [
        (lambda: TorchDDPPlugin(bucket_cap=25), "TorchDDPPlugin has no key 'bucket_cap'.*Try: bucket_cap_mb"),
        (lambda: LowLevelZeroPlugin(stge=2), "no key 'stge'.*Try: stage"),
        (lambda: LowLevelZeroPlugin(precison="bf16"), "no key 'precison'.*Try: precision"),
        (lambda: LowLevelZeroPlugin(inital_scale=2), "no key 'inital_scale'.*Try: initial_scale"),
        (lambda: GeminiPlugin(max_memry={}), "no key 'max_memry'.*Try: max_memory"),
        (lambda: HybridParallelPlugin(tp=2), "no key 'tp'.*Try: tp_size"),
        (lambda: MoeHybridParallelPlugin(ep=2), "no key 'ep'.*Try: ep_size"),
        (lambda: TorchDDPPlugin(bucket_cap_mb=50), "bucket_cap_mb=50 cannot take effect.*Try: leave bucket_cap_mb out"),
        (lambda: TorchDDPPlugin(broadcast_buffers=False), "broadcast_buffers=False cannot take effect"),
        (lambda: TorchFSDPPlugin(mixed_precision=object()), 'cannot take effect.*Try: precision="bf16"'),
        (lambda: LowLevelZeroPlugin(norm_type=1.0), "norm_type=1.0 cannot take effect"),
        (lambda: LowLevelZeroPlugin(stage=3), r'with stage 3.*Try: Booster\("zero3"\)'),
        (lambda: LowLevelZeroPlugin(stage=0), "with stage 0.*Allowed: 1 or 2"),
        (lambda: LowLevelZeroPlugin(precision="bf16", initial_scale=4), "initial_scale cannot take effect with bf16"),
        (lambda: LowLevelZeroPlugin(backoff_factor=2.0), "backoff_factor is 2.0.*above 0 and up to 1"),
        (lambda: LowLevelZeroPlugin(min_scale="x"), "min_scale is 'x'"),
        (lambda: LowLevelZeroPlugin(growth_interval=float("nan")), "growth_interval is nan"),
        (lambda: LowLevelZeroPlugin(hysteresis=2), "hysteresis=2 cannot take effect.*Allowed: 1"),
        (lambda: LowLevelZeroPlugin(max_norm=-1.0), "max_norm is -1.0"),
        (lambda: LowLevelZeroPlugin(precision="fp17"), "precision is 'fp17'.*Try: precision fp16"),
        (lambda: GeminiPlugin(max_memory={"gpu": "3GB"}), "max_memory has no key 'gpu'"),
        (lambda: GeminiPlugin(max_memory={0: "3GB", 1: "4GB"}), "gives device 1 another budget"),
        (lambda: GeminiPlugin(max_memory={0: "lots"}), "'lots' is no amount of memory"),
        (lambda: GeminiPlugin(max_memory={"disk": "500GB"}), "gives disk '500GB'.*path:size"),
        (lambda: GeminiPlugin(placement="moon"), "placement is 'moon'"),
        (lambda: GeminiPlugin(placement="host", placement_policy="static"), "one of them"),
        (lambda: GeminiPlugin(offload_optim_frac=0.5), "offload_optim_frac=0.5 cannot take effect.*max_memory"),
        (lambda: GeminiPlugin(enable_sequence_parallelism=True), "sp without tp"),
        (lambda: HybridParallelPlugin(num_microbatches=4), "micro4 without pp"),
        (lambda: HybridParallelPlugin(microbatch_size=4), "microbatch_size=4 cannot take effect.*num_microbatches"),
        (lambda: HybridParallelPlugin(pp_size=2, num_model_chunks=2), "num_model_chunks=2 cannot take effect"),
        (lambda: HybridParallelPlugin(pp_size=2, pp_style="1f2b"), "schedule is '1f2b'.*Try: schedule 1f1b"),
        (lambda: HybridParallelPlugin(tp_size=0), "tp is 0"),
        (lambda: HybridParallelPlugin(sp_size=2), "sp_size cannot take effect.*enable_sequence_parallelism=True"),
        (lambda: HybridParallelPlugin(2, enable_sequence_parallelism=True, sequence_parallelism_mode="ring", sp_size=4), "sp_size 4"),
        (
            lambda: HybridParallelPlugin(enable_sequence_parallelism=True, sequence_parallelism_mode="all"),
            "sequence_parallelism_mode is 'all'",
        ),
        (lambda: HybridParallelPlugin(enable_sequence_parallelism=True), "has no size"),
        (lambda: HybridParallelPlugin(zero_stage=5), "zero is 5"),
        (lambda: HybridParallelPlugin(num_microbatches=4, pp_style="gpipe"), "2 faults"),
    ],
)
def test_what_is_unknown_or_cannot_take_effect_is_refused(plugin, found):
    with pytest.raises(PlanError, match=f"(?s){found}"):
        plugin()
