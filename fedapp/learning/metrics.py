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


def _number(value: Any) -> float:
    """Return a metric as a number; NaN for anything else, because a reply must not end a run."""
    return float(value) if isinstance(value, (int, float)) else math.nan


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
    scores : columns of the metrics that were measured beside accuracy and loss.
    """
    row: dict[str, float] = {"num_samples": _number(metrics.get("num-examples", math.nan))}
    for p in protocols:
        total = _number(metrics.get(f"{p}-total", math.nan))
        correct = _number(metrics.get(f"{p}-correct", math.nan))
        loss = _number(metrics.get(f"{p}-loss-sum", math.nan))
        row[f"{p}_correct"], row[f"{p}_total"] = correct, total
        row[f"{p}_accuracy"] = correct / total if total else math.nan
        row[f"{p}_loss"] = loss / total if total else math.nan
        row[f"{p}_balanced"] = _number(metrics.get(f"{p}-balanced", math.nan))
        if validation:
            total = _number(metrics.get(f"{p}-validation-total", math.nan))
            row[f"{p}_validation"] = _number(metrics.get(f"{p}-validation-correct", math.nan)) / (total or math.nan)
        for name in scores:
            row[f"{p}_{name}"] = _number(metrics.get(f"{p}-{name}", math.nan))
    row["train_loss"] = _number(metrics.get("train-loss", math.nan))
    for name in columns:
        row[name.replace("-", "_")] = _number(metrics.get(name, math.nan))
    row["steps"] = _number(metrics.get("steps", math.nan))
    row["bytes_up"] = _number(metrics.get("bytes-up", 0))
    row["train_seconds"] = _number(metrics.get("train-seconds", math.nan))
    row["client_seconds"] = _number(metrics.get("seconds", math.nan))
    return row


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
    out: dict[str, float] = {}
    for p in protocols:
        column = {
            name: [r.get(f"{p}_{name}", math.nan) for r in rows]
            for name in ("accuracy", "correct", "total", "loss", "balanced")
        }
        shares = [most / t if t > most else 1.0 for t in column["total"]]
        correct, total = (
            float(np.nansum([n * s for n, s in zip(column[name], shares, strict=True)]))
            for name in ("correct", "total")
        )
        out[f"{p}_accuracy"] = mean(column["accuracy"])
        out[f"{p}_accuracy_std"] = std(column["accuracy"])
        out[f"{p}_accuracy_pooled"] = correct / total if total else math.nan
        out[f"{p}_loss"] = mean(column["loss"])
        out[f"{p}_balanced"] = mean(column["balanced"])
        if any(f"{p}_validation" in r for r in rows):
            out[f"{p}_validation"] = mean(r.get(f"{p}_validation", math.nan) for r in rows)
        for name in scores:
            out[f"{p}_{name}"] = mean(r.get(f"{p}_{name}", math.nan) for r in rows)
    out["train_loss"] = mean(r.get("train_loss", math.nan) for r in rows)
    for name in (c.replace("-", "_") for c in columns):
        out[name] = mean(r.get(name, math.nan) for r in rows)
    return out


def tidy(value: float) -> float | int | None:
    """NaN becomes None, whole numbers become int (for JSON)."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
