"""Count phrases that plain English avoids, in README.md, docs/ and printed messages: `python -m tools.phrases`.

The number may only fall: lower `MOST` when it has.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PHRASES = (
    "anew", "in place of", "as ever", "whoever", "of which the", "what is sent", "its own word", "stand on",
    "of no paper", "is none",
)  # fmt: skip
MOST = 0
PATTERN = re.compile(r"\b(?:" + "|".join(PHRASES).replace(" ", r"\s+") + r")\b", re.IGNORECASE)


def messages(code: str) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings."""
    tree = ast.parse(code)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body[:1] for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {id(first.value) for body in bodies for first in body if isinstance(first, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def found(root: Path) -> list[str]:
    """Return each place of a phrase: file and phrase."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    modules = sorted(p for name in ("fedapp", "strategies", "clients") for p in (root / name).rglob("*.py"))
    texts = [(p, re.sub(r"`[^`\n]*`", "", p.read_text(encoding="utf-8"))) for p in pages]  # text in backticks is code
    texts += [(p, text) for p in modules for text in messages(p.read_text(encoding="utf-8"))]
    return [f"{path.relative_to(root)}: {m[0]}" for path, text in texts for m in PATTERN.finditer(text)]


def main() -> int:
    """Print the places if there are more than before."""
    places = found(Path(__file__).parent.parent)
    if len(places) > MOST:
        sys.stdout.write("\n".join([*places, f"{len(places)} phrases, at most {MOST}", ""]))
    return int(len(places) > MOST)


if __name__ == "__main__":
    sys.exit(main())
