"""What all figures of runs share: the types, and how numbers are written next to them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from matplotlib.figure import Figure

from fedapp.registry import title_of
from fedapp.results import statistics
from fedapp.results.analysis import Unavailable
from fedapp.results.runs import ONE_SCORE, PROTOCOL_TEXT, RunResult

_T = TypeVar("_T")
Runs = Sequence[RunResult]
Words = tuple[str, str, Figure]
"""A caption, the words for readers who do not see the figure, and the figure."""

percent = partial(statistics.percent, unit=" %")


def titled(run: RunResult) -> RunResult:
    """Return the same run, labelled as a page shows it."""
    return replace(run, label=title_of(run.label))


def each(runs: Runs, make: Callable[[RunResult], _T]) -> dict[str, _T]:
    """Return what a function makes of every run that has what it needs, by label; see :func:`made`."""
    return {run.label: result for run, result in made(runs, make)}


def made(runs: Iterable[RunResult], make: Callable[[RunResult], _T]) -> Iterator[tuple[RunResult, _T]]:
    """Yield every run that has what a function needs, with its result; raise the first reason if none has."""
    found, reasons = 0, []
    for run in runs:
        try:
            result = make(run)
        except Unavailable as e:
            reasons.append(e)
        else:
            found += 1
            yield run, result
    if not found:
        raise reasons[0] if reasons else Unavailable("there is no finished run")


def unfinished(run: RunResult, why: str) -> Unavailable:
    """Return the error of a run that has not got far enough."""
    return Unavailable(why, "" if run.ok else f"fedapp run --resume {shlex.quote(str(run.out))}")


def named(protocol: str) -> str:
    """Write what a protocol means behind its name: the title of a panel, the label of a line."""
    return f"{protocol}, {PROTOCOL_TEXT[protocol]}"


def setting_text(setting: Mapping[str, object]) -> str:
    """Write a setting as words; an empty string where all runs share everything."""
    return ", ".join(str(v) if k in ("dataset", "partition", "model") else f"{k} {v}" for k, v in setting.items())


def alone(runs: Iterable[RunResult]) -> str:
    """Return the note that training alone has one score, if it is among the runs."""
    return f" {ONE_SCORE}" if any(r.alone for r in runs) else ""
