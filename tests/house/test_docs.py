"""What the documents show, works: every code block is run, every command exists, every example runs at tiny size."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from rules import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("**/*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHOWN_ONLY = {"text"}  # output, drawings
COMMANDS_NOT_RUN = {"git", "cd", "pip", "torchrun", "srun"}  # exist everywhere or need a cluster

# What makes a command of the documents small enough for a test.
SMALLER = {
    "phalanx train": [
        "--overwrite --run.folder={tmp}/run --steps.total=3 --steps.evaluate_every=0 --batch.rows=4 --batch.tokens=32",
        "--text.held_out=0.002 --text.vocabulary=300 --sample.tokens=4 --model.config.hidden_size=32",
        "--model.config.intermediate_size=48 --model.config.num_hidden_layers=2",
    ]
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    path: Path
    line: int
    language: str
    text: str


def blocks_of(path: Path) -> list[Block]:
    blocks, language, begun, lines = [], None, 0, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.fullmatch(r"\s*```(\w*)\s*", line)
        if fence and language is None:
            language, begun, lines = fence[1], number, []
        elif fence:
            blocks.append(Block(path, begun, language, "\n".join(lines)))
            language = None
        elif language is not None:
            lines.append(line)
    return blocks


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]


def environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_every_block_says_what_it_is():
    unknown = [
        f"{block.path.name}:{block.line} {block.language!r}"
        for block in BLOCKS
        if block.language not in SHOWN_ONLY | {"python", "bash", "toml"}
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if any(block.language == "python" for block in blocks_of(path))], ids=lambda path: path.name
)
def test_python_blocks_run_one_after_the_other(path, tmp_path):
    program = tmp_path / "blocks.py"
    program.write_text("\n".join(block.text for block in blocks_of(path) if block.language == "python"), encoding="utf-8")
    run([sys.executable, str(program)], tmp_path)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: f"{block.path.name}:{block.line}"
)
def test_toml_blocks_are_toml(block):
    tomllib.loads(block.text)


def commands() -> list[tuple[str, str]]:
    """(place, command line) of every line of every bash block; comments go."""
    lines = []
    for block in BLOCKS:
        if block.language == "bash":
            for offset, line in enumerate(block.text.replace("\\\n", " ").splitlines(), 1):
                command = line.partition(" #")[0].strip()
                if command and not command.startswith("#"):
                    lines.append((f"{block.path.name}:{block.line + offset}", command))
    return lines


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(("place", "command"), commands(), ids=lambda text: text)
def test_commands_run(place, command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        assert set(words[1:]) <= make_targets(), f"{place}: no such target"
    elif words[0] == "phalanx":
        smaller = " ".join(SMALLER.get(" ".join(words[:2]), [])).format(tmp=tmp_path)
        run([*words, *smaller.split()], ROOT)
    else:
        assert words[0] in COMMANDS_NOT_RUN, f"{place}: {words[0]} is not known to this test"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_alone_and_on_two_processes(path, tmp_path):
    run([sys.executable, str(path)], tmp_path)
    run(["phalanx", "run", "-n", "2", str(path)], tmp_path)
