"""Phalanx: ordinary PyTorch in, one plan, the same numbers on any number of devices.

import phalanx as px

px.launch()
booster = px.Booster("zero2+bf16", clip_norm=1.0)
model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, criterion, dataloader, lr_scheduler)
for batch in dataloader:
    result = booster.step(batch)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.booster import Booster as Booster
    from phalanx.cluster.launch import launch as launch
    from phalanx.materialize import lazy as lazy
    from phalanx.parallel.expert.routing import Routing as Routing
    from phalanx.plan import Plan as Plan
    from phalanx.verify import verify as verify

__version__ = "0.1.0"

# Where each public name lives; loaded on first use, so that importing the package costs nothing.
_HOME = {
    "Booster": "phalanx.booster",
    "GeminiPlugin": "phalanx.booster.plugin",
    "HybridParallelPlugin": "phalanx.booster.plugin",
    "LowLevelZeroPlugin": "phalanx.booster.plugin",
    "MoeHybridParallelPlugin": "phalanx.booster.plugin",
    "Plan": "phalanx.plan",
    "Routing": "phalanx.parallel.expert.routing",
    "TorchDDPPlugin": "phalanx.booster.plugin",
    "TorchFSDPPlugin": "phalanx.booster.plugin",
    "launch": "phalanx.cluster.launch",
    "lazy": "phalanx.materialize",
    "verify": "phalanx.verify",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'phalanx' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
