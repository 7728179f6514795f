"""The budgets of the memory tiers on this rank: as the plan says, else a share of what is free."""

from __future__ import annotations

from phalanx.cluster.device import Cpu, Device
from phalanx.memory.gemini import TierSizes
from phalanx.plan.fields import Budgets

SHARE = 0.8  # of what is free: the rest is for what nobody counts (libraries, buffers of collectives)


def tier_sizes(budgets: Budgets, device: Device, local_ranks: int) -> TierSizes:
    """The bytes that one rank may hold in each tier.

    Where the device is the processor, device and host share what is free of the machine's memory, half each.
    """
    free_host = int((Cpu().memory().free_bytes or 0) * SHARE) // max(local_ranks, 1)
    free_device = free_host // 2 if device.kind == "cpu" else int((device.memory().free_bytes or 0) * SHARE)
    free_host = free_host // 2 if device.kind == "cpu" else free_host
    return TierSizes(
        device=budgets.device or free_device,
        host=budgets.host or free_host,
        disk=budgets.disk,
        disk_path=budgets.disk_path,
        placement=budgets.placement,
    )
