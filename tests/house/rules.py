"""The rules of the house, all in one place, and the reading of source files that the tests of them share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"

# A unit is a folder of src/phalanx or a file beside them. A file imports from its own unit and from lower floors only.
FLOORS = {
    "errors": -1,  # below all
    "log": 0,
    "layout": 0,
    "cluster": 1,
    "plan": 2,
    "anatomy": 2,
    "kernels": 2,
    "precision": 2,
    "materialize": 2,
    "parallel": 3,
    "memory": 3,
    "optim": 3,
    "checkpoint": 4,
    "data": 4,
    "planner": 4,
    "booster": 5,
    "train": 6,
    "inference": 6,
    "verify": 6,
    "apps": 7,
    "playground": 7,
    "cli": 7,
    "testing": 8,  # re-exports for tests; nothing in src imports it
    "__init__": 9,  # the face
}

# What of the outside world may be named where: dotted name -> units or files (relative to src/phalanx) that may use it.
OUTSIDE = {
    "torch.distributed": ("cluster", "memory/fsdp.py"),
    "transformers": ("anatomy", *(unit for unit, floor in FLOORS.items() if floor >= 5)),
    "os.environ": ("cluster/launch.py",),
    "os.getenv": ("cluster/launch.py",),
    "os.putenv": ("cluster/launch.py",),
}

# A name with one of these words says nothing about what the thing does.
FORBIDDEN_WORDS = {"manager", "helper", "helpers", "util", "utils", "base", "impl", "mixin"}

FILE_LINES = (500, 700)  # smell, failure
FUNCTION_LINES = (60, 100)


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its path below the root of the package, and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        return self.path.parts[0] if len(self.path.parts) > 1 else self.path.stem


def read_tree(source: Path = SOURCE) -> list[Module]:
    """All modules of the package below `source`, whose folder is named as the package."""
    modules = []
    for file in sorted(source.rglob("*.py")):
        path = file.relative_to(source)
        parts = [source.name, *path.with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text(encoding="utf-8")
        modules.append(Module(name, path, text, ast.parse(text)))
    return modules


def imports(module: Module, *, for_types: bool = True) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of everything a file imports, wherever in the file; `from a import b` counts as a.b.

    With `for_types` false, what only a type checker sees (below `if TYPE_CHECKING:`) is left out.
    """
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in _walk(module.tree, for_types):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                outer = package.rsplit(".", node.level - 1)[0]
                origin = f"{outer}.{origin}" if origin else outer
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
            yield from ((node.lineno, argument.value) for argument in node.args[:1] if _is_text(argument))


def uses(module: Module) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of every attribute chain of plain names, such as `torch.distributed.is_nccl_available`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield node.lineno, ".".join([inner.id, *reversed(parts)])


def words(name: str) -> set[str]:
    """The lower-case words of a CamelCase or snake_case name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def _walk(tree: ast.AST, for_types: bool) -> Iterator[ast.AST]:
    """Every node of a tree, with or without what stands below `if TYPE_CHECKING:`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        if not for_types and isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            children = iter(node.orelse)
        waiting.extend(children)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
