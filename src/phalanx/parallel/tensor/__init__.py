"""Tensor parallelism on untouched models: each layer's projections are split over ranks, by a reading of the model."""

from phalanx.parallel.tensor.apply import split_model
from phalanx.parallel.tensor.kind import Kind
from phalanx.parallel.tensor.one import OneDimensional
from phalanx.parallel.tensor.vocabulary import VocabularyLoss

__all__ = ["Kind", "OneDimensional", "VocabularyLoss", "split_model"]
