"""Saves and loads what a run is made of, by logical name and global slice, so that any plan loads what any plan saved."""

from phalanx.checkpoint.reading import load
from phalanx.checkpoint.writing import save

__all__ = ["load", "save"]
