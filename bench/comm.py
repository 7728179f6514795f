"""`python -m bench.comm`: the collectives of Phalanx beside those of bare gloo, on processes of this machine.

Each size is measured in turns: one of theirs, one of ours. Bytes are those that the loopback counter of a private network sees.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bench.meters import loopback_sent_bytes
from bench.ranks import run_forked
from bench.train import ROOT, commit, describe_machine

Operation = Callable[[], object]
SIZES = (2**14, 2**18, 2**20, 11 * 2**20, 2**26)
SMALL_BYTES = 2**20


def operations(nbytes: int, dtype: torch.dtype, axis, comm) -> dict[str, tuple[Operation, Operation]]:
    """For each collective gloo's own call and ours, on buffers of `nbytes` in full."""
    world = dist.get_world_size()
    elements = nbytes // dtype.itemsize // world * world
    full, shard = torch.ones(elements, dtype=dtype), torch.ones(elements // world, dtype=dtype)
    out, part = torch.empty_like(full), torch.empty_like(shard)
    return {
        "all_reduce": (lambda: dist.all_reduce(full.fill_(1)), lambda: comm.all_reduce(full.fill_(1), axis)),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, full.fill_(1)), lambda: comm.reduce_scatter(part, full.fill_(1), axis)),
        "all_gather": (lambda: dist.all_gather_into_tensor(out, shard), lambda: comm.all_gather(out, shard, axis)),
        "all_to_all": (lambda: dist.all_to_all_single(out, full), lambda: comm.all_to_all(out, full, axis)),
        "broadcast": (lambda: dist.broadcast(full, 0), lambda: comm.broadcast(full, axis)),
    }


def measure(sizes: list[int], dtype: torch.dtype, rounds: int) -> list[dict]:
    """Runs on every rank; the figures are this rank's."""
    from phalanx.cluster import comm, launch
    from phalanx.cluster.mesh import Mesh

    torch.set_num_threads(1)
    world = launch.launch()
    axis = Mesh({"dp": world.size, "pp": 1, "cp": 1, "tp": 1}).axis("dp")
    rows = []
    for nbytes in sizes:
        for name, pair in operations(nbytes, dtype, axis, comm).items():
            samples: dict[str, list[dict]] = {"gloo": [], "phalanx": []}
            for _ in range(rounds + 1):
                for side, operation in zip(samples, pair):
                    samples[side].append(sample(operation, repeats=20 if nbytes < SMALL_BYTES else 3))
            for side, taken in samples.items():
                figures = {key: statistics.median(one[key] for one in taken[1:]) for key in taken[0]}  # the first one warms up
                rows.append({"operation": name, "bytes": nbytes, "side": side, **figures})
    return rows


def sample(operation: Operation, repeats: int) -> dict[str, float]:
    dist.barrier()
    sent, wall, cpu = loopback_sent_bytes(), time.perf_counter(), time.process_time()
    for _ in range(repeats):
        operation()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    dist.barrier()
    sent = loopback_sent_bytes() - sent
    return {"wall_s": wall_s / repeats, "cpu_s": cpu_s / repeats, "wire_bytes": sent / repeats / dist.get_world_size()}


def render(rows: list[dict], private: bool) -> str:
    head = [
        "| collective | size KiB | gloo ms | ours ms | gloo CPU ms | ours CPU ms | gloo sent / size | ours sent / size |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines = []
    for theirs, ours in zip(rows[::2], rows[1::2]):
        pairs = [(one["wall_s"] * 1e3, one["cpu_s"] * 1e3, one["wire_bytes"] / one["bytes"]) for one in (theirs, ours)]
        cells = [f"{value:.2f}" for pair in zip(*pairs) for value in pair]
        if not private:
            cells[-2:] = ["", ""]
        lines.append(f"| {theirs['operation']} | {theirs['bytes'] // 1024} | " + " | ".join(cells) + " |")
    note = [] if private else ["", "A private network was not permitted here, so bytes were not counted."]
    return "\n".join(head + lines + note)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.comm", description=__doc__, epilog="example: python -m bench.comm --world 4")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-comm.json")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    answer = run_forked(lambda rank: {"rows": measure(options.sizes, dtype, options.rounds)}, options.world, timeout_s=600)
    if "error" in answer:
        raise SystemExit(answer["error"])
    rows = answer["ranks"][0]["rows"]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {"commit": commit(), "machine": describe_machine(), "torch": torch.__version__, "world": options.world, "rows": rows}
    options.json.write_text(json.dumps(record, indent=1))
    print(render(rows, answer["private"]))


if __name__ == "__main__":
    main()
