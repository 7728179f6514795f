"""`phalanx checkpoint`: what a checkpoint holds and whether it is sound, without loading it."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from phalanx.cli.output import print_json, print_rows, show_bytes

EXAMPLE = "phalanx checkpoint show runs/demo/checkpoints/step-001000 --tensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=["show", "check", "list"], help="show: its contents; check: read all of it; list: those in a folder"
    )
    parser.add_argument("path", help="the directory of a checkpoint, or of several for list")
    parser.add_argument("--tensors", action="store_true", help="with show: one line for each tensor")


def execute(arguments: argparse.Namespace) -> int:
    actions = {"show": _show, "check": _check, "list": _list}
    return actions[arguments.action](arguments)


def _show(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.inspect import show

    summary = show(arguments.path)
    if arguments.json:
        print_json({"ok": True, **asdict(summary)})
        return 0
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved_at_s))
    rows = [("path", summary.path), ("saved", f"{saved_at} by phalanx {summary.phalanx} on {summary.world} ranks")]
    rows += [("holds", f"{len(summary.tensors)} tensors of {summary.num_elements:,} elements")]
    rows += [("files", f"{summary.num_files}, {show_bytes(summary.num_bytes)}")]
    if arguments.tensors:
        rows += [(name, f"{dtype} {list(shape)} in {parts} parts") for name, (dtype, shape, parts) in summary.tensors.items()]
    print_rows(rows)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.inspect import check

    faults = check(arguments.path)
    if arguments.json:
        print_json({"ok": not faults, "faults": faults})
    else:
        print("\n".join(faults) if faults else f"{arguments.path} is sound")
    return int(bool(faults))


def _list(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from phalanx.checkpoint.inspect import checkpoints
    from phalanx.errors import ConfigError

    if not Path(arguments.path).is_dir():
        raise ConfigError(f"there is no folder {arguments.path}")
    found = checkpoints(arguments.path)
    if arguments.json:
        print_json(
            {"ok": True, "checkpoints": [{"path": item.path, "saved_at_s": item.saved_at_s, "num_bytes": item.num_bytes} for item in found]}
        )
    elif not found:
        print(f"{arguments.path} holds no complete checkpoint; those of a run lie in its folder checkpoints/")
    else:
        print_rows(
            [(item.path, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.saved_at_s)), show_bytes(item.num_bytes)) for item in found]
        )
    return 0
