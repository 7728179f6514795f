"""From samples to the table and the verdicts. Ratios are formed within a round, then their median is taken."""

from __future__ import annotations

import statistics

from bench.bounds import state_bytes, wire_bytes_per_rank
from bench.engines import ACTIVATIONS, ROWS
from bench.workload import num_parameters

MIB = 2**20
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


def rounds_of(cell: dict, key: str) -> list[dict]:
    return cell.get(key, {}).get("rounds", [])


def job_cpu_s(sample: dict) -> float:
    return sum(rank["cpu_s"] for rank in sample["ranks"])


def median_over(cell: dict, key: str, figure) -> float | None:
    values = [figure(sample) for sample in rounds_of(cell, key)]
    return statistics.median(values) if values else None


def best_of(cell: dict, family: str) -> str | None:
    """The row of a family that costs the fewest CPU seconds: nobody is compared with a slow way of using a good system."""
    measured = [key for key, row in ROWS.items() if row.family == family and rounds_of(cell, key)]
    return min(measured, key=lambda key: median_over(cell, key, job_cpu_s), default=None)


def ratio(cell: dict, ours: str, theirs: str | None, baseline: str | None = None) -> float | None:
    """Median over rounds of our CPU seconds over theirs, both counted above `baseline` run as often as there are ranks."""
    if theirs is None or not rounds_of(cell, ours) or not rounds_of(cell, theirs):
        return None
    if baseline is not None and not rounds_of(cell, baseline):
        return None
    values = []
    for turn, (mine, other) in enumerate(zip(rounds_of(cell, ours), rounds_of(cell, theirs))):
        copies = 1 if ROWS[ours].shares_rows else ROWS[ours].world  # of the plain loop's work that the job does
        floor = job_cpu_s(rounds_of(cell, baseline)[turn]) * copies if baseline else 0.0
        values.append((job_cpu_s(mine) - floor) / (job_cpu_s(other) - floor))
    return statistics.median(values)


def sent_bytes(sample: dict) -> float | None:
    """Bytes that one rank sends in a step: by the loopback counter, or by our own ledger where a private network was not permitted."""
    if sample["private"]:
        return sample["ranks"][0]["job_wire_bytes"] / len(sample["ranks"])
    return sample["ranks"][0]["ledger_bytes"]


def wire_of(cell: dict, key: str) -> float | None:
    values = [sent_bytes(sample) for sample in rounds_of(cell, key)]
    return statistics.median(values) if values and None not in values else None


def peak_of(cell: dict, key: str, field: str = "peak_bytes") -> int | None:
    """The lowest over ranks: what a thread of gloo frees escapes the profiler, so a rank can only count too much."""
    memory = cell.get(key, {}).get("memory", {})
    return min(rank[field] for rank in memory["ranks"]) if "ranks" in memory else None


def judge(results: dict) -> list[dict]:
    """Every target that the run can speak to: what is compared, the limit, the value, and whether it is reached."""
    verdicts = []

    def hold(workload: str, precision: str, what: str, value: float | None, limit: float) -> None:
        if value is not None:
            verdict = {
                "workload": workload,
                "precision": precision,
                "what": what,
                "value": value,
                "limit": limit,
                "reached": value <= limit,
            }
            verdicts.append(verdict)

    for workload, precisions in results.items():
        for precision, cell in precisions.items():
            for what, value, limit in [*_cost(cell, workload), *_tensor(cell), *_bytes(cell, precision)]:
                hold(workload, precision, what, value, limit)
    return verdicts


def _tensor(cell: dict) -> list[tuple[str, float | None, float]]:
    """Tensor parallelism beside the best of PyTorch's and transformers' own, on the same rows."""
    best, plain, targets = best_of(cell, "tensor"), best_of(cell, "plain"), []
    for key, wanted in (("phalanx-tp2", 0.55), ("phalanx-tp2-sp", 0.65)):
        title = ROWS[key].title.removeprefix("Phalanx ")
        targets.append((f"CPU s above the plain loop, {title} over the best tensor row", ratio(cell, key, best, plain), 0.7))
        least = min((wire_of(cell, other) for other in ("torch-tp", "transformers-tp") if wire_of(cell, other)), default=None)
        if least and wire_of(cell, key):
            targets.append((f"wire bytes, {title} over the best tensor row", wire_of(cell, key) / least, wanted))
        peaks = [peak_of(cell, other) for other in ("torch-tp", "transformers-tp") if peak_of(cell, other)]
        if peaks and peak_of(cell, key):
            targets.append((f"peak bytes, {title} over the best tensor row", peak_of(cell, key) / min(peaks), 1.0))
    return targets


def _cost(cell: dict, workload: str) -> list[tuple[str, float | None, float]]:
    if workload == "thick":
        return [
            ("CPU s, zero0 over the best DDP", ratio(cell, "phalanx-zero0", best_of(cell, "ddp")), 1.02),
            ("CPU s, zero2 over FSDP2 kept after forward", ratio(cell, "phalanx-zero2", best_of(cell, "fsdp2-zero2")), 0.96),
            ("CPU s, zero3 over FSDP2", ratio(cell, "phalanx-zero3", best_of(cell, "fsdp2-zero3")), 0.96),
        ]
    plain = best_of(cell, "plain")
    deepspeed = "deepspeed3" if rounds_of(cell, "deepspeed3") else None
    return [
        ("CPU s above the plain loop, zero3 over FSDP2", ratio(cell, "phalanx-zero3", best_of(cell, "fsdp2-zero3"), plain), 0.7),
        ("CPU s above the plain loop, zero3 over DeepSpeed ZeRO 3", ratio(cell, "phalanx-zero3", deepspeed, plain), 0.6),
    ]


