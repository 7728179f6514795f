"""Data: loaders cut for the data axis, packing of documents, windows over tokens, and text files."""

from phalanx.data.loader import BoostedLoader, boost_loader
from phalanx.data.rows import gather_rows, num_rows, spare_row, take_rows

__all__ = ["BoostedLoader", "boost_loader", "gather_rows", "num_rows", "spare_row", "take_rows"]
