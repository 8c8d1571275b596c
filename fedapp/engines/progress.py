"""How far runs are: lines on standard error, and below them a bar on a terminal or in a notebook."""

from __future__ import annotations

import html
import sys
from typing import Any, Self

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column

from fedapp.results.terminal import Screen, end_announcement

WITH_BAR = 100
"""Columns of a terminal from which on a line of progress has a bar."""


class Display:
    """Lines on standard error; inside a `with` block also a bar, where there is a terminal or a notebook.

    Parameters
    ----------
    columns : further ones of a terminal's line, between the bar and the text.
    """

    def __init__(self, *columns: ProgressColumn) -> None:
        self.console = Screen(stderr=True, highlight=False)
        self.columns = columns
        self.bar: Progress | Bar | None = None
        self.task: TaskID | None = None

    def __enter__(self) -> Self:
        if in_notebook() and not self.console.quiet:
            self.bar = Bar()
        elif self.console.is_terminal:
            bar = [BarColumn()] if self.console.width >= WITH_BAR else []  # in a narrow terminal the numbers matter
            text = TextColumn("{task.fields[text]}", table_column=Column())  # its words go on below
            self.bar = Progress(TextColumn("{task.description}"), *bar, *self.columns, text, console=self.console)
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.bar, Progress):
            self.bar.stop()

    def count(self, description: str, total: int, completed: int = 0) -> None:
        """Begin to count, where there is a bar."""
        if self.bar is not None:
            end_announcement()
            if isinstance(self.bar, Progress):
                self.bar.start()
            self.task = self.bar.add_task(description, total=total, completed=completed, text="")

    def line(self, text: str, must: bool = False) -> None:
        """Print a line above the bar; `must` is that of :func:`fedapp.results.terminal.echo`."""
        if isinstance(self.bar, Bar):
            print(text)
        else:
            self.console.print_line(text, must)


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Bar:
    """One line below a notebook's cell, redrawn in place. `rich.progress.Progress` needs a widget library there."""

    def add_task(self, description: str, *, total: int, completed: int = 0, text: str = "") -> TaskID:
        """Begin to count."""
        from IPython.display import display

        self.description, self.total, self.completed, self.text = description, total, completed, text
        self.shown: Any = display(self, display_id=True)  # type: ignore[no-untyped-call]
        return TaskID(0)

    def update(self, task: TaskID, *, completed: int, text: str) -> None:
        """Draw the line again."""
        self.completed, self.text = completed, text
        self.shown.update(self)

    def __repr__(self) -> str:
        return f"{self.description} {self.completed}/{self.total} {self.text}".strip()

    def _repr_html_(self) -> str:
        words = html.escape(f"{self.completed}/{self.total} {self.text}")
        bar = f'<progress value="{self.completed}" max="{self.total}"></progress>'
        return f'<div style="font-family:monospace">{html.escape(self.description)} {bar} {words}</div>'
