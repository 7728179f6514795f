"""Devices answer the same questions; the processor answers without streams."""

from __future__ import annotations

import pytest
import torch

from phalanx.cluster import device
from phalanx.errors import ConfigError

KINDS = [pytest.param(kind, marks=[pytest.mark.gpu] if kind != "cpu" else []) for kind in device.available()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_runs_queued_work_and_tells_its_memory(kind):
    this = device.get(kind)
    place = this.select(0)
    stream = this.stream()
    with device.on_stream(this, stream):
        x = torch.ones(1000, device=place) * 2
    this.wait_stream(stream)
    assert x.sum().item() == 2000
    this.synchronize()
    this.reset_peak()
    memory = this.memory()
    assert memory.total_bytes > memory.allocated_bytes > 0
    assert memory.peak_bytes >= x.numel() * 4
    state = this.random_state()
    if state is not None:
        first = torch.rand(3, device=place)
        this.set_random_state(state)
        assert torch.equal(torch.rand(3, device=place), first)


def test_backends():
    assert device.get("cpu").backend == "gloo"
    assert "nccl" in device.get("cuda").backend
    assert "hccl" in device.get("npu").backend
    assert device.available()[-1] == "cpu"
    with pytest.raises(ConfigError, match="unknown device kind"):
        device.get("tpu")


def test_peak_flops_follow_the_name(monkeypatch):
    card = device.get("cuda")
    monkeypatch.setattr(device.Accelerator, "name", lambda self: "NVIDIA H200")
    assert card.peak_flops(torch.bfloat16) == 989e12
    monkeypatch.setattr(device.Accelerator, "name", lambda self: "unheard of")
    assert card.peak_flops(torch.bfloat16) is None
    assert device.get("cpu").peak_flops(torch.float32) is None
