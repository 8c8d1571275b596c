"""What commands print. Text of files and clients reaches a terminal here alone, and here it becomes plain.

A class may be called anything. Escape sequences in its name would rule the terminal, and square brackets would be
rich's markup: its links, its colours, or an error.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from fedapp.errors import plain


def echo(text: object, err: bool = False, nl: bool = True) -> None:
    """Print a text as `plain` writes it."""
    typer.echo(plain(text, whole=True), err=err, nl=nl)


class Screen(Console):
    """A console for tables and lines: every text in them is plain and has no markup; a style needs a `Text`."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Make a text of what a table, a title or a line was given."""
        return super().render_str(plain(text, whole=True), **{**how, "markup": False, "emoji": False})
