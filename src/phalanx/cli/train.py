"""`phalanx train`: trains as a recipe says, on local processes that it starts itself or as a rank that an outer launcher started."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from phalanx.cli.output import FAILED, INTERRUPTED, STOPPED, print_json, print_rows

if TYPE_CHECKING:
    from phalanx.train.recipe import Recipe

EXAMPLE = "phalanx train recipes/demo.toml --plan zero3 -n 2 --steps.total=50 --run.folder=runs/short"
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file; any key in it is overridden by --section.key=value")
    parser.add_argument("--plan", help="the plan, instead of run.plan")
    parser.add_argument("-n", "--processes", type=int, help="local processes, instead of run.processes; 1 trains in this process")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the run's folder")
    parser.add_argument("--tensorboard", action="store_true", help="also leave the curves for TensorBoard in the run's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that the folder holds")


def execute(arguments: argparse.Namespace) -> int:
    from phalanx.train.recipe import load_recipe

    overrides = [*arguments.overrides]
    overrides += [f"run.plan={arguments.plan}"] if arguments.plan else []
    overrides += [f"run.processes={arguments.processes}"] if arguments.processes is not None else []
    recipe = load_recipe(arguments.recipe, overrides)
    return _train(arguments, recipe, overrides)


def _train(arguments: argparse.Namespace, recipe: Recipe, overrides: list[str]) -> int:
    from phalanx.cluster.launch import launch, shutdown
    from phalanx.plan import Plan
    from phalanx.train.folder import Folder
    from phalanx.train.model import build_config
    from phalanx.train.tensorboard import require_tensorboard
    from phalanx.train.text import read_corpus

    world = launch()
    size = world.size if world.size > 1 else recipe.run.processes
    # All that can be known to be wrong is said before any process starts.
    Plan.parse(recipe.run.plan).require(None, size)
    read_corpus(recipe)
    build_config(recipe.model, vocabulary=recipe.text.vocabulary, end_token=0)
    if arguments.tensorboard:
        require_tensorboard()
    if world.rank == 0:
        Folder(recipe.folder()).prepare(resume=arguments.resume, overwrite=arguments.overwrite)
    if size == 1 or world.size > 1:
        from phalanx.train.loop import train

        complete = train(recipe, resume=arguments.resume)
        shutdown()
        if not complete:
            return _failed(arguments, STOPPED)
    else:
        shutdown()
        code = _start_ranks(arguments, overrides, size)
        if code:
            return _failed(arguments, code)
    return _review(arguments, recipe) if world.rank == 0 else 0


def _start_ranks(arguments: argparse.Namespace, overrides: list[str], size: int) -> int:
    from phalanx.cluster.spawn import run_processes

    words = [sys.executable, "-m", "phalanx.train", arguments.recipe, *overrides]
    return run_processes([*words, "--resume"] if arguments.resume else words, size)


def _failed(arguments: argparse.Namespace, code: int) -> int:
    if arguments.json:
        print_json({"ok": False, "exit_code": code})
    return code if code in (INTERRUPTED, STOPPED) else FAILED


def _review(arguments: argparse.Namespace, recipe: Recipe) -> int:
    from phalanx.train.folder import Folder
    from phalanx.train.review import describe, review
    from phalanx.train.tensorboard import export_tensorboard

    summary: dict[str, Any] = review(recipe)
    folder = Folder(recipe.folder())
    if arguments.tensorboard:
        export_tensorboard(folder.events, folder.tensorboard)
    if arguments.json:
        print_json({"ok": True, **summary, "recipe": dataclasses.asdict(recipe)})
    else:
        print_rows(describe(summary, folder.root))
        print(f"\n{folder.sample.read_text(encoding='utf-8')}")
    return 0
