"""Reads an `nn.Module` without changing it: its layer stacks, its ties, how its own loss counts, and its seams."""

from phalanx.anatomy.attention_seam import AttentionSeam
from phalanx.anatomy.attention_seam import Call as AttentionCall
from phalanx.anatomy.batch_dependence import is_batch_dependent
from phalanx.anatomy.loss_seam import replace_causal_loss
from phalanx.anatomy.mask_source import Seen
from phalanx.anatomy.own_loss import OwnLoss, own_loss
from phalanx.anatomy.positions import length_dependent_positions, own_positions
from phalanx.anatomy.stacks import layer_stacks
from phalanx.anatomy.ties import tie_groups

__all__ = [
    "AttentionCall",
    "AttentionSeam",
    "OwnLoss",
    "Seen",
    "is_batch_dependent",
    "layer_stacks",
    "length_dependent_positions",
    "own_loss",
    "own_positions",
    "replace_causal_loss",
    "tie_groups",
]
