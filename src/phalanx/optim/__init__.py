"""Norm, clipping, the loss scale, and the proof that an optimizer may work on shards."""
