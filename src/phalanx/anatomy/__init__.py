"""Reads an `nn.Module` without changing it: its layer stacks, its ties, how its own loss counts, and its seams."""

from phalanx.anatomy.batch_dependence import is_batch_dependent
from phalanx.anatomy.loss_seam import replace_causal_loss
from phalanx.anatomy.own_loss import OwnLoss, own_loss
from phalanx.anatomy.stacks import layer_stacks
from phalanx.anatomy.ties import tie_groups

__all__ = ["OwnLoss", "is_batch_dependent", "layer_stacks", "own_loss", "replace_causal_loss", "tie_groups"]
