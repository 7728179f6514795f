"""Devices answer the same questions; the processor answers without streams."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

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


FAULTS = """
import resource, sys
import torch
from phalanx.cluster import device, launch

def faults():  # of 20 tensors of about 40 MB, in two sizes, that come and go
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for count in range(20):
        torch.ones(10_000_000 if count % 2 else 9_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun

before = faults()
launch.launch(backend="gloo")
faults()
after, resident = faults(), device.resident_bytes()
for _ in range(10):
    faults()
print(before, after, device.resident_bytes() - resident)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not GNU's")
def test_a_process_keeps_the_memory_of_freed_tensors():
    pages_of_a_tensor = 36_000_000 // resource.getpagesize()
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after, growth = map(int, done.stdout.split())
    assert before > 10 * pages_of_a_tensor
    assert after < pages_of_a_tensor / 10
    assert growth < 2**20
