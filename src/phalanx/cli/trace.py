"""`phalanx trace`: the pipeline of a real run, from recorded times, beside the simulated one."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.output import print_json, print_rows

EXAMPLE = "phalanx trace runs/short --picture runs/short/pipeline.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run under a plan with pp")
    parser.add_argument("--picture", type=Path, help="where to draw both (.svg or .png; default: pipeline.svg in the run's folder)")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.parallel.pipeline.picture import print_timeline, save_picture
    from phalanx.parallel.pipeline.trace import from_record, record_of, simulated_beside

    table, spans = from_record(record_of(arguments.run))
    measured, simulated = simulated_beside(table, spans)
    picture = arguments.picture or arguments.run / "pipeline.svg"
    save_picture(picture, [(f"{table.name}, measured", measured), (f"{table.name}, simulated with its mean times", simulated)])
    report = {
        "schedule": table.name,
        "measured_step_s": measured.step_s,
        "simulated_step_s": simulated.step_s,
        "measured_idle": measured.idle_fraction,
        "simulated_idle": simulated.idle_fraction,
        "picture": str(picture),
    }
    if arguments.json:
        print_json(report)
        return 0
    print("measured\n" + print_timeline(measured) + "\nsimulated\n" + print_timeline(simulated))
    print_rows([(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else value) for name, value in report.items()])
    return 0