def _bytes(cell: dict, precision: str) -> list[tuple[str, float | None, float]]:
    targets = []
    compute = 2 if precision == "bf16" else 4
    alone = peak_of(cell, ACTIVATIONS.key)
    # Its weights, gradients and two moments are in the compute dtype; the rest are activations and what libraries keep.
    activations = None if alone is None else alone - 4 * compute * num_parameters()["model"]
    for stage in range(4):
        key = f"phalanx-zero{stage}"
        wire, peak = wire_of(cell, key), peak_of(cell, key)
        if wire is not None:
            bound = wire_bytes_per_rank(stage, 2, num_parameters()["model"], compute, gradient_bytes=4)
            targets.append((f"wire bytes, zero{stage} over the ring bound ({bound / 1e6:.1f} MB)", wire / bound, 1.01))
        if peak is not None and activations is not None:
            form = state_bytes(stage, 2, num_parameters(), precision == "bf16") + activations
            targets.append((f"peak bytes, zero{stage} over the closed form ({form / MIB:.0f} MiB)", peak / form, 1.03))
        peer = {2: "fsdp2-zero2", 3: "fsdp2-zero3-fused"}.get(stage)
        if peer and peak is not None and peak_of(cell, peer):
            targets.append((f"peak bytes, zero{stage} over {ROWS[peer].title}", peak / peak_of(cell, peer), 1.0))
    if precision == "fp32" and wire_of(cell, "phalanx-zero3") and wire_of(cell, "fsdp2-zero3-fused"):
        targets.append(("wire bytes, zero3 over FSDP2", wire_of(cell, "phalanx-zero3") / wire_of(cell, "fsdp2-zero3-fused"), 0.76))
    return targets


def disagreements(cell: dict, precision: str) -> list[str]:
    """Rows of two processes whose losses differ from those of the others: they would not have done the same work."""
    curves = {}
    for key in cell:
        samples = rounds_of(cell, key)
        if samples and ROWS[key].world > 1 and not ROWS[key].shares_rows:
            curves[key] = [statistics.fmean(values) for values in zip(*(rank["losses"] for rank in samples[0]["ranks"]))]
    if not curves:
        return []
    middle = [statistics.median(values) for values in zip(*curves.values())]
    return [
        ROWS[key].title
        for key, losses in curves.items()
        if max(abs(mine / other - 1) for mine, other in zip(losses, middle)) > LOSS_TOLERANCE[precision]
    ]


def render(record: dict) -> str:
    machine, versions = record["machine"], record["versions"]
    lines = [
        f"Measured with `{record['command']}` at commit {record['commit']} on {machine['cores']} cores of an {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}; "
        + "; ".join(", ".join(f"{package} {found}" for package, found in host.items()) for host in versions.values())
        + f". Medians of {record['rounds']} interleaved rounds.",
    ]
    for workload, precisions in record["results"].items():
        for precision, cell in precisions.items():
            lines += ["", f"### {workload}, {precision}", "", *_table(cell)]
            odd = disagreements(cell, precision)
            lines += [
                "",
                f"Losses differ from the other rows: {', '.join(odd)}." if odd else "All rows of two processes report the same losses.",
            ]
    return "\n".join([*lines, "", "### Targets", "", *_verdicts(record["targets"])])


def _table(cell: dict) -> list[str]:
    plain = best_of(cell, "plain")
    head = [
        "| row | processes | CPU s a step, all ranks | above the plain loop | wall ms | sent MB a rank | held MiB | peak MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return head + [_line(cell, key, row, plain) for key, row in ROWS.items() if key in cell]


def _line(cell: dict, key: str, row, plain: str | None) -> str:
    if "skipped" in cell[key]:
        return f"| {row.title} | {row.world} | {cell[key]['skipped'].replace('|', '/')} | | | | | |"
    cpu_s = median_over(cell, key, job_cpu_s)
    above = None if plain is None else cpu_s - (1 if row.shares_rows else row.world) * median_over(cell, plain, job_cpu_s)
    wall_s = median_over(cell, key, lambda sample: max(rank["wall_s"] for rank in sample["ranks"]))
    wire = wire_of(cell, key)
    cells = [
        row.title,
        str(row.world),
        f"{cpu_s:.3f}",
        "" if above is None else f"{above:+.3f}",
        f"{wall_s * 1e3:.0f}",
        "" if wire is None else f"{wire / 1e6:.1f}",
        *("" if peak_of(cell, key, field) is None else f"{peak_of(cell, key, field) / MIB:.0f}" for field in ("held_bytes", "peak_bytes")),
    ]
    return "| " + " | ".join(cells) + " |"


def _verdicts(targets: list[dict]) -> list[str]:
    if not targets:
        return ["No target could be judged: the rows it needs did not run."]
    head = ["| workload | figure | wanted | found | |", "| --- | --- | ---: | ---: | --- |"]
    return head + [
        f"| {one['workload']}, {one['precision']} | {one['what']} | <= {one['limit']:.2f} | {one['value']:.3f} | {verdict(one)} |"
        for one in targets
    ]


def verdict(target: dict) -> str:
    return "reached" if target["reached"] else "not reached"
