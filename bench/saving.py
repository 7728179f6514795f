"""`python -m bench.saving`: how long a run stands for a checkpoint, written beside the steps or while it waits, and what the disk can do.

One process, the model of the other benchmarks under AdamW in fp32: weights and two moments. Medians of the rounds; between saves
beside the steps so many steps run that each is complete before the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.train import ROOT, commit, describe_machine
from bench.workload import WORKLOADS, adamw, build_model, input_ids

BLOCKED_WANTED, SPEED_WANTED = 0.05, 0.8


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(folder: Path, rounds: int) -> dict:
    import phalanx as px

    booster = px.Booster("zero0")
    model = build_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    booster.boost(model, adamw(model.parameters(), True))
    batches = [{"input_ids": ids, "labels": ids} for ids in (input_ids(WORKLOADS["thick"], step, 0) for step in range(4))]
    step = lambda number: booster.step(batches[number % 4])  # noqa: E731
    for number in range(2):
        step(number)
    samples: dict[str, list[float]] = {name: [] for name in ("step", "step_beside", "blocked", "beside", "waited", "disk")}
    for number in range(rounds + 1):
        round_ = _round(booster, folder, lambda at=number: step(at))
        if number:  # the first one finds neither memory nor files
            for name, value in round_.items():
                samples[name].append(value)
    num_bytes = sum(entry.stat().st_size for entry in (folder / "at").iterdir())
    return {"parameters": num_parameters, "bytes": num_bytes, "samples": samples}


def _round(booster, folder: Path, step: Callable[[], object]) -> dict[str, float]:
    found = {"step": seconds(step)}
    begun = time.perf_counter()
    ended: list[float] = []
    found["blocked"] = seconds(lambda: booster.save(folder / "at", wait=False, then=lambda: ended.append(time.perf_counter())))
    beside = []
    while not ended:
        beside.append(seconds(step))
    booster.finish_saving()
    found["step_beside"] = statistics.median(beside)
    found["beside"] = ended[0] - begun
    found["waited"] = seconds(lambda: booster.save(folder / "at"))
    num_bytes = sum(entry.stat().st_size for entry in (folder / "at").iterdir())
    found["disk"] = seconds(lambda: _write(folder / "plain", num_bytes))
    return found


def _write(path: Path, num_bytes: int) -> None:
    """What the disk takes for so many bytes of one file, flushed, without a checksum."""
    block = memoryview(os.urandom(1 << 20))
    with open(path, "wb", buffering=0) as file:
        for start in range(0, num_bytes, 1 << 20):
            file.write(block[: min(1 << 20, num_bytes - start)])
        os.fsync(file.fileno())
    path.unlink()


def render(found: dict) -> str:
    median = {name: statistics.median(values) for name, values in found["samples"].items()}
    blocked, speed = median["blocked"] / median["step"], median["disk"] / median["waited"]
    return "\n".join(
        [
            f"{found['parameters'] / 1e6:.1f} million parameters, {found['bytes'] / 1e6:.0f} MB a checkpoint",
            f"a step {median['step']:.3f} s; while a checkpoint is written {median['step_beside']:.3f} s",
            f"blocked by a save beside the steps {median['blocked']:.3f} s, {blocked:.1%} of a step (wanted <= {BLOCKED_WANTED:.0%})",
            f"complete after {median['beside']:.2f} s",
            f"a save that waits {median['waited']:.2f} s; the disk alone {median['disk']:.2f} s",
            f"{speed:.2f} x the speed of the disk (wanted >= {SPEED_WANTED})",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.saving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; default: a temporary one")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-saving.json", help="where all samples go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), options.rounds)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {"commit": commit(), "machine": describe_machine(), "torch": torch.__version__, **found}
    options.json.write_text(json.dumps(record, indent=1))
    print(render(found))


if __name__ == "__main__":
    main()
