"""Statistics of results, each defined once: comparisons, reports and the ledger of claims all call these.

Accuracies are shares in [0, 1] and traffic is in bytes; only the functions under "as text" write percent. NaN stands
for a value that was not measured, and is left out. Spread over clients has ddof 0, because a run has all clients there
are; spread over seeds has ddof 1, because seeds are a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.lazy import pd

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

DASH = "–"
"""What stands in a table where a value was not measured."""


def measured(values: Iterable[Any]) -> Floats:
    """Return the values that were measured, as float64: None and NaN are left out."""
    array = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
    return array[~np.isnan(array)]


# ---- over clients ----------------------------------------------------------------------------------------------------


def worst(accuracies: Iterable[float]) -> tuple[float, float]:
    """Return the lowest accuracy, and the mean of the lowest tenth of the clients.

    A tenth is rounded up, so it is at least one client. Both are NaN without values.
    """
    values = np.sort(measured(accuracies))
    if not len(values):
        return math.nan, math.nan
    return float(values[0]), float(values[: math.ceil(len(values) / 10)].mean())


def sides(counts: pd.DataFrame, alone: pd.DataFrame) -> pd.DataFrame:
    """Return on which side each common client is: 1 where it gains from a method, 0 for the same score, -1 for a loss.

    A client scores the same where its correct rows differ by one standard error of the difference at most, and by one
    row in any case: |c - c'| <= max(1, sqrt(n (p (1 - p) + p' (1 - p')))) with p = c / n.

    Parameters
    ----------
    counts, alone : `correct` and `total` test rows of the same federation with a method and with training alone, by
        client.

    Returns
    -------
    One row per client: `side`, `score` and `alone` (shares of correct rows).
    """
    both = counts.join(alone.add_suffix("_alone"), how="inner")
    both = both[(both["total"] > 0).to_numpy() & ~np.isnan(both.to_numpy(float)).any(axis=1)]
    n, c, without = (both[name].to_numpy(float) for name in ("total", "correct", "correct_alone"))
    error = np.sqrt(c * (1 - c / n) + without * (1 - without / n))
    side = np.sign(c - without) * (np.abs(c - without) > np.maximum(1.0, error))
    return pd.DataFrame({"side": side, "score": c / n, "alone": without / n}, both.index)


def harm(counts: pd.DataFrame, alone: pd.DataFrame) -> tuple[float, float, float]:
    """Return how many clients gain from a method, score the same, and lose by it; NaN without common clients.

    Parameters
    ----------
    counts, alone : see :func:`sides`.
    """
    side = sides(counts, alone)["side"]
    gain, same, lose = (float((side == value).sum()) if len(side) else math.nan for value in (1, 0, -1))
    return gain, same, lose


def over_clients(values: Iterable[float], low_is_good: bool = False) -> dict[str, float]:
    """Return mean, standard deviation (ddof 0), the mean of the worst 10 % of the clients, and the worst client.

    The worst client is `min`, or `max` for a score that is better where it is lower, such as a loss.
    """
    numbers = measured(values)
    sign = -1.0 if low_is_good else 1.0
    lowest, decile = worst(sign * numbers)
    mean, std = (float(numbers.mean()), float(numbers.std())) if len(numbers) else (math.nan, math.nan)
    return {"mean": mean, "std": std, "worst_decile": sign * decile, "max" if low_is_good else "min": sign * lowest}


# ---- over rounds -----------------------------------------------------------------------------------------------------


def traffic(rounds: pd.DataFrame) -> Floats:
    """Return the bytes of arrays that all clients together sent and received up to each round, (T,).

    `bytes_up` of rounds.csv is a mean over the clients whose reply counted, `bytes_down` over all that were messaged: a
    client whose reply was dropped had downloaded its arrays all the same.

    Parameters
    ----------
    rounds : rounds.csv; no bytes are counted where it lacks a column.
    """
    if not {"bytes_up", "bytes_down", "clients"} <= set(rounds.columns):
        return np.zeros(len(rounds))
    messaged = rounds["clients"] + rounds.get("dropped", 0)
    moved = rounds["bytes_up"] * rounds["clients"] + rounds["bytes_down"] * messaged
    return np.asarray(moved.cumsum(), dtype=np.float64)


def reached(curve: pd.DataFrame, target: float) -> tuple[float, float]:
    """Return after how many completed rounds a curve is first at least at `target`, and the bytes of these rounds.

    Both are NaN where the curve never gets there, or where the target is missing.

    Parameters
    ----------
    curve : columns `completed`, `accuracy` and `bytes`, as `RunResult.curve` returns them.
    """
    hits = np.flatnonzero(curve["accuracy"].to_numpy(dtype=float) >= target)
    if not len(hits):
        return math.nan, math.nan
    return float(curve["completed"].iloc[hits[0]]), float(curve["bytes"].iloc[hits[0]])


# ---- over seeds ------------------------------------------------------------------------------------------------------


def mean_and_std(values: Iterable[Any]) -> tuple[float, float]:
    """Return mean and standard deviation over seeds (ddof 1); the spread of fewer than two values is NaN."""
    numbers = measured(values)
    mean = float(numbers.mean()) if len(numbers) else math.nan
    return mean, float(numbers.std(ddof=1)) if len(numbers) > 1 else math.nan


# ---- tests -----------------------------------------------------------------------------------------------------------


def within_rows(a: Floats, b: Floats) -> float:
    """Return Pearson's correlation of (K, C) arrays, both about their rows' means; rows where b is NaN are left out."""
    known = np.isfinite(b).all(axis=1)
    a, b = (v[known] - v[known].mean(axis=1, keepdims=True) for v in (a, b))
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum() / scale) if scale else math.nan


def holm(p: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm, 1979): step down, monotone, at most 1; NaN does not count."""
    corrected = np.full(len(p), math.nan)
    tested = [int(i) for i in np.argsort(p, kind="stable") if not math.isnan(p[i])]
    highest = 0.0
    for rank, index in enumerate(tested):
        highest = max(highest, min(1.0, (len(tested) - rank) * p[index]))
        corrected[index] = highest
    return [float(v) for v in corrected]


def resolution(tests: Iterable[Any], tenth: bool = False) -> float:
    """Return the smallest step of a mean accuracy over clients with these test rows (K,); NaN where none are known.

    Parameters
    ----------
    tenth : the mean is over a tenth of the clients, see :func:`worst`.
    """
    rows = measured(tests)
    rows = rows[rows > 0]
    count = math.ceil(len(rows) / 10) if tenth else len(rows)
    return 1 / float(count * np.median(rows)) if count else math.nan


# ---- as text ---------------------------------------------------------------------------------------------------------


def percent(value: Any, digits: int = 1, unit: str = "") -> str:
    """Write a share in percent, `71.3`, with a unit behind it if one is given; a dash where it was not measured."""
    return DASH if value is None or math.isnan(value) else f"{100 * float(value):.{digits}f}{unit}"


def number(value: float) -> str:
    """Write a score as it is, with three digits; a dash where it was not measured."""
    return DASH if math.isnan(value) else f"{value:.3f}"


def spread(values: Iterable[Any], factor: float = 100.0, digits: int = 1, signed: bool = False) -> str:
    """Write mean ± standard deviation over seeds (ddof 1), in percent unless `factor` says otherwise.

    One value stands alone; without values there is a dash. `signed` writes a plus before a positive mean.
    """
    mean, std = mean_and_std(values)
    if math.isnan(mean):
        return DASH
    text = f"{factor * mean:{'+' if signed else ''},.{digits}f}"
    return text if math.isnan(std) else f"{text} ± {factor * std:,.{digits}f}"


def over(seeds: int, partitions: int, kind: str = "") -> str:
    """Write what a spread is over: runs on one partition, or seeds that have a partition of that kind each."""
    if partitions == 1:
        return f"{seeds} runs on one partition"
    return f"{seeds} seeds, each with {'its own test split' if kind == 'by-client' else 'a partition of its own'}"


def privacy(stated: Sequence[Mapping[str, Any]]) -> str:
    """Write what runs state of their clients' data (`privacy` of `summary.json`): unit, largest epsilon, delta."""
    if not stated or not all(stated):
        return "none"
    if any("test" in s for s in stated):
        return "none: test noise"
    first, spent = stated[0], [float(s["epsilon"]) for s in stated if s["epsilon"] is not None]
    epsilon = f"{max(spent):.3g}" if len(spent) == len(stated) else DASH
    helpers = f", {first['colluders']} colluders" if "colluders" in first else ""
    return f"{first['unit']}: ε {epsilon}, δ {first['delta']:g}{helpers}"


def tally(counts: Iterable[Sequence[float]]) -> str:
    """Write how many clients gain, score the same and lose, `5 / 2 / 3`, as means over seeds."""
    known = np.array([c for c in counts if not math.isnan(c[0])])
    return " / ".join(f"{v:.1f}".removesuffix(".0") for v in known.mean(axis=0)) if len(known) else DASH


def until(values: Sequence[Any], factor: float = 1.0, digits: int = 1) -> str:
    """Write rounds or bytes to a target: the mean over the seeds that reached it, and how many did if not all did."""
    numbers = measured(values)
    if not len(numbers):
        return "never"
    text = f"{factor * numbers.mean():,.{digits}f}"
    return text if len(numbers) == len(values) else f"{text} ({len(numbers)}/{len(values)})"


def size(number: Any) -> str:
    """Write a number of bytes, from 10 kB on with a decimal prefix (1 kB = 1000 B)."""
    if number is None or math.isnan(number):
        return DASH
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 10 * factor or (unit != "kB" and number >= factor):
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,.0f} B"


def duration(seconds: Any) -> str:
    """Write seconds as seconds, from two minutes on as minutes, from two hours on as hours."""
    if seconds is None or math.isnan(seconds):
        return DASH
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
