"""The one place through which ranks talk: collectives, their differentiable pairs, and the ledger that counts them."""

from __future__ import annotations

from phalanx.cluster.agreement import agree
from phalanx.cluster.buffers import release_buffers
from phalanx.cluster.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    fail,
    gather_objects,
    recv,
    reduce_scatter,
    send,
)
from phalanx.cluster.differentiable import copy_to, exchange, gather_from, reduce_from, scatter_to
from phalanx.cluster.failure import PeerError
from phalanx.cluster.ledger import Ledger, ledger

__all__ = [
    "Ledger",
    "PeerError",
    "Pending",
    "agree",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "copy_to",
    "exchange",
    "fail",
    "gather_from",
    "gather_objects",
    "ledger",
    "recv",
    "reduce_from",
    "reduce_scatter",
    "release_buffers",
    "scatter_to",
    "send",
]
