"""Saves and loads what a run is made of, by logical name and global slice, so that any plan loads what any plan saved.

A checkpoint is a directory:

- `rank-RRRRR-NNNNN.safetensors`: the tensors that rank R owns, or parts of them; ordinary safetensors files
- `state.json`, `state.safetensors`: what all ranks share; `local-RRRRR.*`: what one rank alone knows
- `manifest.json`: for every logical tensor its dtype and shape, and for every part its box, run, file, key and checksum;
  for every file its size and checksum
- `COMPLETE`: size and checksum of the manifest, and the sign that saving has finished

Nothing in it is a pickle: reading a checkpoint never runs code.
"""

from phalanx.checkpoint.agree import require_all_ranks
from phalanx.checkpoint.beside import Saving, save_beside
from phalanx.checkpoint.reading import load
from phalanx.checkpoint.writing import Share, save

__all__ = ["Saving", "Share", "load", "require_all_ranks", "save", "save_beside"]
