"""`phalanx run`: launches a script as several processes, each a rank, on this machine or on several."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.cli.output import print_json
from phalanx.errors import ConfigError

EXAMPLE = "phalanx run -n 2 examples/own_model.py --steps 5"
PORT = 29500  # where machine 0 of a host file is met unless --master says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--processes", type=int, default=1, help="how many processes on this machine (default: 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    parser.add_argument(
        "--debug", action="store_true", help="compare every collective between ranks before it runs, and name the call sites that differ"
    )
    parser.add_argument("--nodes", type=int, default=1, help="how many machines run this command together (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--master", metavar="HOST:PORT", help="where machine 0 is met; needed with several machines")
    parser.add_argument("--hostfile", metavar="FILE", help="a line `name slots=N` for each machine, instead of -n, --nodes and --master")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls phalanx.launch()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script gets as its own arguments")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.cluster.spawn import run_processes

    if arguments.processes < 1:
        raise ConfigError(f"-n is {arguments.processes}", allowed="1 or more", remedy="-n 1")
    if not arguments.module and not Path(arguments.script).is_file():
        raise ConfigError(f"there is no script {arguments.script}", remedy="-m for the name of a module")
    command = [sys.executable, *(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    if arguments.debug:
        command = ["env", "PHALANX_DEBUG=1", *command]
    begun = time.perf_counter()
    code = run_processes(command, **_machines(arguments))
    if arguments.json:
        print_json({"ok": code == 0, "exit_code": code, "seconds": round(time.perf_counter() - begun, 3)})
    return code


def _machines(arguments: argparse.Namespace) -> dict[str, Any]:
    """How many ranks run here, on how many machines, and where those meet."""
    places = {"num_nodes": arguments.nodes, "node_rank": arguments.node_rank, "master": arguments.master}
    if arguments.hostfile is None:
        return {"nproc": arguments.processes, **places}
    from phalanx.cluster.spawn import read_hostfile

    hosts = read_hostfile(arguments.hostfile)
    if not 0 <= arguments.node_rank < len(hosts):
        raise ConfigError(f"--node-rank is {arguments.node_rank}", allowed=f"0 to {len(hosts) - 1}, a line of {arguments.hostfile}")
    master = arguments.master or (f"{hosts[0].name}:{PORT}" if len(hosts) > 1 else None)
    return {"nproc": hosts[arguments.node_rank].slots, "num_nodes": len(hosts), "node_rank": arguments.node_rank, "master": master}
