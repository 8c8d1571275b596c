"""Comparisons from Python: `from fedapp import compare`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fedapp.engines import local as engines
from fedapp.experiments import compare as comparing
from fedapp.results.directory import absolute, new_folder
from fedapp.results.runs import Comparison, read_comparison


def compare(
    methods: str = comparing.DEFAULT_METHODS, *, seeds: int = 1, out: str | Path | None = None, **options: Any
) -> Comparison:
    """Run several methods on the same data, partition and sampled clients in processes of this machine.

    Parameters
    ----------
    methods : comma-separated ids, optionally with values of their own, as for `fedapp compare`.
    out : folder of the comparison; an existing one is continued.
    options : run-config keys with underscores, as for `fedapp.run`; and `datasets`, `partitions`, `sweep`, `points`,
        `reference`, `target`, `engine`, `workers`: see `fedapp.experiments.compare.run`.

    Returns
    -------
    The :class:`Comparison`: `table` (`results.csv`), `significance`, and `runs`, its run directories.

    Raises
    ------
    BadRequest : a configuration that a method refuses, or data that cannot be divided so.
    RuntimeError : a run failed, or the runs do not share partition and sampling; what is finished is kept.

    Examples
    --------
    >>> compare("local,fedavg", seeds=2, rounds=5, out="runs/both").table  # doctest: +SKIP
    """
    own = {k: options.pop(k) for k in inspect.signature(comparing.run).parameters if k in options}
    folder = absolute(Path(out)) if out is not None else new_folder(Path("runs"), "compare")
    if comparing.run(engines.flat(options), methods, seeds, folder, **own):
        raise RuntimeError(f"the comparison in {folder} is not complete: the lines above say why")
    return read_comparison(folder)
