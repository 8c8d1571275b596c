"""Comparisons from Python: `from fedapp import compare`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from fedapp import config as configuration
from fedapp.engines import local as engines
from fedapp.errors import BadRequest
from fedapp.experiments import compare as comparing
from fedapp.files import absolute
from fedapp.results import terminal
from fedapp.results.directory import new_folder, removed_if_empty
from fedapp.results.runs import Comparison, read_comparison

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("sweep", "points", "tune", "engine"), (str, "text")),
    "seeds": (int, "a whole number"),
    "reference": ((str, type(None)), "text"),
    "target": ((int, float, type(None)), "a number"),
    "workers": ((int, type(None)), "a whole number"),
}
"""Types of the arguments that are not settings, and in words."""


def compare(
    methods: str | Sequence[str] = comparing.DEFAULT_METHODS,
    *,
    seeds: int = comparing.DEFAULT_SEEDS,
    out: str | Path | None = None,
    datasets: str | Sequence[str] = (),
    partitions: str | Sequence[str] = (),
    sweep: str = "",
    points: str = "",
    tune: str = "",
    reference: str | None = None,
    target: float | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Run several methods on the same data, partition and sampled clients in processes of this machine.

    Parameters
    ----------
    methods : ids, optionally with values of their own, as for `fedapp compare`; a list, or text with commas.
    seeds, reference, target, engine, workers, quiet : as for `fedapp compare`.
    out : folder of the comparison; an existing one is continued.
    datasets, partitions : several, as a list or as text with commas.
    sweep, points, tune : as `--sweep`, `--grid` and `--tune` of `fedapp compare`.
    settings : run-config keys with underscores, as for `fedapp.run`.

    Returns
    -------
    The :class:`Comparison`: `table` (`results.csv`), `significance`, and `runs`, its run directories.

    Raises
    ------
    BadRequest : a configuration that a method refuses, or data that cannot be divided so.
    RuntimeError : a run failed, or the runs do not share partition and sampling; finished runs are kept.

    Examples
    --------
    >>> compare("local,fedavg", seeds=2, rounds=5, out="runs/both").table  # doctest: +SKIP
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise BadRequest(
            "this process of a comparison runs your script again, since own code of __main__ is named: start the "
            'comparison below `if __name__ == "__main__":`, or move that code to a module'
        )
    given: dict[str, Any] = {
        "seeds": seeds, "sweep": sweep, "points": points, "tune": tune, "reference": reference, "target": target,
    }  # fmt: skip
    _check_types({**given, "engine": engine, "workers": workers})
    chosen, values = ",".join(_names("methods", methods)), engines.flat(settings)
    data, ways = _names("datasets", datasets), _names("partitions", partitions)
    own = engines.as_path("out", out)
    folder = absolute(own) if own is not None else new_folder(Path("runs"), "compare")
    with terminal.quiet(quiet), removed_if_empty(folder) if own is None else nullcontext():
        plan = comparing.Plan(values, chosen, datasets=data, partitions=ways, **given)
        code = comparing.run(plan, folder, engine, workers)
    if code:
        raise RuntimeError(f"the comparison in {folder} is not complete: see the lines above")
    return read_comparison(folder)


def _check_types(given: Mapping[str, Any]) -> None:
    for name, (kinds, wanted) in KINDS.items():
        if not isinstance(given[name], kinds) or isinstance(given[name], bool):
            raise BadRequest(f"{name} = {configuration.shown(repr(given[name]))}: must be {wanted}")


def _names(option: str, value: Any) -> list[str]:
    """Return names that are given as a list, or as text with commas between them outside of brackets."""
    if isinstance(value, str):
        return comparing.entries(value)
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return list(value)
    raise BadRequest(f"{option} = {configuration.shown(repr(value))}: must be text, or a list of texts")
