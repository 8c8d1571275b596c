"""The rooms of the project, the imports between them, and the picture of both in docs/architecture.svg.

`python -m tests.house` draws the picture and counts the rooms on the page; `tests/test_imports.py` holds the order and
checks that both are current.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = PICTURE.with_suffix(".md")
ROOMS = [
    ("errors", "lazy", "method"),
    ("files", "process", "settings"),
    ("core", "plugins", "sampling"),
    ("data", "models", "reduce"),
    ("bodies", "learning"),
    ("transport",),
    ("clients",),
    ("privacy", "strategies"),
    ("registry",),
    ("config",),
    ("tasks",),
    ("results",),
    ("federation", "client_steps", "tracking"),
    ("client_app", "server_app"),
    ("engines",),
    ("deployment", "experiments"),
    ("cli",),
]
"""The rooms from the ground up: a room imports from the floors below it alone."""
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
FILES = [p for folder in ("fedapp", "clients", "strategies") for p in sorted((ROOT / folder).rglob("*.py"))]


def module(path: Path) -> str:
    """Dotted name of a file of the project."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(p) for p in FILES}


def room(name: str) -> str:
    """The room of a module: a package below `fedapp`, a module at its top, `clients` or `strategies`."""
    first, *rest = name.split(".")
    return rest[0] if first == "fedapp" and rest else first


def imports(path: Path) -> set[str]:
    """All modules that a file imports, wherever it does so."""
    return imported(path.read_text(encoding="utf-8"))


def imported(program: str) -> set[str]:
    """All modules that a program imports: by statement, as text for `import_module`, and after `-m` and `-c`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found.update(texts(node.args[:1]))
        if isinstance(node, (ast.List, ast.Tuple, ast.Call)):
            words = node.args if isinstance(node, ast.Call) else node.elts
            for option, word in itertools.pairwise(words):
                if texts([option]) == ["-m"]:
                    found.update(texts([word]))
                elif texts([option]) == ["-c"]:
                    found.update(*map(imported, texts([word])))
    return found


def texts(nodes: Sequence[ast.expr]) -> list[str]:
    """The texts among expressions."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def arrows() -> dict[str, set[str]]:
    """Rooms that each room imports. The package's own front door belongs to no room."""
    found: dict[str, set[str]] = {room: set() for room in FLOOR}
    for path in FILES:
        if module(path) != "fedapp":
            found[room(module(path))] |= {room(m) for m in imports(path) & MODULES} - {room(module(path)), "fedapp"}
    return found


def shortest(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out every arrow that a longer way of arrows implies, so that the picture can be read."""
    below: dict[str, set[str]] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        below[name] = set().union(*(below[n] | {n} for n in graph[name]))
    return {name: {n for n in to if not any(n in below[other] for other in to)} for name, to in graph.items()}


def purpose(name: str) -> str:
    """First line of a room's docstring."""
    inside = ROOT / name if (ROOT / name).is_dir() else ROOT / "fedapp" / name
    file = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("`", "")


def picture() -> str:
    """Return the SVG: a floor a row, the top floor first, with an arrow from each room to those it builds on."""
    row, left, wide, gap = 54, 210, 128, 12
    place: dict[str, tuple[int, int]] = {}
    shapes: list[str] = []
    for level, rooms in enumerate(reversed(ROOMS)):
        y = 20 + level * row
        for i, name in enumerate(rooms):
            x = left + i * (wide + gap)
            place[name] = (x, y)
            shapes.append(f'<rect x="{x}" y="{y}" width="{wide}" height="30" rx="4"/>')
            shapes.append(f'<text x="{x + wide / 2:g}" y="{y + 20}" class="room">{name}</text>')
        for i, name in enumerate(rooms):
            words = purpose(name) if len(rooms) == 1 else f"{name}: {purpose(name)}"
            words = words if len(words) < 105 else words[:102].rsplit(" ", 1)[0] + " ..."
            at = y + 20 if len(rooms) == 1 else y + 3 + 14 * i + 7 * (len(rooms) == 2)
            shapes.append(f'<text x="{left + 3 * (wide + gap) + 10}" y="{at}">{escape(words)}</text>')
    for name, to in shortest(arrows()).items():
        x, y = place[name]
        for other in sorted(to):
            a, b = place[other]
            if FLOOR[name] - FLOOR[other] == 1:
                line = f"M{x + wide / 2:g} {y + 30}L{a + wide / 2:g} {b}"
            else:  # past the floors between, on the left
                bow = left - 14 * (FLOOR[name] - FLOOR[other])
                line = f"M{x} {y + 15}C{bow} {y + 15} {bow} {b + 15} {a} {b + 15}"
                if a != left:
                    line = f"M{x} {y + 15}C{bow} {y + 15} {bow} {b - 14} {a + wide / 2:g} {b}"
            shapes.append(f'<path d="{line}" marker-end="url(#tip)"/>')
    high = 20 + len(ROOMS) * row
    style = (
        "rect{fill:#eef3f8;stroke:#34557a}text{font:12px sans-serif;fill:#222}"
        ".room{font-weight:bold;text-anchor:middle}"
        "path{fill:none;stroke:#34557a;stroke-opacity:.6}"
    )
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<polygon points="0,0 8,4 0,8" fill="#34557a"/></marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1300 {high}" font-family="sans-serif">'
    ground = f'<rect width="1300" height="{high}" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{style}</style>", f"<defs>{tip}</defs>", ground, *shapes, "</svg>", ""])


def numbers() -> str:
    """Return the sentence of docs/architecture.md about the number of rooms, floors and imports."""
    packages = sum((ROOT / "fedapp" / name).is_dir() for name in FLOOR)
    modules = len(FLOOR) - packages - 2
    return (
        f"Today {modules} modules and {packages} packages, with `clients` and `strategies` {len(FLOOR)} rooms, lie "
        f"on {len(ROOMS)} floors, with {sum(map(len, arrows().values()))} imports between rooms.\n"
    )


def filled(page: str) -> str:
    """Return docs/architecture.md with that sentence in its place."""
    return re.sub(r"(?<=<!-- generated -->\n)Today .*\n", lambda found: numbers(), page)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
