"""`phalanx run`: launches a script as several processes of this machine, each a rank."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from phalanx.cli.output import print_json
from phalanx.errors import ConfigError

EXAMPLE = "phalanx run -n 2 examples/own_model.py --steps 5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--processes", type=int, default=1, help="how many processes (default: 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls phalanx.launch()")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script gets as its own arguments")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.cluster.launch import spawn

    if arguments.processes < 1:
        raise ConfigError(f"-n is {arguments.processes}", allowed="1 or more", remedy="-n 1")
    if not arguments.module and not Path(arguments.script).is_file():
        raise ConfigError(f"there is no script {arguments.script}", remedy="-m for the name of a module")
    script = ["-m", arguments.script] if arguments.module else [arguments.script]
    begun = time.perf_counter()
    code = spawn([sys.executable, *script, *arguments.arguments], arguments.processes)
    if arguments.json:
        print_json({"ok": code == 0, "exit_code": code, "processes": arguments.processes, "seconds": round(time.perf_counter() - begun, 3)})
    return code
