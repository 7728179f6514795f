"""Reads an `nn.Module` without changing it: its layer stacks, its ties, what can be split, how its own loss counts, and its seams."""

from phalanx.anatomy.attention_seam import AttentionSeam
from phalanx.anatomy.attention_seam import Call as AttentionCall
from phalanx.anatomy.batch_dependence import is_batch_dependent
from phalanx.anatomy.entry import Entry
from phalanx.anatomy.groups import Group
from phalanx.anatomy.locality import make_local
from phalanx.anatomy.loss_seam import replace_causal_loss
from phalanx.anatomy.mask_source import Seen, takes_cache
from phalanx.anatomy.norms import Norm, read_norm
from phalanx.anatomy.own_loss import OwnLoss, own_loss
from phalanx.anatomy.positions import length_dependent_positions, own_positions
from phalanx.anatomy.proof import Proved
from phalanx.anatomy.reading import Anatomy, read_anatomy
from phalanx.anatomy.specimen import Unrunnable, call_with, guess_call, is_linear, is_transposed, stacks_of
from phalanx.anatomy.split import Split, num_features
from phalanx.anatomy.stacks import execution_blocks, layer_stacks
from phalanx.anatomy.stream import StreamReading, read_stream
from phalanx.anatomy.ties import tie_groups
from phalanx.anatomy.tree import tree, whole

__all__ = [
    "Anatomy",
    "AttentionCall",
    "AttentionSeam",
    "Entry",
    "Group",
    "Norm",
    "OwnLoss",
    "Proved",
    "Seen",
    "Split",
    "StreamReading",
    "Unrunnable",
    "call_with",
    "execution_blocks",
    "guess_call",
    "is_batch_dependent",
    "is_linear",
    "is_transposed",
    "layer_stacks",
    "length_dependent_positions",
    "make_local",
    "num_features",
    "own_loss",
    "own_positions",
    "read_anatomy",
    "read_norm",
    "read_stream",
    "replace_causal_loss",
    "stacks_of",
    "takes_cache",
    "tie_groups",
    "tree",
    "whole",
]
