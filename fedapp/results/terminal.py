"""What commands print. Text of files and clients reaches a terminal here alone, and here it becomes plain.

A class may be called anything. Escape sequences in its name would rule the terminal, and square brackets would be
rich's markup: its links, its colours, or an error.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedapp.errors import plain

EDGES = 3
"""Columns of a terminal that the edge and the padding of a table's column take."""
_silent = False
_waiting: list[Any] = []
"""The spinner that a terminal shows now, if any."""


def is_screen(stream: TextIO | None) -> bool:
    """Return whether a person sees what a stream gets; a program whose stream is closed has None."""
    return stream is not None and stream.isatty()


def announce(work: str) -> None:
    """Name a work that takes seconds: in a line, on a terminal with the seconds so far until the next text."""
    end_announcement()
    if _silent or not is_screen(sys.stderr):
        echo(work, err=True)
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.elapsed:.0f} s")
    spinner = Progress(*columns, console=Screen(stderr=True), transient=True)
    spinner.add_task(work, total=None)
    spinner.start()
    _waiting.append(spinner)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function of how many are done and how many there are; a terminal shows a bar and how many a second."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
    shown = not _silent and is_screen(sys.stderr)
    with Progress(*columns, console=Screen(stderr=True), transient=True, disable=not shown) as bar:
        task, first = bar.add_task(what, speed=""), time.perf_counter()
        begun: list[int] = []

        def progress(done: int, total: int) -> None:
            begun.append(done)
            speed = (done - begun[0]) / max(1e-9, time.perf_counter() - first)
            bar.update(task, completed=done, total=total, speed=f"{speed:.0f} a second")
            if not shown and len(begun) == 1:
                echo(f"{total} {what}" + (f", {done} of them from before" if done else ""), err=True)

        yield progress


def end_announcement() -> None:
    """Remove the spinner from the terminal."""
    while _waiting:
        _waiting.pop().stop()


atexit.register(end_announcement)  # else the cursor stays hidden


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Print nothing inside the block but what must be said, if that is wanted."""
    global _silent
    before, _silent = _silent, wanted or _silent
    try:
        yield
    finally:
        _silent = before


def echo(text: object, err: bool = False, nl: bool = True, must: bool = False) -> None:
    """Print a text as `plain` writes it; messages on a terminal break between words.

    Nothing is printed where the reader of a pipe has gone, or where a stream cannot be written.

    Parameters
    ----------
    must : print it in a block that is :func:`quiet` too.
    """
    if _silent and not must:
        return
    end_announcement()
    shown = plain(text, whole=True)
    if err and is_screen(sys.stderr):
        shown = "\n".join(_broken(line, shutil.get_terminal_size().columns) for line in shown.split("\n"))
    try:
        typer.echo(shown, err=err, nl=nl)
    except OSError as e:
        _silence(e, err)


def _broken(line: str, width: int) -> str:
    """Break a line between words where it is wider than the terminal; a longer word, such as a path, stays whole."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip(" ")))
    lines = textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(lines)


def print_anything() -> None:
    """Let every text be printed: a character that the terminal's encoding lacks becomes a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _silence(error: OSError, err: bool) -> None:
    """Let a stream lead nowhere, so that a command whose reader has gone, such as `head`, still does its work."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), (sys.stderr if err else sys.stdout).fileno())
    if not err and not isinstance(error, BrokenPipeError):
        echo(f"the output cannot be written ({error.strerror})", err=True, must=True)


class Screen(Console):
    """A console for tables and lines: every text in them is plain and has no markup; a style needs a `Text`."""

    def __init__(self, **how: Any) -> None:
        super().__init__(quiet=_silent, **how)

    def print_line(self, text: str, must: bool = False) -> None:
        """Print a line: broken between words on a terminal, elsewhere whole. `must` is that of :func:`echo`."""
        end_announcement()
        if must and self.quiet:
            echo(text, err=self.stderr, must=True)
        else:
            self.print(text, soft_wrap=not self.is_terminal)

    def on_broken_pipe(self) -> None:
        """Go on without printing."""
        _silence(BrokenPipeError(), self.stderr)

    def print(self, *objects: Any, **how: Any) -> None:
        """Print; go on without it where the stream cannot be written."""
        try:
            super().print(*objects, **how)
        except OSError as e:
            _silence(e, self.stderr)

    def render_str(self, text: str, **how: Any) -> Text:
        """Make a text of what a table, a title or a line was given."""
        return super().render_str(plain(text, whole=True), **{**how, "markup": False, "emoji": False})


def print_fitting(
    console: Screen, names: Sequence[str], columns: Mapping[str, Sequence[str]], first: str = "method"
) -> None:
    """Print named rows of numbers: several tables where one would be wider than the screen.

    Rich would cut the numbers of a table that is too wide.
    """
    width = min(max(map(len, (first, *names))), console.width // 2)
    room = console.width - 1 - width - EDGES
    widths = {h: min(room - EDGES, max(map(len, (*h.split(), *cells)))) for h, cells in columns.items()}
    left = list(columns)
    while left:
        taken = itertools.accumulate(widths[head] + EDGES for head in left)
        count = max(1, sum(width <= room for width in taken))
        here, left = left[:count], left[count:]
        shown = Table(Column(first, width=width, overflow="fold"))
        spare = room - sum(widths[head] + EDGES for head in here)
        for head in here:
            wider = max(0, min(len(head) - widths[head], spare))
            spare -= wider
            shown.add_column(head, justify="right", width=widths[head] + wider, overflow="fold")
        for row in zip(names, *(columns[head] for head in here), strict=True):
            shown.add_row(*row)
        console.print(shown)
