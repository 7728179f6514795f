"""A long run holds no more memory and no more open files at its end than early on.

The tensors here are small. Among tensors above 128 KiB the heap of the GNU C library has gaps, and grows for some hundred steps
until they fit; that happens in any PyTorch program, and hides what these tests look for.
"""

from __future__ import annotations

import os

import pytest
import torch
from booster_programs import batch, boost, decoder, local

from phalanx.cluster import device
from phalanx.testing import run_ranks

STEPS, SETTLED = 300, 100


def _growth(plan: str, leak_bytes: int = 0) -> tuple[float, float]:
    """How much resident memory and open files grow between two steps, as parts of what there was at the first."""
    model = decoder(dtype=torch.float32)
    booster, _, _ = boost(plan, model, torch.optim.AdamW(model.parameters()))
    leaked, seen = [], []
    for step in range(1, STEPS + 1):
        booster.step(local(batch(step)))
        if leak_bytes:
            leaked.append((torch.ones(leak_bytes, dtype=torch.uint8), os.open(os.devnull, os.O_RDONLY)))
        if step in (SETTLED, STEPS):
            seen.append((device.resident_bytes(), len(os.listdir("/proc/self/fd"))))
    (memory, files), (more_memory, more_files) = seen
    return more_memory / memory - 1, more_files / files - 1


@pytest.mark.slow
@pytest.mark.skipif(device.resident_bytes() is None, reason="the system does not tell resident memory")
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_three_hundred_steps_hold_no_more_than_one_hundred(plan):
    for memory, files in run_ranks(_growth, 2, plan, timeout_s=600):
        assert memory < 0.02
        assert files < 0.02


@pytest.mark.slow
@pytest.mark.skipif(device.resident_bytes() is None, reason="the system does not tell resident memory")
def test_what_leaks_is_seen():
    for memory, files in run_ranks(_growth, 2, "zero2", 100_000, timeout_s=600):
        assert memory > 0.02
        assert files > 0.02
