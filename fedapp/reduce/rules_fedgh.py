"""The rule of FedGH and FedTGP: class means far from the other clients' are left out, long ones are shortened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import lower_median
from fedapp.core.robust import FEW, bounded, norms_of, places_of, screened
from fedapp.reduce.plain import PlainRows
from fedapp.reduce.spec import ClassRows, Rows

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
LENGTH = 2.0
"""Largest norm of a class mean as a multiple of the class's median."""


class ScreenedRows(PlainRows):
    """Rows of single classes with bounded norms, without those far from the other clients' of their class."""

    def __init__(self, spec: Rows) -> None:
        super().__init__(spec)
        self._left_out = 0

    def note(self, noted: dict[str, Any]) -> None:
        """Count the rows that were left out."""
        noted["left_out"] = noted.get("left_out", 0) + self._left_out

    def result(self) -> list[ClassRows]:
        """Return the rows that are left."""
        kept, rows = screened_lars([(of.labels, of.rows) for of in self._found])
        self._left_out = sum(int((~k).sum()) for k in kept)
        return [ClassRows(of.reply, of.labels[k], r[k]) for of, r, k in zip(self._found, rows, kept, strict=True)]


def screened_lars(lars: Sequence[tuple[Array, Array]]) -> tuple[list[npt.NDArray[np.bool_]], list[Float64]]:
    """Return which class means of FedGH's clients are used, and all of them with bounded norms.

    A norm is at most `LENGTH` times the median norm of its class (of all classes, if fewer than `FEW` clients have it).
    A mean that lies farther from its class's coordinate median than `FAR` times the median distance is left out.

    Parameters
    ----------
    lars : of each client the classes (S,) and their means (S, d).
    """
    means = [np.asarray(rows, dtype=np.float64) for _, rows in lars]
    kept = [np.ones(len(rows), dtype=np.bool_) for rows in means]
    every = np.concatenate([norms_of(rows) for rows in means]) if means else np.zeros(0)
    short = [rows.copy() for rows in means]
    for of in places_of(labels for labels, _ in lars).values():
        rows = np.stack([means[k][i] for k, i in of])
        rows = bounded(rows, LENGTH * lower_median(norms_of(rows) if len(of) >= FEW else every))
        for (k, i), row, near in zip(of, rows, screened(rows)):
            short[k][i], kept[k][i] = row, near
    return kept, short
