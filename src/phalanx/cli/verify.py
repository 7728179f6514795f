"""`phalanx verify`: compares a plan with one process, number by number."""

from __future__ import annotations

import argparse

EXAMPLE = "phalanx verify --model tiny-llama --plan zero2 --world 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = (
        "tiny-llama and others (see --list), a directory with a config.json, or module.py:function that returns model, batch and criterion"
    )
    parser.add_argument("--model", help=model)
    parser.add_argument("--plan", help="plan text such as zero2, or a TOML file")
    parser.add_argument("--world", type=int, help="number of ranks (default: the fewest on which every term has something to do)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to compare (default: 3)")
    parser.add_argument("--rows", type=int, help="rows of the global batch, to try fewer rows than ranks")
    parser.add_argument("--clip-norm", type=float, help="clip the gradient norm at this value (default: no clipping)")
    parser.add_argument("--list", action="store_true", help="print the names of the built-in models and do nothing else")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.cluster import pool
    from phalanx.cluster.launch import launch
    from phalanx.errors import ConfigError

    if arguments.model and arguments.plan and launch().size == 1:
        pool.warm("phalanx.verify.ranks")  # the ranks' server loads transformers while this process does
    from phalanx.verify import NAMES, verify_named

    if arguments.list:
        print("\n".join(NAMES))
        return 0
    if arguments.model is None or arguments.plan is None:
        raise ConfigError("verify needs --model and --plan", remedy="--model tiny-llama --plan zero2")
    report = verify_named(
        arguments.model, arguments.plan, arguments.world, arguments.steps, rows=arguments.rows, clip_norm=arguments.clip_norm
    )
    if launch().rank == 0:
        print(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1
