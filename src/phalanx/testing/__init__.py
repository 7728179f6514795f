"""For tests, of this project and of its users: run a function on local ranks."""

from __future__ import annotations

from phalanx.cluster import pool
from phalanx.cluster.pool import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]

pool.preload(
    "numpy",
    "pytest",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.loss.loss_utils",
)
