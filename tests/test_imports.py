"""The import rules of the project, checked on the syntax tree."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOWER = {
    "fedapp/client_app.py",
    "fedapp/server_app.py",
    "fedapp/records.py",
    "fedapp/federation.py",
    "fedapp/localgrid.py",
    "fedapp/launch.py",
    "fedapp/deploy.py",
    "clients/base.py",
    "strategies/base.py",
}
TOP = ("fedapp.config", "fedapp.registry", "fedapp.results", "fedapp.cli", "fedapp.server_app", "fedapp.client_app")
FILES = [p for folder in ("fedapp", "clients", "strategies") for p in sorted((ROOT / folder).rglob("*.py"))]


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    used = imports(path)
    if any(m == "flwr" or m.startswith("flwr.") for m in used):
        assert name in FLOWER, f"{name} imports flwr: a method's own file is mathematics"
    ours = {m for m in used if m.split(".")[0] in ("fedapp", "clients", "strategies")}
    if name.startswith("clients/"):
        assert not any(m.startswith("strategies") for m in ours)
    if name.startswith(("clients/", "strategies/")):
        assert not any(m == t or m.startswith(t + ".") for m in ours for t in TOP)
    if name.startswith("fedapp/core/"):
        assert all(m.startswith("fedapp.core") for m in ours), f"{name} must stay pure: {ours}"
    if name == "fedapp/method.py":
        assert not ours
    if name.startswith(("fedapp/data/", "fedapp/models/")):
        assert not any(m.startswith(("clients", "strategies")) for m in ours)


def begin(path: Path) -> set[str]:
    """Our modules that a file names before its functions run, for type checking alone too."""
    modules = {module(p) for p in FILES}
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for inner in [node, *(node.body if isinstance(node, ast.If) else [])]:
            if isinstance(inner, ast.ImportFrom) and inner.module:
                names = {f"{inner.module}.{a.name}" for a in inner.names}
                found |= (names & modules) or {inner.module}
            elif isinstance(inner, ast.Import):
                found |= {a.name for a in inner.names}
    return (found & modules) - {module(path)}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_two_modules_need_each_other() -> None:
    """Names of types count: a type that two modules name belongs below both. The package's own front door does not."""
    graph = {module(p): begin(p) for p in FILES if p != ROOT / "fedapp" / "__init__.py"}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("fedapp.jobs") < order.index("fedapp.tables") < order.index("fedapp.compare")


def test_the_list_of_flower_files_is_current() -> None:
    assert all((ROOT / f).is_file() for f in FLOWER)
