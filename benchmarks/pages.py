"""Tables of Markdown, and the parts of a page between markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedapp.errors import BadRequest


def between(text: str, start: str, end: str) -> tuple[str, str, str] | None:
    """Return the text before, between and after two markers; None if `text` does not contain them in this order."""
    head, opened, rest = text.partition(start)
    body, closed, tail = rest.partition(end)
    return (head, body, tail) if opened and closed else None


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a page with a table between its markers.

    Raises
    ------
    BadRequest : the page lacks them.
    """
    start, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    parts = between(text, start, end)
    if parts is None:
        raise BadRequest(f"the page lacks the markers {start} and {end}: take it from the repository")
    return "\n".join([parts[0] + start, *lines, end + parts[2]])


def markdown(heads: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; a column whose head ends in a colon is aligned to the right."""
    columns = heads.split("|")
    line = "|" + "|".join("---:" if c.endswith(":") else "---" for c in columns) + "|"
    cells = [[c.removesuffix(":") for c in columns], *rows]
    first, *others = ["|" + "".join(f" {c} |" if c != "" else " |" for c in row) for row in cells]
    return [first, line, *others]
