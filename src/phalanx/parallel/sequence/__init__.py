"""Sequence (context) parallelism: the tokens of each row are cut over ranks, and attention alone sees beyond the own part."""

from phalanx.parallel.sequence.attention import Grid, attention
from phalanx.parallel.sequence.cut import Cut, Rows

__all__ = ["Cut", "Grid", "Rows", "attention"]
