"""The house stands as drawn: floors, circles, the outside world, names and sizes. Each check is also shown to fail."""

import ast
import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from rules import (
    FILE_LINES,
    FLOORS,
    FORBIDDEN_WORDS,
    FUNCTION_LINES,
    OUTSIDE,
    ROOT,
    Module,
    imports,
    read_tree,
    uses,
    words,
)

FOLDERS_WITH_CODE = ("src", "tests", "bench", "examples")


def unknown_units(modules: list[Module]) -> list[str]:
    return sorted({module.unit for module in modules} - set(FLOORS))


def floor_faults(modules: list[Module]) -> list[str]:
    """Imports that go up or sideways."""
    faults = []
    for module in modules:
        for line, name in imports(module):
            package, _, rest = name.partition(".")
            if package != "phalanx":
                continue
            unit = rest.split(".")[0]
            unit = unit if unit in FLOORS else "__init__"
            if unit != module.unit and FLOORS[unit] >= FLOORS[module.unit]:
                faults.append(f"{module.path}:{line} imports {name} (floor {FLOORS[unit]} from floor {FLOORS[module.unit]})")
    return faults


def outside_faults(modules: list[Module]) -> list[str]:
    """Uses of torch.distributed, transformers or environment variables where they do not belong."""
    faults = set()
    for module in modules:
        for line, name in [*imports(module), *uses(module)]:
            for outside, places in OUTSIDE.items():
                named = name == outside or name.startswith(outside + ".")
                if named and module.unit not in places and module.path.as_posix() not in places:
                    faults.add(f"{module.path}:{line} uses {outside}")
    return sorted(faults)


