"""`phalanx checkpoint`: what checkpoints hold, whether they are sound, and what else can be made of them; without a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.output import DONE, FAILED, print_json, print_rows, show_bytes

if TYPE_CHECKING:
    from phalanx.checkpoint.inspect import Listed, Summary

EXAMPLE = """phalanx checkpoint list runs/demo
  phalanx checkpoint check runs/demo
  phalanx checkpoint show runs/demo/checkpoints/step-001000 --tensors
  phalanx checkpoint export runs/demo model
  phalanx checkpoint convert runs/demo/checkpoints/step-001000 archive/step-001000 --max-file 20GB"""

MAX_FILE = "5GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explained = "; ".join(f"{name}: {what}" for name, (what, *_) in ACTIONS.items())
    parser.add_argument("action", choices=list(ACTIONS), help=explained)
    parser.add_argument("path", help="a checkpoint, or the folder of a run: list and check mean all in it, the others the last whole one")
    parser.add_argument("target", nargs="?", help="with export and convert: the directory to write")
    parser.add_argument("--tensors", action="store_true", default=None, help="with show: one line for each tensor")
    parser.add_argument("--model", type=int, help="with export: which model, where a booster had several (0)")
    parser.add_argument("--max-file", metavar="BYTES", help="with convert: data in a file at most (5GB)")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.errors import ConfigError

    _, act, takes = ACTIONS[arguments.action]
    for name in ("tensors", "model", "max_file", "target"):
        if getattr(arguments, name) is not None and name not in takes:
            others = [action for action, (*_, taken) in ACTIONS.items() if name in taken]
            option = name if name == "target" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is given to {arguments.action}", allowed=f"{option} with {' and '.join(others)}")
    if "target" in takes and arguments.target is None:
        remedy = f"phalanx checkpoint {arguments.action} {arguments.path} {arguments.path}-{arguments.action}"
        raise ConfigError(f"{arguments.action} was not told where to write", allowed="a directory as the last word", remedy=remedy)
    return act(arguments)


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
    """The faults of one checkpoint; those known unread are all there is to say."""
    from phalanx.checkpoint.inspect import check

    if listed.fault:
        return [listed.fault]
    with _live(listed.path.name) as progress:
        return check(listed.path, progress)


@contextmanager
def _live(title: str) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (done, total) bytes while something is read; on a terminal it moves a live line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    if not sys.stderr.isatty():
        yield lambda done_bytes, total_bytes: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(title)
        yield lambda done_bytes, total_bytes: live.update(task, completed=done_bytes, total=total_bytes)


# -- show --------------------------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.inspect import show

    summary = show(_last_whole(arguments.path))
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


def _last_whole(path: str) -> Path:
    """The checkpoint that a path means; one that is not whole where none is, so that what reads it says what is wrong."""
    from phalanx.checkpoint.inspect import find_all

    found = find_all(path)
    whole = [listed for listed in found if listed.fault is None]
    return (whole or found)[-1].path


def _kinds(summary: Summary) -> list[tuple[str, str]]:
    """How many tensors of which dtype there are below each first part of a name: model, optimizer, buffer."""
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for name, (dtype, _, _) in summary.tensors.items():
        counts[name.split("/")[0], dtype] += 1
    return [(f"  {kind}", f"{count} of {dtype}") for (kind, dtype), count in sorted(counts.items())]


def _local_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


# -- export and convert ------------------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    from phalanx.booster.export_saved import export_saved

    source, target = _last_whole(arguments.path), Path(arguments.target)
    with _live(f"checking {source.name}") as progress:
        files = export_saved(source, target, number=arguments.model or 0, progress=progress)
    return _tell_written(arguments, source, target, files)


def _convert(arguments: argparse.Namespace) -> int:
    from phalanx.checkpoint.convert import convert
    from phalanx.plan.file import parse_bytes

    source, target = _last_whole(arguments.path), Path(arguments.target)
    with _live(f"checking {source.name}") as progress:
        convert(source, target, parse_bytes(arguments.max_file or MAX_FILE), progress)
    return _tell_written(arguments, source, target, sorted(target.iterdir()))


def _tell_written(arguments: argparse.Namespace, source: Path, target: Path, files: list[Path]) -> int:
    num_bytes = sum(file.stat().st_size for file in files)
    if arguments.json:
        print_json({"ok": True, "source": str(source), "target": str(target), "num_files": len(files), "num_bytes": num_bytes})
    else:
        print_rows([("from", source), ("to", target), ("wrote", f"{len(files)} files, {show_bytes(num_bytes)}")])
    return DONE


# What each does, the function, and the arguments that it alone takes.
ACTIONS: dict[str, tuple[str, Callable[[argparse.Namespace], int], tuple[str, ...]]] = {
    "list": ("all in a folder, also unfinished ones", _list, ()),
    "check": ("read all of it and name what is damaged", _check, ()),
    "show": ("what one holds", _show, ("tensors",)),
    "export": ("its model as a directory of transformers", _export, ("target", "model")),
    "convert": ("the same checkpoint in other files", _convert, ("target", "max_file")),
}
