"""A warm process that imports the heavy packages once, then forks the ranks of each job it reads; one JSON object a line, both ways."""

from __future__ import annotations

import json
import os
import sys
import warnings


def warm_up(packages: list[str]) -> dict:
    """Imports what the rows need; returns the versions found, or what is missing."""
    import importlib

    warnings.simplefilter("ignore")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401  (children inherit the imported modules)

    torch.set_num_threads(1)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in ["transformers", *packages]:
        try:
            versions[package] = getattr(importlib.import_module(package), "__version__", "here")
        except Exception as failure:
            versions[package] = None
            versions[f"{package} missing"] = f"{type(failure).__name__}: {failure}"
    return versions


def run_job(job: dict) -> dict:
    from bench import engines, meters
    from bench.ranks import run_forked
    from bench.workload import WORKLOADS

    row, workload = engines.find_row(job["row"]), WORKLOADS[job["workload"]]

    def work(rank: int) -> dict:
        setting = engines.setting_of(workload, job["precision"], rank)
        if job["measure"] == "memory":
            if row.family == "phalanx":
                meters.count_blocks_of_phalanx()
            return meters.measure_memory(lambda: row.build(setting), workload.warmup)
        ledger = engines.phalanx_ledger_bytes if row.family == "phalanx" else None
        return meters.measure_time(row.build(setting), workload.warmup, workload.steps, ledger)

    return run_forked(work, row.world, job["timeout_s"])


def serve(packages: list[str]) -> None:
    """Answers on the first standard output; whatever packages print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer(warm_up(packages))
    for line in sys.stdin:
        answer(run_job(json.loads(line)))


if __name__ == "__main__":
    serve(sys.argv[1:])
