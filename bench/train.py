"""`python -m bench.train`: every row of the training benchmark in one run, interleaved, as a table, the targets and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.engines import ACTIVATIONS, ROWS
from bench.workload import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent


class Host:
    """One warm process of an environment; answers one job at a time."""

    def __init__(self, python: str, packages: list[str]):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DS_ACCELERATOR": "cpu",  # DeepSpeed looks for accelerators otherwise
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",  # its compiler driver is a program of its environment
        }
        command = [python, "-m", "bench.host", *packages]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True)
        self.versions = self._answer()

    def run(self, **job) -> dict:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the warm process of {self.process.args[0]} ended by itself (exit {self.process.wait()})")
        return json.loads(line)


def open_hosts(deepspeed_python: str | None) -> dict[str, Host]:
    hosts = {"torch": Host(sys.executable, ["phalanx"])}
    if deepspeed_python:
        hosts["deepspeed"] = Host(deepspeed_python, ["deepspeed"])
    return hosts


def why_skipped(key: str, hosts: dict[str, Host]) -> str | None:
    """The reason a row cannot run here, or None."""
    row = ROWS[key]
    package = "phalanx" if row.family == "phalanx" else row.needs
    if row.needs not in hosts:
        return "not installed here (name its environment with --deepspeed-python)"
    return hosts[row.needs].versions.get(f"{package} missing")


def measure(options: argparse.Namespace, hosts: dict[str, Host], keep: Callable[[dict], None]) -> dict:
    """All samples: `{workload: {precision: {row: {"rounds": [...], "memory": {...}} or {"skipped": reason}}}}`.

    `keep` is handed what there is after every round: such a run is long, and an interrupted one is worth something too.
    """
    skipped = {key: why_skipped(key, hosts) for key in options.rows}
    results: dict = {}
    for workload in options.workloads:
        for precision in options.precisions:
            cell = {key: {"skipped": skipped[key]} if skipped[key] else {"rounds": []} for key in options.rows}
            results.setdefault(workload, {})[precision] = cell
            base = {"workload": workload, "precision": precision, "timeout_s": options.timeout_s}
            for turn in range(options.rounds):
                # Each round begins with another row, so that none always follows the same neighbour.
                order = options.rows[turn % len(options.rows) :] + options.rows[: turn % len(options.rows)]
                for key in order:
                    visit(cell, key, hosts, {**base, "measure": "time"})
                keep(results)
            for key in options.rows:
                visit(cell, key, hosts, {**base, "measure": "memory"})
            cell[ACTIVATIONS.key] = {"memory": hosts["torch"].run(row=ACTIVATIONS.key, **base, measure="memory")}
    return results


def visit(cell: dict, key: str, hosts: dict[str, Host], job: dict) -> None:
    """Runs one row once; a row that fails is left out from then on, with its error kept."""
    if "skipped" in cell[key]:
        return
    answer = hosts[ROWS[key].needs].run(row=key, **job)
    if "error" in answer:
        cell[key] = {"skipped": "failed: " + answer["error"].splitlines()[-1][:200], "error": answer["error"]}
        print(answer["error"], file=sys.stderr)
    elif job["measure"] == "memory":
        cell[key]["memory"] = answer
    else:
        cell[key]["rounds"].append(answer)
    print(f"{job['workload']} {job['precision']} {job['measure']} {key} {progress(answer)}", file=sys.stderr, flush=True)


def progress(answer: dict) -> str:
    if "error" in answer:
        return "failed"
    first = answer["ranks"][0]
    if "peak_bytes" in first:
        return f"{first['held_bytes'] / 2**20:.0f} MiB held, {first['peak_bytes'] / 2**20:.0f} MiB at the peak"
    cpu_s = sum(rank["cpu_s"] for rank in answer["ranks"])
    return f"{cpu_s:.3f} CPU s a step, {first['wall_s']:.3f} s wall, loss {first['losses'][-1]:.4f}"


def describe_machine() -> dict:
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) // 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": memory, "kernel": platform.release()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "no repository"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__, epilog="example: python -m bench.train --rounds 3")
    parser.add_argument("--rounds", type=int, default=9, help="how often each row is visited; medians are over these")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--deepspeed-python", help="the python of an environment with DeepSpeed and the same PyTorch")
    parser.add_argument("--timeout-s", type=float, default=300, help="after which a row counts as failed")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-train.json", help="where all samples go")
    parser.add_argument("--markdown", type=Path, help="where the table goes as well as to standard output")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    hosts = open_hosts(options.deepspeed_python)
    record = {
        "command": "python -m bench.train " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": {name: host.versions for name, host in hosts.items()},
        "rounds": options.rounds,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def keep(results: dict) -> None:
        record.update(results=results, targets=report.judge(results))
        options.json.write_text(json.dumps(record, indent=1))

    try:
        keep(measure(options, hosts, keep))
    finally:
        for host in hosts.values():
            host.close()
    text = report.render(record)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
