"""Tensor parallelism on untouched models: each layer's projections are split over ranks, by a reading of the model."""

from phalanx.parallel.tensor.apply import split_model
from phalanx.parallel.tensor.grid2d import grid_2d
from phalanx.parallel.tensor.grid3d import grid_3d
from phalanx.parallel.tensor.grid25d import grid_25d
from phalanx.parallel.tensor.kind import Kind
from phalanx.parallel.tensor.on_grid import OnGrid
from phalanx.parallel.tensor.one import OneDimensional
from phalanx.parallel.tensor.split_logits import SplitLogits
from phalanx.parallel.tensor.vocabulary import Head, VocabularyLoss

__all__ = ["Head", "Kind", "OnGrid", "OneDimensional", "SplitLogits", "VocabularyLoss", "grid_2d", "grid_3d", "grid_25d", "split_model"]
