"""Finds what makes a model's numbers depend on how its batch is cut."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.anatomy.balance_seam import balance_speakers


def is_batch_dependent(model: nn.Module) -> list[str]:
    """The names of modules, with a reason each, whose training output mixes rows of one batch; empty for most models.

    `nn.SyncBatchNorm` is listed as well: it mixes rows of ranks, but not of the passes that one rank runs after each other.
    Instance normalisation is listed only where it keeps running statistics.
    """
    found = [f"{name or 'model'}: {reason}" for name, module in model.named_modules() if (reason := _module_reason(module))]
    config = getattr(model, "config", None)
    is_summed = bool(balance_speakers(model))  # the usual balance loss is formed over all ranks
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", None) != 0 and not is_summed:
        found.append("model.config.output_router_logits: the router's balancing loss is a product of means over the batch")
    return found


def _module_reason(module: nn.Module) -> str | None:
    if not isinstance(module, _NormBase):
        return None
    kind = type(module).__name__
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return f"{kind} keeps running statistics of the batch" if module.track_running_stats else None
    return f"{kind} normalises over the rows of the batch"
