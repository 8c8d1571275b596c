"""How far a run is, in a notebook: one line with a bar below the cell, redrawn in place."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from rich.progress import TaskID


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Bar:
    """Takes the calls of `rich.progress.Progress` that followers of runs make; that one needs a widget library here."""

    def __init__(self) -> None:
        self.console = self
        self.shown: Any = None
        self.description, self.text = "", ""
        self.completed, self.total, self.before = 0, 0, 0
        self.started = time.monotonic()

    def start(self) -> None:
        """Draw nothing yet: there is nothing to count."""

    def stop(self) -> None:
        """Leave the line as it stands."""

    def print(self, text: str, **_: Any) -> None:
        """Print a line."""
        print(text)

    def add_task(self, description: str, *, total: int, completed: int = 0, text: str = "") -> TaskID:
        """Begin to count."""
        from IPython.display import display

        self.description, self.total = description, total
        self.completed = self.before = completed
        self.text, self.started = text, time.monotonic()
        self.shown = display(self, display_id=True)  # type: ignore[no-untyped-call]
        return TaskID(0)

    def update(self, task: TaskID, *, completed: int, text: str) -> None:
        """Draw anew."""
        self.completed, self.text = completed, text
        self.shown.update(self)

    def _left(self) -> str:
        done = self.completed - self.before
        if done < 1 or self.completed >= self.total:
            return ""
        return f", {(time.monotonic() - self.started) / done * (self.total - self.completed):.0f} s left"

    def __repr__(self) -> str:
        return f"{self.description} {self.completed}/{self.total} {self.text}{self._left()}".strip()

    def _repr_html_(self) -> str:
        words = html.escape(f"{self.completed}/{self.total} {self.text}{self._left()}")
        bar = f'<progress value="{self.completed}" max="{self.total}"></progress>'
        return f'<div style="font-family:monospace">{html.escape(self.description)} {bar} {words}</div>'
