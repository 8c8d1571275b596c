"""What all figures of runs share: the types, and how numbers are written beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from matplotlib.figure import Figure

from fedapp.results import statistics
from fedapp.results.analysis import Unavailable
from fedapp.results.runs import ONE_SCORE, PROTOCOL_TEXT, RunResult

_T = TypeVar("_T")
Runs = Sequence[RunResult]
Words = tuple[str, str, Figure]
"""A caption, the words for readers who do not see the figure, and the figure."""

percent = partial(statistics.percent, unit=" %")


def by_name(runs: Runs) -> dict[str, RunResult]:
    """Return the first seed's run of every method and setting by a name that tells them apart."""
    found: dict[str, RunResult] = {}
    for run in sorted(runs, key=lambda r: r.seed):
        found.setdefault(full_name(run), run)
    return {name: found[name] for name in dict.fromkeys(map(full_name, runs))}


def full_name(run: RunResult) -> str:
    """Write a run's method with its own values, and its setting where runs differ in one."""
    return ", ".join(filter(None, (run.label, setting_text(run.setting))))


def each(runs: Runs, make: Callable[[RunResult], _T]) -> dict[str, _T]:
    """Apply a function to every run that has what it needs; raise the first reason if none has."""
    found: dict[str, _T] = {}
    first: Unavailable | None = None
    for run in runs:
        try:
            found[run.label] = make(run)
        except Unavailable as e:
            first = first or e
    if not found:
        raise first or Unavailable("there is no finished run")
    return found


def unfinished(run: RunResult, why: str) -> Unavailable:
    """Return the error of a run that has not got far enough."""
    return Unavailable(why, f"fedapp run --resume {run.out}")


def named(protocol: str) -> str:
    """Write what a protocol means behind its name: the title of a panel, the label of a line."""
    return f"{protocol}, {PROTOCOL_TEXT[protocol]}"


def setting_text(setting: Mapping[str, object]) -> str:
    """Write a setting as words; an empty string where all runs share everything."""
    return ", ".join(str(v) if k in ("dataset", "partition", "model") else f"{k} {v}" for k, v in setting.items())


def alone(runs: Iterable[RunResult]) -> str:
    """Say that Standalone has one score, where it is among the runs."""
    return f" {ONE_SCORE}" if any(r.alone for r in runs) else ""
