"""`phalanx checkpoint`: what checkpoints hold and whether they are sound, without loading them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.cli.output import DONE, FAILED, print_json, print_rows, show_bytes

if TYPE_CHECKING:
    from phalanx.checkpoint.inspect import Listed, Summary

EXAMPLE = """phalanx checkpoint list runs/demo
  phalanx checkpoint check runs/demo
  phalanx checkpoint show runs/demo/checkpoints/step-001000 --tensors"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explained = "list: all in a folder, also unfinished ones; check: read all of it and name what is damaged; show: what one holds"
    parser.add_argument("action", choices=["list", "check", "show"], help=explained)
    parser.add_argument("path", help="a checkpoint, or the folder of a run: check reads all in it, show takes the last whole one")
    parser.add_argument("--tensors", action="store_true", help="with show: one line for each tensor")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.errors import ConfigError

    if arguments.tensors and arguments.action != "show":
        raise ConfigError(f"--tensors is given to {arguments.action}", allowed="--tensors with show")
    actions = {"show": _show, "check": _check, "list": _list}
    return actions[arguments.action](arguments)


# -- list --------------------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.inspect import listing, series_folder

    folder = series_folder(arguments.path)
    found = listing(folder)
    if arguments.json:
        print_json({"ok": True, "checkpoints": [{**asdict(listed), "complete": listed.fault is None} for listed in found]})
    elif not found:
        print(f"{folder} holds no checkpoint; those of a run lie in its folder checkpoints/")
    else:
        rows = [("step", "saved", "size", "plan", "state", "path")]
        for listed in found:
            step = "-" if listed.step is None else str(listed.step)
            state = "complete" if listed.fault is None else "NOT WHOLE"
            rows.append((step, _local_time(listed.saved_at_s), show_bytes(listed.num_bytes), listed.plan or "-", state, str(listed.path)))
        print_rows(rows)
        for listed in found:
            if listed.fault:
                print(listed.fault)
    return DONE


# -- check -------------------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.inspect import find_all

    faults = {str(listed.path): _read_through(listed) for listed in find_all(arguments.path)}
    is_sound = not any(faults.values())
    if arguments.json:
        print_json({"ok": is_sound, "checkpoints": [{"path": path, "faults": found} for path, found in faults.items()]})
    else:
        for path, found in faults.items():
            print("\n".join(found) if found else f"{path} is sound")
    return DONE if is_sound else FAILED


def _read_through(listed: Listed) -> list[str]:
    """The faults of one checkpoint, with a live line on a terminal while it is read; those known unread are all there is to say."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from phalanx.checkpoint.inspect import check

    if listed.fault:
        return [listed.fault]
    path = listed.path
    if not sys.stderr.isatty():
        return check(path)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(path.name)
        return check(path, lambda done_bytes, total_bytes: live.update(task, completed=done_bytes, total=total_bytes))


# -- show --------------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.inspect import find_all, show

    found = find_all(arguments.path)
    whole = [listed for listed in found if listed.fault is None]
    summary = show((whole or found)[-1].path)  # which says what is wrong where none is whole
    if arguments.json:
        print_json({"ok": True, **asdict(summary)})
        return DONE
    print_rows(
        [
            ("path", summary.path),
            ("saved", f"{_local_time(summary.saved_at_s)} by phalanx {summary.phalanx} on {summary.world} ranks"),
            *summary.facts.items(),
            ("holds", f"{len(summary.tensors)} tensors of {summary.num_elements:,} elements"),
            *_kinds(summary),
            ("files", f"{summary.num_files}, {show_bytes(summary.num_bytes)}"),
        ]
    )
    if arguments.tensors:
        print()
        print_rows([(name, f"{dtype} {list(shape)} in {parts} parts") for name, (dtype, shape, parts) in sorted(summary.tensors.items())])
    return DONE


def _kinds(summary: Summary) -> list[tuple[str, str]]:
    """How many tensors of which dtype there are below each first part of a name: model, optimizer, buffer."""
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for name, (dtype, _, _) in summary.tensors.items():
        counts[name.split("/")[0], dtype] += 1
    return [(f"  {kind}", f"{count} of {dtype}") for (kind, dtype), count in sorted(counts.items())]


def _local_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
