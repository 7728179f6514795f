"""`phalanx doctor`: what this machine has, what is missing, and what that costs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from dataclasses import asdict, dataclass

from phalanx.cli.output import print_json, print_rows, show_bytes

EXAMPLE = "phalanx doctor --json"

OPTIONAL_PACKAGES = {
    "matplotlib": "no pictures of runs; pip install 'phalanx[pictures]'",
    "tensorboard": "no export to TensorBoard; pip install 'phalanx[tensorboard]'",
    "flash_attn": "attention with a soft cap is computed by its definition on an accelerator; pip install 'phalanx[flash]'",
    "triton": "torch.compile makes no kernels for an accelerator",
}
FEWEST_OPEN_FILES = 1024
SMALLEST_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `state` is "ok", "missing" (something costs more or is not there) or "broken"."""

    name: str
    state: str
    found: str
    cost: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def execute(arguments: argparse.Namespace) -> int:
    findings = examine()
    broken = any(finding.state == "broken" for finding in findings)
    if arguments.json:
        print_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        print_rows([(finding.state, finding.name, finding.found + (f": {finding.cost}" if finding.cost else "")) for finding in findings])
    return int(broken)


def examine() -> list[Finding]:
    """Everything that is looked at, the most important first."""
    return [*_required_packages(), *_devices(), *_attention(), *_communication(), *_limits(), *_optional_packages(), *_programs()]


def _required_packages() -> list[Finding]:
    findings = [Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    for package, floor in (
        ("torch", (2, 11)),
        ("transformers", (5, 17)),
        ("tokenizers", (0, 21)),
        ("safetensors", (0, 5)),
        ("numpy", (1, 26)),
    ):
        found = _version(package)
        wanted = ".".join(map(str, floor))
        if found is None:
            findings.append(Finding(package, "broken", "not installed", f"Phalanx needs {package}>={wanted}"))
        elif tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < floor:
            findings.append(Finding(package, "broken", found, f"Phalanx needs {package}>={wanted}"))
        else:
            findings.append(Finding(package, "ok", found))
    return findings


def _devices() -> list[Finding]:
    from phalanx.cluster import device

    findings = []
    for kind in device.available():
        found = device.get(kind)
        memory = found.memory()
        count = len(os.sched_getaffinity(0)) if kind == "cpu" and hasattr(os, "sched_getaffinity") else found.count()
        name = platform.processor() or platform.machine() if kind == "cpu" else found.name()
        findings.append(Finding(kind, "ok", f"{count} x {name}, {show_bytes(memory.total_bytes)} ({show_bytes(memory.free_bytes)} free)"))
    if len(findings) == 1:
        findings.insert(
            0, Finding("accelerator", "missing", "none", "everything runs on the processor, which suits models of a few million parameters")
        )
    return findings


def _attention() -> list[Finding]:
    """The fused kernels that say here what the definition says; the log tells of those that do not."""
    import torch

    from phalanx.cluster import device
    from phalanx.kernels.attention import sound_kernels

    kind = device.available()[0]
    found = sound_kernels(torch.device(kind))
    cost = "" if found else "attention is computed by its definition, slowly"
    return [Finding(f"attention on {kind}", "ok" if found else "missing", ", ".join(found) or "no fused kernel", cost)]


def _communication() -> list[Finding]:
    from phalanx.cluster import device

    kinds = device.available()
    findings = [Finding("backend", "ok", device.get(kinds[0]).backend)]
    if kinds[0] != "cpu":
        fast = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
        cost = "" if fast else "ranks on other machines are reached through TCP"
        findings.append(Finding("infiniband", "ok" if fast else "missing", "found" if fast else "none", cost))
    return findings


def _limits() -> list[Finding]:
    findings = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < FEWEST_OPEN_FILES
    findings.append(
        Finding(
            "open files", "missing" if few else "ok", f"{files} allowed", "many ranks may fail to connect; ulimit -n 65536" if few else ""
        )
    )
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        small = size < SMALLEST_SHARED_MEMORY_BYTES
        cost = "loader workers may fail to hand over batches; docker run --shm-size=8g" if small else ""
        findings.append(Finding("shared memory", "missing" if small else "ok", show_bytes(size), cost))
    free = shutil.disk_usage(os.getcwd()).free
    findings.append(Finding("disk here", "ok", f"{show_bytes(free)} free"))
    return findings


def _optional_packages() -> list[Finding]:
    return [
        Finding(package, "ok" if (found := _version(package)) else "missing", found or "not installed", "" if found else cost)
        for package, cost in OPTIONAL_PACKAGES.items()
    ]


def _programs() -> list[Finding]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    launcher = shutil.which("srun")
    return [
        Finding(
            "C++ compiler",
            "ok" if compiler else "missing",
            compiler or "none",
            "" if compiler else "torch.compile cannot make code for the processor",
        ),
        Finding(
            "Slurm",
            "ok" if launcher else "missing",
            launcher or "none",
            "" if launcher else "jobs on several machines start with torchrun or phalanx run",
        ),
    ]


def _version(package: str) -> str | None:
    if package in sys.modules and hasattr(sys.modules[package], "__version__"):
        return str(sys.modules[package].__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
