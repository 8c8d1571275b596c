"""How commands print: tables that fit the terminal, lines with tabs elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fedapp.errors import is_number, plain
from fedapp.results.terminal import Screen, echo, is_screen


def on_terminal() -> bool:
    """Return whether a person reads the output."""
    return is_screen(sys.stdout)


def tell_broken() -> None:
    """Name the files of `strategies/` that define no valid method; the others work without them."""
    from fedapp import registry

    for text in registry.broken().values():
        echo(f"fedapp: left out: {text}", err=True)


def _piped(row: Sequence[str | Text]) -> str:
    """Join the cells of a row with tabs; a tab or an end of line within a cell becomes an escape."""
    return "\t".join(str(cell).replace("\t", "\\t").replace("\n", "\\n") for cell in row).rstrip()


def show(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    piped: Iterable[Sequence[str]] = (),
    below: str = "",
) -> None:
    """Print rows as a table on a terminal; elsewhere print them (or `piped`) with tabs between the cells.

    Parameters
    ----------
    title, below : lines above and below the table, as wide as the terminal.
    """
    if not on_terminal():
        for row in piped or rows:
            echo(_piped(row))
        return
    columns = [
        Column(
            head, overflow="fold", no_wrap=not i, justify="right" if all(is_number(str(r[i])) for r in rows) else "left"
        )
        for i, head in enumerate(heads)
    ]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Screen(highlight=False)
    console.print(*filter(None, [title, table, below]), sep="\n")


def entries(rows: Sequence[Sequence[str]], below: Callable[[Sequence[str]], tuple[str, str]]) -> None:
    """Print things that have a name and sentences, one below the other; elsewhere than on a terminal a line each.

    Parameters
    ----------
    rows : cells, the name first; printed with tabs.
    below : what a row says under its name: a sentence, and facts that are set off from it.
    """
    if not on_terminal():
        for row in rows:
            echo(_piped(row))
        return
    console = Screen(highlight=False)
    for row in rows:
        sentence, facts = below(row)
        console.print(Text(plain(row[0]), style="bold"), Text(plain(facts), style="dim"))
        console.print(Padding(sentence, (0, 0, 0, 4)))


def kind(schema: Mapping[str, Any], code: Callable[[object], str] = str) -> str:
    """Describe the values that a JSON schema allows.

    Parameters
    ----------
    code : how a value that can be given as it stands is written.
    """
    if "anyOf" in schema:  # the named values first
        parts = sorted(schema["anyOf"], key=lambda part: "const" not in part and "enum" not in part)
        return ", or ".join(kind(part, code) for part in parts)
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return ", ".join(map(code, schema["enum"]))
    words = {"string": "text", "integer": "whole number", "number": "number", "null": "empty"}
    words["boolean"] = f"{code('true')}, {code('false')}"
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if schema["type"] == "integer":  # below 2**31 is at most 2**31 - 1
        low = low if above is None else above + 1
        high = high if below is None else below - 1
        above = below = None
    limits = {"at least": low, "above": above, "at most": high, "below": below}
    limited = " and ".join(f"{word} {number(value)}" for word, value in limits.items() if value is not None)
    return ", ".join(filter(None, [words[schema["type"]], limited]))


def number(value: float) -> str:
    """Format a number without insignificant digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"
