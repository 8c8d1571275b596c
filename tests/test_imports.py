"""The import rules of the project, checked on the syntax tree."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedapp import registry
from fedapp.method import is_one_of
from tests.house import (
    FILES,
    FLOOR,
    MODULES,
    PAGE,
    PICTURE,
    ROOT,
    filled,
    imported,
    imports,
    module,
    numbers,
    picture,
    room,
    shortest,
)  # fmt: skip

FLOWER = {
    "fedapp/client_app.py",
    "fedapp/server_app.py",
    "fedapp/transport/boundary.py",
    "fedapp/transport/delivery.py",
    "fedapp/transport/packing.py",
    "fedapp/transport/records.py",
    "fedapp/transport/channel.py",
    "fedapp/transport/cohort.py",
    "fedapp/transport/nodes.py",
    "fedapp/transport/validation.py",
    "fedapp/transport/virtual.py",
    "fedapp/transport/local_grid.py",
    "clients/_flower.py",
    "strategies/_flower.py",
}
"""Files that import Flower. A method's own file is not among them: its functions are mathematics."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    used = imports(path)
    if any(m == "flwr" or m.startswith("flwr.") for m in used):
        assert name in FLOWER or name.startswith(("fedapp/deployment/", "fedapp/engines/")), f"{name} imports flwr"
    if path == ROOT / "fedapp" / "__init__.py":
        return  # the front door: it hands out `run` and `RunResult` when they are asked for
    here = room(module(path))
    for other in {room(m) for m in used & MODULES} - {here, "fedapp"}:
        assert FLOOR[other] < FLOOR[here], f"{name} imports {other}, which does not lie below {here}"


ALLOWED = (
    "core", "errors", "lazy", "learning", "method", "models", "process", "reduce.spec", "sampling",
)  # fmt: skip
"""The rooms and files of the package that a method's two files may import; `clients/base.py` also reads settings."""
REFUSED = {f"fedapp.core.{name}" for name in ("masks", "noise", "privacy", "robust", "secret_shares", "secure_sum")}
POLICY = {
    "policy", "privacy", "reader", "robust", "secure", "releaser", "released", "screened",
    "pulls", "lost",
}  # fmt: skip
"""Names of what a run does against liars, for privacy and for sums."""
METHODS = [p for p in FILES if room(module(p)) in ("clients", "strategies") and p.name != "_flower.py"]


@pytest.mark.parametrize("path", METHODS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_method_is_mathematics_alone(path: Path) -> None:
    """The form of a reduction is the run's: a method's files neither import it nor ask for it."""
    base = path == ROOT / "clients" / "base.py"
    allowed = tuple(f"fedapp.{name}" for name in (*ALLOWED, *["settings"] * base))
    ours = {m for m in imports(path) & MODULES if m.startswith("fedapp.")}
    assert not {m for m in ours if not f"{m}.".startswith(tuple(f"{a}." for a in allowed))}
    assert not ours & REFUSED
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert base or not {n.attr for n in nodes if isinstance(n, ast.Attribute)} & POLICY
    assert "private" not in {n.arg for n in nodes if isinstance(n, ast.arg)}
    asked = {n.attr for node in nodes if isinstance(node, ast.If | ast.IfExp) for n in ast.walk(node.test)
             if isinstance(n, ast.Attribute)}  # fmt: skip
    assert base or "members" not in asked, "a method reads one reply and the sum of several alike"


ALIKE = [
    p for p in FILES if room(module(p)) in ("transport", "federation", "reduce") and not p.name.startswith("rules_")
]  # fmt: skip


@pytest.mark.parametrize("path", ALIKE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_method_is_named_where_all_are_treated_alike(path: Path) -> None:
    """By no id or title (but for `local`, a word of its own), and by no array or number that a method sends."""
    text, made = path.read_text(encoding="utf-8"), list(registry.discover().values())
    ids = {word.lower() for m in made for word in (m.id, m.title)} - {"local"}
    assert not ids & set(re.findall(r"\w+", text.lower()))
    sent = {name for m in made for name in (*m.extra_up, *m.metrics, *m.columns)} - {"labels", "counts"}
    found = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert not {text for text in found if is_one_of(text, sent)}


def test_the_rule_of_a_method_is_found_from_its_page() -> None:
    rules = {p.stem.removeprefix("rules_"): p.name for p in (ROOT / "fedapp" / "reduce").glob("rules_*.py")}
    assert rules.keys() == {"ccvr", "cwfedavg", "fedgh", "fedghg"}
    for method, name in rules.items():
        assert name in (ROOT / "docs" / "methods" / f"{method}.md").read_text(encoding="utf-8")


def test_only_the_command_line_imports_the_deployment() -> None:
    """The simulation must not depend on the internals of Flower that the server's gate and the node use."""
    users = {room(module(p)) for p in FILES if any(m.startswith("fedapp.deployment") for m in imports(p))}
    assert users == {"cli", "deployment"}


@pytest.mark.parametrize(
    "program",
    [
        "from fedapp.engines import gate",
        "importlib.import_module('fedapp.engines.gate')",
        "import_module('fedapp.engines.gate').serve()",
        "subprocess.run([sys.executable, '-m', 'fedapp.engines.gate'])",
        "spawn(sys.executable, '-m', 'fedapp.engines.gate')",
        "[sys.executable, '-P', '-c', 'from fedapp.engines.gate import serve; serve()', name]",
    ],
)
def test_an_import_is_found_in_every_form(program: str) -> None:
    assert "fedapp.engines.gate" in imported(program)


def test_every_configuration_has_a_type() -> None:
    """A function with `config: Any` depends on the configuration, and no import shows it."""
    folders = ("fedapp", "strategies", "clients", "reproduction", "benchmarks", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    given = [(path, node) for path, node in nodes if isinstance(node, ast.arg) and node.arg == "config"]
    assert given
    assert not [f"{p}:{n.lineno}" for p, n in given if n.annotation is not None and ast.unparse(n.annotation) == "Any"]


def test_every_room_has_a_floor_and_the_top_of_the_package_is_small() -> None:
    assert {room(m) for m in MODULES} - {"fedapp"} == set(FLOOR)
    assert len(list((ROOT / "fedapp").glob("*.py"))) <= 12


@pytest.mark.parametrize("path", [*FILES, *(ROOT / "benchmarks").glob("*.py")], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_long_file_says_why_it_is_long(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    why = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 600 or "The file is long because" in " ".join(why.split())


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python -m tests.house"


def test_the_page_names_every_room_and_counts_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page and numbers() in page, "run: python -m tests.house"
    described = page.split("## The rooms")[1].split("\n## ")[0]
    bold = " ".join(re.findall(r"\*\*(.+?)\*\*", described))
    assert not {name for name in FLOOR if f"`{name}`" not in bold}


def test_the_picture_leaves_out_what_a_longer_way_implies() -> None:
    graph = {"top": {"middle", "ground"}, "middle": {"ground"}, "ground": set[str](), "aside": {"ground"}}
    assert shortest(graph) == {"top": {"middle"}, "middle": {"ground"}, "ground": set(), "aside": {"ground"}}


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


@pytest.mark.full
def test_a_client_starts_without_what_only_results_need() -> None:
    """On a real node every message starts a process: half a second more of imports is half a second more a message."""
    program = (
        "import sys, fedapp.client_app; print(*{'pandas', 'scipy', 'sklearn', 'matplotlib', 'ray'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