def circles(modules: list[Module]) -> list[str]:
    """One line for each ring of modules that import each other, inside functions too; a name for a type checker is no import."""
    names = {module.name for module in modules}
    graph = {
        module.name: {target for _, name in imports(module, for_types=False) if (target := _nearest(name, names)) != module.name}
        for module in modules
    }
    for targets in graph.values():
        targets.discard("")
        targets.discard("phalanx")
    found, finished = [], set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in finished:
            for target in sorted(graph[name]):
                visit(target, [*trail, name])
            finished.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def _nearest(name: str, names: set[str]) -> str:
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def name_faults(files: dict[Path, ast.Module]) -> list[str]:
    """Files, classes and functions whose name has an empty word in it."""
    faults = []
    for path, tree in files.items():
        defined = [(0, path.stem)]
        defined += [
            (node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        faults += [f"{path}:{line} {name}" for line, name in defined if words(name) & FORBIDDEN_WORDS]
    return faults


def sizes(files: dict[Path, ast.Module]) -> list[tuple[str, int, tuple[int, int]]]:
    """(what, lines, limits) of every file and every function."""
    found = []
    for path, tree in files.items():
        found.append((str(path), max((node.end_lineno or 0 for node in tree.body), default=0), FILE_LINES))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [(f"{path}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1, FUNCTION_LINES) for node in functions]
    return found


def declared_dependencies() -> set[str]:
    """The names of all packages that pyproject.toml asks for, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {re.match(r"[\w-]+", line)[0] for line in lines}


def undeclared(modules: list[Module], declared: set[str]) -> list[str]:
    """Imports of packages that are neither ours, nor Python's, nor declared."""
    known = declared | sys.stdlib_module_names | {"phalanx"}
    return [
        f"{module.path}:{line} imports {name}" for module in modules for line, name in imports(module) if name.split(".")[0] not in known
    ]


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read_tree()


@pytest.fixture(scope="module")
def files() -> dict[Path, ast.Module]:
    found = {}
    for folder in FOLDERS_WITH_CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            found[file.relative_to(ROOT)] = ast.parse(file.read_text(encoding="utf-8"))
    return found


def test_every_unit_has_a_floor(modules):
    assert unknown_units(modules) == []


def test_imports_only_go_down(modules):
    assert floor_faults(modules) == []


def test_no_circles(modules):
    assert circles(modules) == []


def test_the_outside_world_enters_by_its_doors(modules):
    assert outside_faults(modules) == []


def test_what_is_imported_is_declared(modules):
    assert undeclared(modules, declared_dependencies()) == []


def test_every_dependency_has_its_reason_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert [name for name in sorted(declared_dependencies()) if f"`{name}`" not in text] == []


def test_every_folder_has_its_floor_in_the_architecture(modules):
    text = (ROOT / "docs" / "architecture.md").read_text()
    units = {module.unit for module in modules} - {"__init__"}
    assert [unit for unit in sorted(units) if f"`{unit}/`" not in text and f"`{unit}.py`" not in text] == []


def test_names_say_something(files):
    assert name_faults(files) == []


def test_files_and_functions_stay_small(files):
    large = [f"{what}: {lines} lines" for what, lines, (smell, _) in sizes(files) if lines > smell]
    if large:
        warnings.warn("large, worth splitting: " + "; ".join(large), stacklevel=1)
    assert [f"{what}: {lines} lines" for what, lines, (_, limit) in sizes(files) if lines > limit] == []


# -- each check can fail ----------------------------------------------------------------------------------------------------------


def house(tmp_path: Path, **texts: str) -> list[Module]:
    """A small package; `cluster__mesh="import os"` makes phalanx/cluster/mesh.py."""
    source = tmp_path / "phalanx"
    for name, text in texts.items():
        file = source / (name.replace("__", "/", 1) + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_tree(source)


@pytest.mark.parametrize(
    "text",
    [
        "from phalanx.booster import Booster",
        "import phalanx.memory.engine",
        "def late():\n    from phalanx import booster",
        "from ..booster import core",
        "from importlib import import_module\nimport_module('phalanx.booster')",
        "import phalanx",
    ],
)
def test_an_import_upwards_or_sideways_is_found(tmp_path, text):
    assert len(floor_faults(house(tmp_path, parallel__tensor=text))) == 1


def test_an_import_downwards_is_fine(tmp_path):
    assert (
        floor_faults(
            house(tmp_path, parallel__tensor="from ..cluster import mesh\nfrom .other import x\nfrom phalanx.errors import PlanError")
        )
        == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "import torch\ntorch.distributed.barrier()",
        "from os import environ",
        "import os\nos.getenv('RANK')",
    ],
)
def test_a_door_in_the_wrong_wall_is_found(tmp_path, text):
    assert len(outside_faults(house(tmp_path, memory__engine=text))) == 1
    assert outside_faults(house(tmp_path / "again", cluster__launch=text)) == []


def test_an_undeclared_import_is_found(tmp_path):
    assert undeclared(house(tmp_path, memory__engine="import json, numpy\nimport requests.sessions"), {"numpy"}) == [
        "memory/engine.py:2 imports requests.sessions"
    ]


def test_a_circle_is_found(tmp_path):
    modules = house(
        tmp_path,
        memory__a="from phalanx.memory import b",
        memory__b="def late():\n    from .c import x",
        memory__c="import phalanx.memory.a",
    )
    assert circles(modules) == ["phalanx.memory.a -> phalanx.memory.b -> phalanx.memory.c -> phalanx.memory.a"]


def test_a_name_for_the_type_checker_makes_no_circle(tmp_path):
    modules = house(tmp_path, memory__a="from phalanx.memory import b", memory__b="if TYPE_CHECKING:\n    from phalanx.memory import a")
    assert circles(modules) == []


def test_an_empty_name_is_found():
    tree = ast.parse("class ChunkManager: ...\ndef rebase(): ...\ndef base_path(): ...\nclass HTTPHelper: ...")
    assert name_faults({Path("utils.py"): tree}) == [
        "utils.py:0 utils",
        "utils.py:1 ChunkManager",
        "utils.py:3 base_path",
        "utils.py:4 HTTPHelper",
    ]


def test_a_long_function_is_measured():
    tree = ast.parse("def long():\n" + "    pass\n" * 101)
    assert [lines for _, lines, _ in sizes({Path("a.py"): tree})] == [102, 102]
