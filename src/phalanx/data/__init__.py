"""Data: loaders cut for the data axis, packing of documents, windows over tokens, and text files."""

from phalanx.data.example import first_batch
from phalanx.data.loader import BoostedLoader, boost_loader
from phalanx.data.packing import cu_seqlens, pack, segment_mask
from phalanx.data.rows import gather_rows, num_rows, spare_row, take_rows
from phalanx.data.text import read_text
from phalanx.data.windows import TokenWindows

__all__ = [
    "BoostedLoader",
    "TokenWindows",
    "boost_loader",
    "cu_seqlens",
    "first_batch",
    "gather_rows",
    "num_rows",
    "pack",
    "read_text",
    "segment_mask",
    "spare_row",
    "take_rows",
]
