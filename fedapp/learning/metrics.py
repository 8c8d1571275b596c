"""From clients' sums and counts to the columns of the result tables. Every average recomputes from clients.csv."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def mean(values: Iterable[float]) -> float:
    """Unweighted mean over clients, NaN skipped; NaN without values."""
    array = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    return float(array.mean()) if len(array) else float("nan")


def std(values: Iterable[float]) -> float:
    """Population standard deviation over clients (ddof 0), NaN skipped; NaN without values."""
    array = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    return float(array.std()) if len(array) else float("nan")


def client_row(
    metrics: Mapping[str, Any],
    protocols: Iterable[str],
    validation: bool = False,
    columns: Iterable[str] = (),
    scores: Iterable[str] = (),
) -> dict[str, float]:
    """Return one client's columns: sums and counts as they came, and the accuracy and loss they give.

    Parameters
    ----------
    validation : whether clients hold out images for validation, so that there is a column for it.
    columns : further numbers of the method (`Method.columns`).
    scores : columns of the metrics that were measured besides accuracy and loss.
    """

    def number(name: str, absent: float = math.nan) -> float:
        """Return a metric as a number; NaN for anything else, because a reply must not end a run."""
        value = metrics.get(name, absent)
        return float(value) if isinstance(value, (int, float)) else math.nan

    row = {"num_samples": number("num-examples")}
    for p in protocols:
        correct, total = number(f"{p}-correct"), number(f"{p}-total")
        row[f"{p}_correct"], row[f"{p}_total"] = correct, total
        row[f"{p}_accuracy"] = correct / total if total else math.nan
        row[f"{p}_loss"] = number(f"{p}-loss-sum") / total if total else math.nan
        row[f"{p}_balanced"] = number(f"{p}-balanced")
        if validation:
            row[f"{p}_validation"] = number(f"{p}-validation-correct") / (number(f"{p}-validation-total") or math.nan)
        row |= {f"{p}_{name}": number(f"{p}-{name}") for name in scores}
    row["train_loss"] = number("train-loss")
    row |= {name.replace("-", "_"): number(name) for name in columns}
    times = {"train_seconds": number("train-seconds"), "client_seconds": number("seconds")}
    return row | {"steps": number("steps"), "bytes_up": number("bytes-up", 0)} | times


def summarise(
    rows: Iterable[Mapping[str, float]],
    protocols: Iterable[str],
    columns: Iterable[str] = (),
    scores: Iterable[str] = (),
    most: float = math.inf,
) -> dict[str, float]:
    """Return the averages of a round over its clients.

    `<protocol>_accuracy` is the unweighted mean, `_std` its spread over clients (ddof 0), `_pooled` is weighted by test
    size, where no client counts for more than `most` test images. `_validation`, where images are held out for it, is
    the mean accuracy on them. `scores` are columns of further metrics; each is the unweighted mean too.
    """
    rows = list(rows)

    def column(name: str) -> list[float]:
        return [r.get(name, math.nan) for r in rows]

    out: dict[str, float] = {}
    for p in protocols:
        shares = [most / t if t > most else 1.0 for t in column(f"{p}_total")]
        correct, total = (
            float(np.nansum([n * s for n, s in zip(column(f"{p}_{name}"), shares, strict=True)]))
            for name in ("correct", "total")
        )
        out[f"{p}_accuracy"] = mean(column(f"{p}_accuracy"))
        out[f"{p}_accuracy_std"] = std(column(f"{p}_accuracy"))
        out[f"{p}_accuracy_pooled"] = correct / total if total else math.nan
        validation = ["validation"] if any(f"{p}_validation" in r for r in rows) else []
        for name in ("loss", "balanced", *validation, *scores):
            out[f"{p}_{name}"] = mean(column(f"{p}_{name}"))
    for name in ("train_loss", *(c.replace("-", "_") for c in columns)):
        out[name] = mean(column(name))
    return out


def tidy(value: float) -> float | int | None:
    """NaN becomes None, whole numbers become int (for JSON)."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
