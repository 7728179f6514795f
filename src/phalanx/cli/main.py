"""The `phalanx` command: finds the subcommand, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from phalanx.cli.output import DONE, FAILED, INTERRUPTED, WRONG_USE
from phalanx.errors import DamageError, PhalanxError

# Subcommand -> what it does. Each lives in the file of its name, with `EXAMPLE`, `add_arguments` and `execute`.
COMMANDS = {
    "run": "launch a script as several processes, each a rank",
    "train": "train a model as a recipe says",
    "verify": "compare a plan with one process, number by number",
    "anatomy": "show what of a model can be split over ranks, and what stays whole",
    "plan": "read a plan, list every conflict, predict its memory",
    "trace": "the pipeline of a run, from recorded times, beside the simulated one",
    "checkpoint": "look into a checkpoint, export or rewrite it, without a run",
    "doctor": "what this machine has, what is missing, and what that costs",
}

EXIT_CODES = "exit code: 0 done, 1 the work itself failed, 2 wrong use, 130 interrupted, 143 ended by SIGTERM"


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint about a misspelt choice offers the nearest one."""

    def error(self, message: str) -> None:  # type: ignore[override]
        _, _, choices = message.partition("invalid choice: ")
        if choices:
            word, _, allowed = choices.partition(" (choose from ")
            nearest = difflib.get_close_matches(word.strip("'"), [choice.strip(" ')") for choice in allowed.split(",")], n=1)
            message += f"; did you mean {nearest[0]!r}?" if nearest else ""
        self.exit(WRONG_USE, f"{self.prog}: error: {message}\nSee: {self.prog} --help\n")


def build_parser() -> Parser:
    """The parser of all commands; a command's own module is imported only when it is named or its help is asked for."""
    parser = Parser(
        prog="phalanx", description="Train and serve large models: ordinary PyTorch in, one plan, the same numbers.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"phalanx {version('phalanx')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = import_module(f"phalanx.cli.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {module.EXAMPLE}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout; progress stays on stderr")
        command.set_defaults(execute=module.execute, takes_overrides=getattr(module, "TAKES_OVERRIDES", False))
    return parser


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of one command; those of the form --a.b=c go into `overrides` where the command takes them."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(words)
    arguments.overrides = [
        word.removeprefix("--") for word in rest if arguments.takes_overrides and re.fullmatch(r"--[\w.]+=.*", word, re.DOTALL)
    ]
    if len(arguments.overrides) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = read_arguments(words)
    try:
        return arguments.execute(arguments)
    except PhalanxError as error:
        if arguments.json:
            print(
                json.dumps(
                    {
                        "ok": False,
                        "error": {"kind": type(error).__name__, "found": error.found, "allowed": error.allowed, "remedy": error.remedy},
                    }
                )
            )
        print(f"phalanx {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED if isinstance(error, DamageError) else WRONG_USE
    except BrokenPipeError:  # whoever read stdout has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print(f"phalanx {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
