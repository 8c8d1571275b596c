"""The import rules of the project, checked on the syntax tree."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = [
    ("errors", "method", "process"),
    ("core", "sampling"),
    ("data", "models"),
    ("learning",),
    ("transport",),
    ("clients",),
    ("strategies",),
    ("registry",),
    ("config",),
    ("tasks",),
    ("results",),
    ("client_app", "server_app"),
    ("engines",),
    ("experiments",),
    ("cli",),
]
"""The rooms of the house from the ground up: a room imports from the floors below it alone."""
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
FLOWER = {
    "fedapp/client_app.py",
    "fedapp/server_app.py",
    "fedapp/transport/records.py",
    "fedapp/transport/client_manager.py",
    "fedapp/transport/local_grid.py",
    "fedapp/engines/control.py",
    "fedapp/engines/deploy.py",
    "clients/base.py",
    "strategies/_flower.py",
}
FILES = [p for folder in ("fedapp", "clients", "strategies") for p in sorted((ROOT / folder).rglob("*.py"))]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(p) for p in FILES}


def imports(path: Path) -> set[str]:
    """All modules that a file imports, wherever it does so, except for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{a.name}" for a in node.names)
    return found


def room(name: str) -> str:
    """The room of a module: a package below `fedapp`, a module at its top, `clients` or `strategies`."""
    first, *rest = name.split(".")
    return rest[0] if first == "fedapp" and rest else first


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    used = imports(path)
    if any(m == "flwr" or m.startswith("flwr.") for m in used):
        assert name in FLOWER, f"{name} imports flwr: a method's own file is mathematics"
    if path == ROOT / "fedapp" / "__init__.py":
        return  # the front door: it hands out `run` and `RunResult` when they are asked for
    here = room(module(path))
    for other in {room(m) for m in used if m in MODULES} - {here, "fedapp"}:
        assert FLOOR[other] < FLOOR[here], f"{name} imports {other}, which does not lie below {here}"


def test_every_room_has_a_floor_and_the_top_of_the_package_is_small() -> None:
    assert {room(m) for m in MODULES} - {"fedapp"} == set(FLOOR)
    assert len(list((ROOT / "fedapp").glob("*.py"))) <= 12


def begin(path: Path) -> set[str]:
    """Our modules that a file names before its functions run, for type checking alone too."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for inner in [node, *(node.body if isinstance(node, ast.If) else [])]:
            if isinstance(inner, ast.ImportFrom) and inner.module:
                names = {f"{inner.module}.{a.name}" for a in inner.names}
                found |= (names & MODULES) or {inner.module}
            elif isinstance(inner, ast.Import):
                found |= {a.name for a in inner.names}
    return (found & MODULES) - {module(path)}


def test_no_two_modules_need_each_other() -> None:
    """Names of types count: a type that two modules name belongs below both. The package's own front door does not."""
    graph = {module(p): begin(p) for p in FILES if p != ROOT / "fedapp" / "__init__.py"}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_list_of_flower_files_is_current() -> None:
    assert all((ROOT / f).is_file() for f in FLOWER)
