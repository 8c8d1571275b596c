"""Mean and standard deviation of samples, by which a run normalises them, and other facts of features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
PIECE = 4096
"""Rows that are looked at together."""
ROUGH = 0.05
"""Most that rounding to float32 may add to a feature, in its standard deviations: this is 1/400 of its variance."""


GRID = 2.0**-12
"""Features are rounded to multiples of it before `feature_sums`, which are exact while N M^2 is below 2^29."""


class Rows(Protocol):
    """An array of samples, or something that is read piece by piece as one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, and shape of each."""

    @property
    def dtype(self) -> npt.DTypeLike:
        """Type of the numbers."""

    def __getitem__(self, rows: slice, /) -> Samples:
        """Return neighbouring rows."""


def moments(x: Rows, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation (ddof 0) of samples / scale: per channel, or per feature of a table.

    Parameters
    ----------
    x : images uint8 (N, H, W, C), all others float32 (N, C, ...), scale 1; NaN are left out. N >= 1.
    """
    return _image_moments(x, scale) if x.dtype == np.uint8 else _float_moments(x)


def feature_sums(x: Rows) -> dict[str, npt.NDArray[np.float64]]:
    """Return `count` (1,), `sum` (F,) and `square` (F,) of rows of features (N, F); an unknown value counts as 0."""
    total, square = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for start in range(0, x.shape[0], PIECE):
        part = np.rint(np.nan_to_num(x[start : start + PIECE].astype(np.float64), nan=0.0) / GRID) * GRID
        total += part.sum(axis=0)
        square += (part**2).sum(axis=0)
    return {"count": np.array([float(x.shape[0])]), "sum": total, "square": square}


def binary(x: Rows) -> tuple[bool, ...]:
    """Return for each feature of a table (N, F) whether it has at most two values besides NaN."""
    pieces, two = range(0, x.shape[0], PIECE), np.ones(x.shape[1], bool)
    for some in (pieces[:1], pieces):  # most features have a third value in the first piece
        if not (columns := np.flatnonzero(two)).size:
            break
        low, high = np.full(len(columns), np.inf), np.full(len(columns), -np.inf)
        for start in some:
            part = x[start : start + PIECE][:, columns]
            low, high = np.fmin(low, np.fmin.reduce(part)), np.fmax(high, np.fmax.reduce(part))
        for start in some:
            part = x[start : start + PIECE][:, columns]
            two[columns] &= ((part == low) | (part == high) | np.isnan(part)).all(0)
    return tuple(map(bool, two))


def rounded(values: npt.NDArray[Any]) -> str:
    """Warn that float32 loses the differences of numbers, with the remedy; empty if it keeps them.

    Numbers far from zero have few digits left for their differences, and no later step gets these back.
    """
    known = values[np.isfinite(values)] if values.dtype.itemsize > 4 and values.dtype.kind == "f" else values[:0]
    if not known.size or np.ptp(known) <= 1e-12 * np.abs(known).max():  # a constant, but for the rounding of float64
        return ""
    std, lost = float(known.std()), known - known.astype(np.float32)
    if lost.std() <= ROUGH * std:
        return ""
    return (
        f"has numbers near {np.median(known):.4g} with a standard deviation of {std:.2g}, which float32 rounds away: "
        "subtract an offset"
    )


def rounded_features(x: npt.NDArray[Any]) -> Iterator[tuple[int, str]]:
    """Return the channels, or features of a table, that float32 rounds too much, with the text of :func:`rounded`."""
    wide = x.dtype.kind == "f" and x.dtype.itemsize > 4
    told = ((number, rounded(x[:, number])) for number in range(x.shape[1] if wide else 0))
    return ((number, text) for number, text in told if text)


def _float_moments(x: Rows) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (ddof 0) of float32 (N, C, ...) along the second axis, in float64, without NaN."""
    width, axes = x.shape[1], len(x.shape)
    count, total, squares = np.zeros(width), np.zeros(width), np.zeros(width)
    rest = (0, *range(2, axes))
    # Two passes in pieces: the squares of numbers far from zero would lose their digits in one.
    for start in range(0, x.shape[0], PIECE):
        part = x[start : start + PIECE]
        count += np.sum(~np.isnan(part), axis=rest)
        total += np.nansum(part, axis=rest, dtype=np.float64)
    mean = np.divide(total, count, out=np.zeros(width), where=count > 0)
    for start in range(0, x.shape[0], PIECE):
        away = x[start : start + PIECE] - mean.reshape(1, -1, *(1,) * (axes - 2))
        squares += np.nansum(away * away, axis=rest, dtype=np.float64)
    std = np.sqrt(np.divide(squares, count, out=np.zeros(width), where=count > 0))
    # A constant channel carries nothing; dividing by 1 keeps it finite.
    return tuple(map(float, mean)), tuple(float(v) if v > 1e-12 else 1.0 for v in std)


def _image_moments(images: Rows, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (ddof 0) of images / scale per channel, exact: from counts of the 256 grey levels."""
    levels = np.arange(256) / scale
    counts = np.zeros((images.shape[3], 256), np.int64)
    piece = 1 + (1 << 20) // math.prod(images.shape[1:])  # bincount makes eight bytes of each
    for start in range(0, images.shape[0], piece):
        part = images[start : start + piece]
        for channel, found in enumerate(counts):
            found += np.bincount(part[..., channel].ravel(), minlength=256)
    means, stds = [], []
    for found in counts:
        mean = float(found @ levels / found.sum())
        std = float(np.sqrt(found @ (levels - mean) ** 2 / found.sum()))
        means.append(mean)
        stds.append(std if std > 0 else 1.0)  # a constant channel carries nothing; dividing by 1 keeps it finite
    return tuple(means), tuple(stds)
