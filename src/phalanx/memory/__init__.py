"""The sharded state engine: chunks, the ZeRO policies, and what moves when."""

from phalanx.memory.engine import StateEngine

__all__ = ["StateEngine"]
