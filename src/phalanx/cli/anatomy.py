"""`phalanx anatomy`: what of a model can be split over ranks, as a tree, and what stays whole and why."""

from __future__ import annotations

import argparse

from phalanx.cli.output import print_json, print_rows

EXAMPLE = "phalanx anatomy tiny-llama --parts 3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="tiny-llama and others, a directory with a config.json, or module.py:function")
    parser.add_argument("--parts", type=int, default=2, help="number of tensor ranks to prove the reading for (default: 2)")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.anatomy import Unrunnable, call_with, read_anatomy, tree, whole
    from phalanx.data import first_batch
    from phalanx.errors import ConfigError
    from phalanx.verify.program import find_source

    if arguments.parts < 2:
        raise ConfigError(f"--parts is {arguments.parts}", allowed="2 or more", remedy="--parts 2")
    program = find_source(arguments.model).build()
    try:
        anatomy = read_anatomy(program.model, arguments.parts, call_with(first_batch([program.batch(0)]), None))
    except Unrunnable as error:
        raise ConfigError(f"{arguments.model} cannot be tried out: {error}", remedy="a function that returns model and batch") from error
    if arguments.json:
        heads = {name: {"heads": heads, "kv_heads": kv_heads} for name, (heads, kv_heads) in anatomy.heads.items()}
        print_json({"layers": list(anatomy.layers), "roles": anatomy.roles, "heads": heads, "whole": anatomy.whole})
        return 0
    print_rows(tree(program.model, anatomy))
    kept = whole(anatomy)
    if kept:
        print("\nstays whole")
        print_rows([(f"  {name}", reason) for name, reason in kept])
    return 0
