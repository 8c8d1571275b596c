"""Mean and standard deviation of samples, by which a run normalises them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.uint8] | npt.NDArray[np.float32]


def moments(x: Samples, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation (ddof 0) of samples / scale: per channel, or per feature of a table.

    Parameters
    ----------
    x : images uint8 (N, H, W, C), all others float32 (N, C, ...), scale 1; NaN are left out.
    """
    return _image_moments(np.asarray(x, np.uint8), scale) if x.dtype == np.uint8 else _float_moments(x)


def _float_moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (ddof 0) of float32 (N, C, ...) along the second axis, in float64, without NaN."""
    width = x.shape[1]
    count, total, squares = np.zeros(width), np.zeros(width), np.zeros(width)
    rest = (0, *range(2, x.ndim))
    # Two passes in pieces: the squares of numbers far from zero would lose their digits in one.
    for start in range(0, len(x), 4096):
        part = x[start : start + 4096]
        count += np.sum(~np.isnan(part), axis=rest)
        total += np.nansum(part, axis=rest, dtype=np.float64)
    mean = np.divide(total, count, out=np.zeros(width), where=count > 0)
    for start in range(0, len(x), 4096):
        away = x[start : start + 4096] - mean.reshape(1, -1, *(1,) * (x.ndim - 2))
        squares += np.nansum(away * away, axis=rest, dtype=np.float64)
    std = np.sqrt(np.divide(squares, count, out=np.zeros(width), where=count > 0))
    # A constant channel carries nothing; dividing by 1 keeps it finite.
    return tuple(map(float, mean)), tuple(float(v) if v > 1e-12 else 1.0 for v in std)


def _image_moments(images: np.ndarray, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (ddof 0) of images / scale per channel, exact: from counts of the 256 grey levels."""
    levels = np.arange(256) / scale
    means, stds = [], []
    for channel in range(images.shape[3]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 4096):
            counts += np.bincount(images[start : start + 4096, ..., channel].ravel(), minlength=256)
        mean = float(counts @ levels / counts.sum())
        std = float(np.sqrt(counts @ (levels - mean) ** 2 / counts.sum()))
        means.append(mean)
        stds.append(std if std > 0 else 1.0)  # a constant channel carries nothing; dividing by 1 keeps it finite
    return tuple(means), tuple(stds)
