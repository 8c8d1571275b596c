"""Per-class Gaussian statistics of features: accumulating, merging, sending, sampling (CCVR).

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021,
arXiv:2106.05001, Section 4 and Appendix A.

==================  =======================================================================================
``N_ck``            number of samples of class c on client k; ``N_c`` their sum over clients
``mu_ck``           mean of the d features (Eq. 2), ``mu_c`` the pooled mean (Eq. 3)
``Sigma_ck``        covariance with ddof = 1 (Eq. 2), ``Sigma_c`` the pooled covariance (Eq. 4)
``M2``              scatter, the sum of squared deviations ``(N - 1) Sigma``; what is accumulated and merged here
==================  =======================================================================================

Everything is float64. Equation 4 is used in its centred form ``(N_c - 1) Sigma_c = sum_k (N_ck - 1) Sigma_ck +
sum_k N_ck (mu_ck - mu_c)(mu_ck - mu_c)^T``, in which large means do not cancel; one-pass accumulation is the same rule
applied to batches (Chan, Golub, LeVeque 1979).

PyTorch does the linear algebra whose last bits depend on the number of threads, so that ``torch.set_num_threads``
decides them; BLAS's symmetric update, twice as fast as a full product, and its sums of rows give the same bits with any
number.

Three forms of statistics exist: ``full`` (a scatter matrix a class), ``diag`` (its diagonal only) and ``pooled`` (one
matrix for the deviations of all classes from their own means, as in linear discriminant analysis).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg.blas import dsyrk, dtrmm

from fedapp.core.averages import as_tensor

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Form = Literal["full", "diag", "pooled"]
Mode = Literal["full", "diag", "lowrank", "pooled", "sums"]
Method = Literal["auto", "eigh", "cholesky"]

MODES: tuple[Mode, ...] = get_args(Mode)
EIGH_LIMIT = 512
"""Up to this width a singular covariance is factorised by its eigenvalues, above it by Cholesky with jitter."""
PIVOT_LIMIT = 1e-10
"""Smallest pivot, relative to the mean variance, with which a covariance counts as definite."""
ISOTROPIC = 1e-6
"""Variance of a class of one sample when no class has two, so that nothing is known about any spread."""
BLOCK = 512
"""Rows that are widened to float64, centred and multiplied at a time."""
DRAWS = 256
"""Virtual features that are drawn, multiplied and rounded at a time."""
REPLIES = 64
"""Replies whose means a pool keeps side by side before it merges them into one."""
STREAM = 7919
"""Keeps the generators of virtual features apart from all others made from the same seed."""

__all__ = [
    "MODES",
    "ClassMoments",
    "Factor",
    "Form",
    "Mode",
    "MomentsPool",
    "allot",
    "draw",
    "factorise",
    "form_of",
    "from_arrays",
    "from_sums",
    "linear_cka",
    "merge",
    "moments",
    "pack",
    "pool",
    "problem_of",
    "sample",
    "separability",
    "sliced_wasserstein",
    "sums",
    "to_arrays",
    "tukey",
    "unpack",
    "virtual_features",
]


# Packed symmetric matrices ------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _packing(width: int) -> tuple[Int64, Int64]:
    """Return where packed entries lie in a flat square, and where a square's entries lie in the packed form."""
    upper = np.flatnonzero(np.triu(np.ones((width, width), dtype=bool)))
    square = np.empty((width, width), dtype=np.int64)
    square.reshape(-1)[upper] = np.arange(upper.size)
    lower = np.tril_indices(width, -1)
    square[lower] = square.T[lower]
    return upper, square


@lru_cache(maxsize=4)
def _above(width: int) -> npt.NDArray[np.bool_]:
    """Return where a square's entries lie above its diagonal."""
    return ~np.tri(width, dtype=bool)


def pack(square: Array) -> Array:
    """Return the upper triangles of symmetric matrices, row by row with the diagonal.

    Parameters
    ----------
    square : ndarray, (..., d, d)
        Symmetric matrices; what lies below the diagonal is not read.

    Returns
    -------
    ndarray, (..., d (d + 1) / 2)
        In the order of ``numpy.triu_indices(d)`` and the input's dtype.
    """
    if square.ndim < 2 or square.shape[-1] != square.shape[-2]:
        raise ValueError(f"square matrices are needed, got shape {square.shape}")
    width = square.shape[-1]
    return square.reshape(*square.shape[:-2], width * width)[..., _packing(width)[0]]


def unpack(packed: Array, width: int) -> Array:
    """Return the symmetric matrices of packed upper triangles, exactly symmetric.

    Parameters
    ----------
    packed : ndarray, (..., d (d + 1) / 2)
        As from `pack`.
    width : int
        d.

    Returns
    -------
    ndarray, (..., d, d)
        In the input's dtype.
    """
    if packed.ndim < 1 or packed.shape[-1] != width * (width + 1) // 2:
        raise ValueError(f"width {width} needs {width * (width + 1) // 2} packed entries, got shape {packed.shape}")
    return packed[..., _packing(width)[1]]


# Accumulating -------------------------------------------------------------------------------------


class ClassMoments:
    """Count, mean and scatter of every class, from features seen batch by batch.

    Memory: for each class seen (``pooled``: once) d x d float64, for ``diag`` d; at most ``buffer_rows`` rows of
    features in their own precision (twice while they are worked in), and ``BLOCK`` rows in float64. Time: one symmetric
    product for each class and flush of the buffer, which does all the work there is at width 512. Rows are gathered
    first because a batch with few rows a class would spend its time on moving the d x d matrices.

    Parameters
    ----------
    num_classes : int
        C.
    width : int
        d.
    form : {"full", "diag", "pooled"}
        What is kept of the scatter.
    buffer_rows : int
        Rows gathered before they are worked in. Batches are kept by reference until then.
    """

    def __init__(self, num_classes: int, width: int, form: Form = "full", buffer_rows: int = 8192) -> None:
        if num_classes < 1 or width < 1 or buffer_rows < 1:
            raise ValueError(f"classes, width and buffer must be positive: {num_classes}, {width}, {buffer_rows}")
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {', '.join(get_args(Form))}, got {form!r}")
        self.num_classes, self.width, self.form, self.buffer_rows = num_classes, width, form, buffer_rows
        self._counts = np.zeros(num_classes, dtype=np.int64)
        self._means = np.zeros((num_classes, width), dtype=np.float64)
        # Column-major squares of which the upper triangle counts (what BLAS's symmetric update writes), or rows of d.
        self._scatter: dict[int, Float64] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._waiting_rows = 0

    def __repr__(self) -> str:
        return f"ClassMoments({self.classes.size} of {self.num_classes} classes, width {self.width}, {self.form})"

    @property
    def counts(self) -> Int64:
        """Samples seen of every class, (C,)."""
        self._flush()
        return self._counts.copy()

    @property
    def means(self) -> Float64:
        """Mean features of every class, (C, d); zeros where nothing was seen."""
        self._flush()
        return self._means.copy()

    @property
    def classes(self) -> Int64:
        """Classes of which at least one sample was seen, ascending."""
        return np.flatnonzero(self.counts)

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the pooled covariance, ``sum_c (N_c - 1)`` over the classes seen."""
        counts = self.counts
        return int(counts.sum() - np.count_nonzero(counts))

    def update(self, features: Array | torch.Tensor, labels: Array | torch.Tensor) -> None:
        """Add a batch.

        Parameters
        ----------
        features : ndarray or Tensor, (B, d), floating point
            Must not be changed afterwards (it may wait in the buffer).
        labels : ndarray or Tensor, (B,), integer
            Classes from 0 to C - 1.

        Raises
        ------
        ValueError
            Shapes that do not fit or labels out of range. Features that are not finite are found when they are worked
            in, at the latest when a result is asked for.
        """
        rows = features.detach().cpu() if isinstance(features, torch.Tensor) else as_tensor(np.asarray(features))
        given = labels.detach().cpu() if isinstance(labels, torch.Tensor) else as_tensor(np.asarray(labels))
        if rows.ndim != 2 or rows.shape[1] != self.width or given.shape != rows.shape[:1]:
            got = f"{tuple(rows.shape)} and {tuple(given.shape)}"
            raise ValueError(f"features (B, {self.width}) and labels (B,) are needed, got {got}")
        if given.is_floating_point() or not rows.is_floating_point():
            raise ValueError(f"features must be floating point and labels integers, got {rows.dtype} and {given.dtype}")
        if given.numel() == 0:
            return
        if int(given.min()) < 0 or int(given.max()) >= self.num_classes:
            raise ValueError(
                f"labels must lie in 0..{self.num_classes - 1}, got {int(given.min())}..{int(given.max())}"
            )
        self._waiting.append((rows, given))
        self._waiting_rows += rows.shape[0]
        if self._waiting_rows >= self.buffer_rows:
            self._flush()

    def _flush(self) -> None:
        """Work in the rows that wait, class by class."""
        if not self._waiting:
            return
        rows = torch.cat([batch for batch, _ in self._waiting]) if len(self._waiting) > 1 else self._waiting[0][0]
        labels = torch.cat([given for _, given in self._waiting]).long()
        self._waiting, self._waiting_rows = [], 0
        order = torch.argsort(labels, stable=True)
        counts = torch.bincount(labels, minlength=self.num_classes).tolist()
        ends = list(itertools.accumulate(counts))
        # Blocks that fit the cache are gathered, widened, centred and multiplied in the same memory.
        size = min(BLOCK, max(counts))
        gathered = torch.empty(size, self.width, dtype=rows.dtype)
        scratch = torch.empty(size + 1, self.width, dtype=torch.float64)
        for c, (count, end) in enumerate(zip(counts, ends)):
            for start in range(end - count, end, size):
                chosen = order[start : min(start + size, end)]
                self._work_in(c, torch.index_select(rows, 0, chosen, out=gathered[: chosen.numel()]), scratch)

    def _work_in(self, c: int, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """Merge rows of one class: their deviations from their own mean, and the shift of the mean as one more row."""
        count = rows.shape[0]
        deviations = scratch[:count].copy_(rows)
        # As a product: a third of the time of PyTorch's sum over rows.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = torch.from_numpy(np.ones(count) @ deviations.numpy()).div_(count)
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"features of class {c} are not finite")
        deviations -= mean
        kept_mean = torch.from_numpy(self._means[c])
        before, total = int(self._counts[c]), int(self._counts[c]) + count
        shift = mean - kept_mean
        scratch[count] = shift * (before * count / total) ** 0.5
        self._add_rows(c, scratch[: count + 1 if before else count].numpy())
        kept_mean += shift * (count / total)
        self._counts[c] = total

    def _key(self, c: int) -> int:
        return 0 if self.form == "pooled" else c

    def _kept(self, c: int) -> Float64:
        """Return the array that class c's scatter is accumulated in."""
        key = self._key(c)
        if key not in self._scatter:
            shape = (self.width,) if self.form == "diag" else (self.width, self.width)
            self._scatter[key] = np.zeros(shape, dtype=np.float64, order="F")
        return self._scatter[key]

    def _add_rows(self, c: int, rows: Float64) -> None:
        """Add ``rows^T rows`` to class c's scatter."""
        kept = self._kept(c)
        if self.form == "diag":
            kept += np.einsum("ij,ij->j", rows, rows)
        else:
            dsyrk(1.0, rows.T, beta=1.0, c=kept, overwrite_c=1)

    def scatter(self, c: int) -> Float64:
        """Return class c's scatter M2, (d, d) or (d,) in the ``diag`` form; in the ``pooled`` form that of all classes.

        Parameters
        ----------
        c : int
            Class; zeros if nothing of it was seen.
        """
        self._flush()
        kept = self._scatter.get(self._key(c))
        if kept is None:
            return np.zeros(self.width if self.form == "diag" else (self.width, self.width))
        if self.form == "diag":
            return kept.copy()
        full: Float64 = kept.T.copy()  # right from the diagonal down; the rest is its mirror image
        np.copyto(full, kept, where=_above(self.width))
        return full

    def cov(self, c: int) -> Float64:
        """Return class c's covariance with ddof = 1 (Eq. 2); in the ``pooled`` form the common one.

        Parameters
        ----------
        c : int
            Class.

        Returns
        -------
        ndarray, (d, d), or (d,) in the ``diag`` form
            Zeros for a class of one sample, whose weight ``N - 1`` in Eq. 4 is zero.

        Raises
        ------
        ValueError
            Nothing was seen of the class.
        """
        count = int(self.counts[c])
        if count == 0:
            raise ValueError(f"nothing was seen of class {c}: it has no covariance")
        cov = self.scatter(c)
        cov /= max(self.degrees if self.form == "pooled" else count - 1, 1)
        return cov

    def pooled_cov(self) -> Float64:
        """Return the within-class covariance ``sum_c (N_c - 1) Sigma_c / sum_c (N_c - 1)``; zeros without any spread.

        Returns
        -------
        ndarray, (d, d), or (d,) in the ``diag`` form
        """
        self._flush()
        keys = list(self._scatter)
        total = sum((self.scatter(key) for key in keys[1:]), self.scatter(keys[0] if keys else 0))
        pooled: Float64 = total / max(self.degrees, 1)
        return pooled

    def gaussian(
        self,
        c: int,
        shrinkage: float = 0.0,
        target: Literal["pooled", "isotropic"] = "pooled",
        within: Float64 | None = None,
    ) -> tuple[Float64, Float64]:
        """Return mean and covariance of the Gaussian that stands for class c.

        A class of one sample has no covariance of its own and takes the pooled within-class one, or, if no class has
        two samples, ``ISOTROPIC`` times the identity.

        Parameters
        ----------
        c : int
            Class of which at least one sample was seen.
        shrinkage : float
            g in 0..1: ``(1 - g) Sigma_c + g Sigma_w`` with the pooled covariance, or ``g (tr Sigma_c / d) I`` for the
            second term.
        target : {"pooled", "isotropic"}
            What to shrink to.
        within : ndarray, optional
            `pooled_cov`, if at hand; it is computed when needed otherwise.

        Returns
        -------
        mean : ndarray, (d,)
        cov : ndarray, (d, d), or (d,) in the ``diag`` form
        """
        if not 0.0 <= shrinkage <= 1.0:
            raise ValueError(f"shrinkage must lie in 0..1, got {shrinkage}")
        if target not in ("pooled", "isotropic"):
            raise ValueError(f"shrinkage target must be 'pooled' or 'isotropic', got {target!r}")
        cov = self.cov(c)
        identity = np.ones(self.width) if self.form == "diag" else np.eye(self.width)
        if self._counts[c] == 1 and self.form != "pooled":
            cov = within if within is not None else self.pooled_cov()
        if self.degrees == 0:
            cov = ISOTROPIC * identity
        if shrinkage:
            if target == "pooled":
                other = within if within is not None else self.pooled_cov()
            else:
                other = identity * (cov.sum() if self.form == "diag" else np.trace(cov)) / self.width
            cov = (1.0 - shrinkage) * cov + shrinkage * other
        return self._means[c].copy(), cov

    def affine(self, weight: Array, bias: Array) -> ClassMoments:
        """Return the statistics of ``V a + v`` from those of ``a``: means ``V mu + v``, scatters ``V M2 V^T``.

        Where the last layer before the head is linear, statistics of its narrower input say the same in fewer bytes.

        Parameters
        ----------
        weight : ndarray, (d', d)
            V.
        bias : ndarray, (d',)
            v.

        Raises
        ------
        ValueError
            Shapes that do not fit, or the ``diag`` form, which does not determine the result.
        """
        if self.form == "diag":
            raise ValueError("diagonal statistics cannot be mapped through a matrix; use full or pooled ones")
        v, shift = np.asarray(weight, dtype=np.float64), np.asarray(bias, dtype=np.float64)
        if v.ndim != 2 or v.shape[1] != self.width or shift.shape != v.shape[:1]:
            raise ValueError(f"weight (d', {self.width}) and bias (d',) are needed, got {v.shape} and {shift.shape}")
        result = ClassMoments(self.num_classes, v.shape[0], self.form, self.buffer_rows)
        result._counts = self.counts
        seen = self._counts > 0
        matrix = torch.from_numpy(v)
        result._means[seen] = (torch.from_numpy(self._means[seen]) @ matrix.T).numpy() + shift
        for key in self._scatter:
            mapped = matrix @ torch.from_numpy(self.scatter(key)) @ matrix.T
            result._scatter[key] = np.asfortranarray((0.5 * (mapped + mapped.T)).numpy())
        return result

    def _absorb(self, other: ClassMoments) -> None:
        """Merge another client's statistics into these."""
        other._flush()
        for key, scatter in other._scatter.items():
            kept = self._kept(key)
            kept += scatter
        for c in other.classes.tolist():
            before, count = int(self._counts[c]), int(other._counts[c])
            total = before + count
            shift = other._means[c] - self._means[c]
            if before:
                self._add_rows(c, shift[None, :] * (before * count / total) ** 0.5)
            self._means[c] += shift * (count / total)
            self._counts[c] = total


def moments(
    features: Array | torch.Tensor, labels: Array | torch.Tensor, num_classes: int, form: Form = "full"
) -> ClassMoments:
    """Return the statistics of features that are all at hand; see `ClassMoments`.

    Parameters
    ----------
    features : ndarray or Tensor, (N, d), floating point
        Features.
    labels : ndarray or Tensor, (N,), integer
        Classes from 0 to ``num_classes - 1``.
    num_classes : int
        C.
    form : {"full", "diag", "pooled"}
        What is kept of the scatter.
    """
    if features.ndim != 2:
        raise ValueError(f"features must have shape (N, d), got {tuple(features.shape)}")
    result = ClassMoments(num_classes, features.shape[1], form)
    result.update(features, labels)
    result._flush()
    return result


def _check_alike(parts: Sequence[ClassMoments]) -> None:
    kinds = {(part.num_classes, part.width, part.form) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"statistics of equal classes, width and form are needed, got {sorted(kinds)}")


def merge(a: ClassMoments, b: ClassMoments) -> ClassMoments:
    """Return the statistics of two clients' data together; associative and commutative up to rounding.

    Parameters
    ----------
    a, b : ClassMoments
        Statistics of equal classes, width and form; neither is changed.
    """
    _check_alike([a, b])
    result = ClassMoments(a.num_classes, a.width, a.form, a.buffer_rows)
    result._absorb(a)
    result._absorb(b)
    return result


def pool(parts: Sequence[ClassMoments]) -> ClassMoments:
    """Return the statistics of all clients' data together (Eq. 3 and 4), equal to those of the pooled features.

    The scatters are added, and the spread of the clients' means is one product of the centred means for each class.

    Parameters
    ----------
    parts : sequence of ClassMoments
        At least one client's statistics, all of equal classes, width and form; none is changed.
    """
    if not parts:
        raise ValueError("no statistics to pool")
    _check_alike(parts)
    result = ClassMoments(parts[0].num_classes, parts[0].width, parts[0].form, parts[0].buffer_rows)
    counts = np.stack([part.counts for part in parts])
    for part in parts:
        for key, scatter in part._scatter.items():
            kept = result._kept(key)
            kept += scatter
    _pool_means(result, counts, [part._means for part in parts])
    return result


def _pool_means(result: ClassMoments, counts: Int64, means: Sequence[Float64]) -> None:
    """Set counts and means of ``result`` and add the scatter of the clients' means around them."""
    result._counts = counts.sum(axis=0)
    for c in np.flatnonzero(result._counts).tolist():
        members = np.flatnonzero(counts[:, c]).tolist()
        weight = counts[members, c].astype(np.float64)
        rows = np.stack([means[k][c] for k in members])
        # Centring on the first mean keeps clients with equal means exactly equal.
        mean = rows[0] + (weight[:, None] * (rows - rows[0])).sum(axis=0) / weight.sum()
        result._means[c] = mean
        if len(members) > 1:
            result._add_rows(c, np.sqrt(weight)[:, None] * (rows - mean))
        else:
            result._kept(c)


# What travels -------------------------------------------------------------------------------------


def form_of(mode: Mode) -> Form:
    """Return the form in which statistics are accumulated for a mode of sending.

    Parameters
    ----------
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        As in `to_arrays`.
    """
    if mode not in MODES:
        raise ValueError(f"covariance mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode if mode in ("diag", "pooled") else "full"


def _low_rank(cov: Float64, rank: int) -> tuple[Float64, Float64]:
    """Return the leading ``rank`` eigenvectors times the roots of their eigenvalues, and the variances left over."""
    values, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(cov)))
    kept = min(rank, values.size)
    factor = np.zeros((rank, values.size))
    factor[:kept] = (vectors[:, ::-1][:, :kept] * np.sqrt(np.maximum(values[::-1][:kept], 0.0))).T
    rest: Float64 = np.maximum(np.diag(cov) - np.einsum("ri,ri->i", factor, factor), 0.0)
    return factor, rest


def to_arrays(
    statistics: ClassMoments,
    mode: Mode = "full",
    rank: int = 8,
    dtype: npt.DTypeLike = np.float32,
    centres: Array | None = None,
) -> dict[str, Array]:
    """Return what a client sends.

    ==============  ===========================================================================================
    ``full``        ``ids`` (S,), ``count`` (S,), ``mean`` (S, d), ``cov`` (S, d (d + 1) / 2) packed
    ``diag``        the same with ``cov`` (S, d), the variances
    ``lowrank``     ``ids``, ``count``, ``mean``, ``factor`` (S, r, d), ``rest`` (S, d):
                    ``cov ~ factor^T factor + diag(rest)``, with the variances exact
    ``pooled``      ``ids``, ``count``, ``mean``, ``cov`` (d (d + 1) / 2,), the within-class covariance
    ``sums``        ``count`` (C,), ``sum`` (C, d), ``square`` (C, d (d + 1) / 2), always float64: see `sums`
    ==============  ===========================================================================================

    S is the number of classes seen, ascending in ``ids``; classes not seen are left out, except from ``sums``.

    Parameters
    ----------
    statistics : ClassMoments
        In the form that `form_of` names.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        What is sent of the covariances.
    rank : int
        r of ``lowrank``.
    dtype : dtype
        Precision of means and covariances.
    centres : ndarray, (C, d), optional
        What ``sums`` are taken around.

    Returns
    -------
    dict of str to ndarray
        Counts and ids are int64.
    """
    if statistics.form != form_of(mode):
        raise ValueError(f"mode {mode!r} needs statistics of form {form_of(mode)!r}, got {statistics.form!r}")
    if mode == "sums":
        return sums(statistics, centres)
    ids = statistics.classes
    arrays: dict[str, Array] = {
        "ids": ids,
        "count": statistics.counts[ids],
        "mean": statistics.means[ids].astype(dtype),
    }
    width = statistics.width
    if mode == "pooled":
        arrays["cov"] = pack(statistics.pooled_cov()).astype(dtype)
    elif mode == "lowrank":
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        pairs = [_low_rank(statistics.cov(c), rank) for c in ids]
        arrays["factor"] = np.array([factor for factor, _ in pairs], dtype=dtype).reshape(ids.size, rank, width)
        arrays["rest"] = np.array([rest for _, rest in pairs], dtype=dtype).reshape(ids.size, width)
    else:
        arrays["cov"] = np.empty((ids.size, width if mode == "diag" else width * (width + 1) // 2), dtype=dtype)
        for row, c in zip(arrays["cov"], ids):
            row[:] = statistics.cov(c) if mode == "diag" else pack(statistics.cov(c))
    return arrays


def _finite(array: Array) -> bool:
    """Say whether all entries are finite; a finite sum shows it in one cheap pass, an overflowed one does not."""
    return bool(torch.isfinite(as_tensor(array).sum())) or bool(np.isfinite(array).all())


def _checked(arrays: Mapping[str, Array], mode: Mode, num_classes: int, width: int) -> None:
    """Refuse a reply whose names, shapes or values cannot be statistics."""
    triangle = width * (width + 1) // 2
    if mode == "sums":
        shapes: dict[str, tuple[int, ...]] = {
            "count": (num_classes,),
            "sum": (num_classes, width),
            "square": (num_classes, triangle),
        }
    else:
        seen = arrays["ids"].shape[0] if "ids" in arrays and arrays["ids"].ndim == 1 else 0
        shapes = {"ids": (seen,), "count": (seen,), "mean": (seen, width)}
        if mode == "lowrank":
            rank = arrays["factor"].shape[1] if "factor" in arrays and arrays["factor"].ndim == 3 else 0
            shapes |= {"factor": (seen, rank, width), "rest": (seen, width)}
        else:
            shapes["cov"] = {"full": (seen, triangle), "diag": (seen, width), "pooled": (triangle,)}[mode]
    if set(arrays) != set(shapes):
        raise ValueError(f"statistics of mode {mode!r} consist of {sorted(shapes)}, got {sorted(arrays)}")
    for name, shape in shapes.items():
        array = arrays[name]
        kind = np.integer if name in ("ids", "count") else np.floating
        if array.shape != shape or not np.issubdtype(array.dtype, kind):
            raise ValueError(
                f"array {name!r} of statistics must be {kind.__name__} of shape {shape}, "
                f"got {array.dtype} of shape {array.shape}"
            )
        if kind is np.floating and not _finite(array):
            raise ValueError(f"array {name!r} of statistics has values that are not finite")
    if mode == "sums":
        if (arrays["count"] < 0).any():
            raise ValueError("counts of statistics must not be negative")
        return
    ids = arrays["ids"]
    if (arrays["count"] < 1).any():
        raise ValueError("counts of statistics must be positive: leave out the classes that were not seen")
    if (ids < 0).any() or (ids >= num_classes).any() or np.unique(ids).size != ids.size:
        raise ValueError(
            f"class ids of statistics must be distinct and lie in 0..{num_classes - 1}, got {ids.tolist()}"
        )


def problem_of(arrays: Mapping[str, Array], mode: Mode, num_classes: int, width: int) -> str | None:
    """Say why arrays that came from elsewhere cannot be statistics of a mode, or return None.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        What was received.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        What was asked for, see `to_arrays`.
    num_classes, width : int
        C and d.
    """
    try:
        _checked(arrays, mode, num_classes, width)
    except ValueError as e:
        return str(e)
    return None


class MomentsPool:
    """Pooled statistics of the replies of all clients, added as they arrive.

    Memory, however many clients reply: for each class seen one packed float64 covariance (``pooled``: one in all), and
    the means of at most ``REPLIES`` replies. The result is that of `pool`; the order of the replies matters in the last
    bits only. In the mode ``sums`` nothing but the totals over clients enters the result.

    Parameters
    ----------
    num_classes, width : int
        C and d.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        What the clients send, see `to_arrays`.
    centres : ndarray, (C, d), optional
        What the clients subtracted, in the mode ``sums``; see `sums`.
    """

    def __init__(self, num_classes: int, width: int, mode: Mode = "full", centres: Array | None = None) -> None:
        self.form = form_of(mode)
        self.num_classes, self.width, self.mode, self.centres = num_classes, width, mode, centres
        self._totals: dict[str, Array] = {}
        self._counts: list[Int64] = []
        self._means: list[Float64] = []
        self._scatter: dict[int, torch.Tensor] = {}
        self._widened = torch.empty(0, dtype=torch.float64)

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Add one client's reply; nothing is changed when it is refused.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            As from `to_arrays`, in any floating precision. They are only read.

        Raises
        ------
        ValueError
            Names, shapes, counts, class ids or values that cannot be statistics of this mode.
        """
        _checked(arrays, self.mode, self.num_classes, self.width)
        if self.mode == "sums":
            for name, array in arrays.items():
                if name in self._totals:
                    self._totals[name] += array
                else:
                    self._totals[name] = array.astype(np.int64 if name == "count" else np.float64)
            return
        if len(self._counts) == REPLIES:
            self._condense()
        ids, count = arrays["ids"], arrays["count"]
        counts = np.zeros(self.num_classes, dtype=np.int64)
        counts[ids] = count
        means = np.zeros((self.num_classes, self.width))
        means[ids] = arrays["mean"]
        self._counts.append(counts)
        self._means.append(means)
        if self.mode == "pooled":
            self._accumulate(0, as_tensor(arrays["cov"]), float(counts.sum() - ids.size))
            return
        for row, c in enumerate(ids.tolist()):
            if self.mode == "lowrank":
                factor = arrays["factor"][row].astype(np.float64)
                cov = torch.from_numpy(pack(factor.T @ factor + np.diag(arrays["rest"][row].astype(np.float64))))
            else:
                cov = as_tensor(arrays["cov"][row])
            # With N - 1 = 0 the covariance of a single sample, whatever was sent, has no weight.
            self._accumulate(c, cov, float(counts[c] - 1))

    def _condense(self) -> None:
        """Put one mean a class in the place of those of many replies, and their spread around it into the scatter."""
        counts = np.stack(self._counts)
        means = np.zeros((self.num_classes, self.width))
        for c in np.flatnonzero(counts.any(axis=0)).tolist():
            one = ClassMoments(1, self.width, self.form)
            _pool_means(one, counts[:, [c]], [mean[[c]] for mean in self._means])
            means[c], spread = one._means[0], one.scatter(0)
            key = 0 if self.form == "pooled" else c
            self._accumulate(key, torch.from_numpy(spread if self.form == "diag" else pack(spread)), 1.0)
        self._counts, self._means = [counts.sum(axis=0)], [means]

    def _accumulate(self, key: int, scatter: torch.Tensor, weight: float) -> None:
        if key not in self._scatter:
            self._scatter[key] = torch.zeros(scatter.shape, dtype=torch.float64)
        if self._widened.shape != scatter.shape:
            self._widened = torch.empty(scatter.shape, dtype=torch.float64)
        # Widened first: an addition of mixed precision converts entry by entry.
        self._scatter[key].add_(self._widened.copy_(scatter), alpha=weight)

    def moments(self) -> ClassMoments:
        """Return the statistics of all replies added so far.

        Raises
        ------
        ValueError
            No reply was added.
        """
        if self._totals:
            return from_sums(self._totals["count"], self._totals["sum"], self._totals["square"], self.centres)
        if not self._counts:
            raise ValueError("no statistics to pool")
        result = ClassMoments(self.num_classes, self.width, self.form)
        for key, scatter in self._scatter.items():
            flat = scatter.numpy()
            result._scatter[key] = flat.copy() if self.form == "diag" else unpack(flat, self.width).T
        _pool_means(result, np.stack(self._counts), self._means)
        return result


def from_arrays(arrays: Mapping[str, Array], num_classes: int, width: int, mode: Mode = "full") -> ClassMoments:
    """Return the statistics that one client sent; the inverse of `to_arrays`.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        A reply.
    num_classes, width : int
        C and d.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        Its mode.
    """
    single = MomentsPool(num_classes, width, mode)
    single.add(arrays)
    return single.moments()


def sums(statistics: ClassMoments, centres: Array | None = None) -> dict[str, Array]:
    """Return plain sums over samples, which are additive over clients and so fit secure aggregation.

    Without centres, ``S2 - S1 S1^T / N`` loses about as many digits as the squared means exceed the variances. Two
    exchanges avoid it: first the sums without centres give the global means, then the sums around those, again from the
    statistics at hand, have nothing left to cancel.

    Parameters
    ----------
    statistics : ClassMoments
        In the ``full`` form.
    centres : ndarray, (C, d), optional
        Subtracted from every feature of the class; zero if omitted.

    Returns
    -------
    dict of str to ndarray
        ``count`` (C,) int64, ``sum`` (C, d) float64 = sum of ``z - centre``, ``square`` (C, d (d + 1) / 2) float64 =
        packed sum of ``(z - centre)(z - centre)^T``; zeros for classes not seen, so that the pattern shows nothing.
    """
    if statistics.form != "full":
        raise ValueError(f"sums need statistics of form 'full', got {statistics.form!r}")
    counts = statistics.counts
    offset = statistics.means - _centres(centres, statistics.num_classes, statistics.width)
    offset[counts == 0] = 0.0
    square = np.zeros((statistics.num_classes, statistics.width * (statistics.width + 1) // 2))
    for c in np.flatnonzero(counts).tolist():
        square[c] = pack(statistics.scatter(c) + counts[c] * np.outer(offset[c], offset[c]))
    return {"count": counts, "sum": counts[:, None] * offset, "square": square}


def from_sums(count: Array, total: Array, square: Array, centres: Array | None = None) -> ClassMoments:
    """Return the statistics that sums over samples stand for; the inverse of `sums`.

    Parameters
    ----------
    count : ndarray, (C,), integer
        N.
    total : ndarray, (C, d)
        Sum of ``z - centre``.
    square : ndarray, (C, d (d + 1) / 2)
        Packed sum of ``(z - centre)(z - centre)^T``.
    centres : ndarray, (C, d), optional
        As given to `sums`.
    """
    num_classes, width = total.shape
    result = ClassMoments(num_classes, width)
    result._counts = np.asarray(count, dtype=np.int64).copy()
    middle = _centres(centres, num_classes, width)
    for c in np.flatnonzero(result._counts).tolist():
        n = int(result._counts[c])
        first = np.asarray(total[c], dtype=np.float64)
        result._means[c] = middle[c] + first / n
        scatter = result._kept(c)
        if n > 1:  # one sample has no deviation; its difference of squares would leave rounding
            scatter += unpack(np.asarray(square[c], dtype=np.float64), width) - np.outer(first, first) / n
    return result


def _centres(centres: Array | None, num_classes: int, width: int) -> Float64:
    if centres is None:
        return np.zeros((num_classes, width))
    if centres.shape != (num_classes, width):
        raise ValueError(f"centres must have shape {(num_classes, width)}, got {centres.shape}")
    return centres.astype(np.float64)


# Sampling -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """A matrix F with ``F F^T = Sigma + jitter I``.

    Attributes
    ----------
    matrix : ndarray, (d, d), or (d,) for a diagonal covariance, float64
        F.
    jitter : float
        What had to be added to the diagonal; 0 unless a wide covariance was singular.
    triangular : bool
        F is lower triangular.
    """

    matrix: Float64
    jitter: float
    triangular: bool


def factorise(cov: Array, method: Method = "auto") -> Factor:
    """Return a factor of a covariance that may be singular.

    ``auto`` takes the Cholesky factor of a definite covariance. A singular one (fewer samples than features, or
    features that are a linear map of fewer) has the symmetric root ``U max(l, 0)^(1/2) U^T`` up to d = 512: exact, and
    the same whatever signs and rotations the eigenvectors come in. Wider ones get a jitter of 1e-8, 1e-7, ... times the
    mean variance on the diagonal until Cholesky succeeds, and the symmetric root if none up to 1e-2 does.

    Parameters
    ----------
    cov : ndarray, (d, d) symmetric, or (d,) variances
        Covariance.
    method : {"auto", "eigh", "cholesky"}
        ``eigh`` always takes the symmetric root, ``cholesky`` jitter at any width.

    Returns
    -------
    Factor

    Raises
    ------
    ValueError
        Not square or not finite, or an unknown method.
    """
    sigma = np.asarray(cov, dtype=np.float64)
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if not np.isfinite(sigma).all():
        raise ValueError("the covariance has values that are not finite")
    if sigma.ndim == 1:
        return Factor(np.sqrt(np.maximum(sigma, 0.0)), 0.0, False)
    if sigma.ndim != 2 or sigma.shape[0] != sigma.shape[1]:
        raise ValueError(f"a covariance must be square, got shape {sigma.shape}")
    width = sigma.shape[0]
    scale = float(np.trace(sigma)) / width
    if scale <= 0.0:
        return Factor(np.zeros_like(sigma), 0.0, True)
    if method != "eigh":
        wide = method == "cholesky" or width > EIGH_LIMIT
        for jitter in (0.0, *(scale * 10.0**power for power in range(-8, -1) if wide)):
            root = _cholesky(sigma, jitter, PIVOT_LIMIT * scale)
            if root is not None:
                return Factor(root, jitter, True)
    values, vectors = torch.linalg.eigh(torch.from_numpy(sigma))
    return Factor((vectors * values.clamp_min(0.0).sqrt() @ vectors.T).numpy(), 0.0, False)


def _cholesky(sigma: Float64, jitter: float, smallest: float) -> Float64 | None:
    """Return the lower Cholesky factor, or None if a pivot is not above what rounding could make of zero."""
    shifted = torch.from_numpy(sigma + jitter * np.eye(sigma.shape[0]) if jitter else sigma)
    root, info = torch.linalg.cholesky_ex(shifted)
    if int(info) != 0 or float(root.diagonal().min()) ** 2 <= smallest:
        return None
    lower: Float64 = root.numpy()
    return lower


def draw(mean: Array, factor: Factor, eps: Float64, dtype: npt.DTypeLike = np.float32) -> Array:
    """Return ``mean + F eps`` for every row of ``eps``, computed in float64.

    Parameters
    ----------
    mean : ndarray, (d,)
        Mean.
    factor : Factor
        From `factorise`.
    eps : ndarray, (m, d), float64
        Standard normal numbers.
    dtype : dtype
        Of the result.

    Returns
    -------
    ndarray, (m, d)
    """
    middle = torch.from_numpy(np.asarray(mean, dtype=np.float64))
    root, rows = torch.from_numpy(factor.matrix), torch.from_numpy(eps)
    if root.ndim == 1:
        drawn = middle + rows * root
    elif factor.triangular:
        # The zeros above the diagonal are not multiplied; like its symmetric update, BLAS's triangular product gives
        # the same bits with any number of threads.
        drawn = torch.from_numpy(dtrmm(1.0, factor.matrix.T, eps.T, side=0, lower=0, trans_a=1).T) + middle
    else:
        drawn = torch.addmm(middle, rows, root.T)
    result: Array = drawn.numpy().astype(dtype, copy=False)
    return result


def sample(
    mean: Array,
    cov: Array | Factor,
    m: int,
    seed: int,
    label: int,
    method: Method = "auto",
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    """Return m draws of the Gaussian that stands for one class.

    Every class has its own generator, made from ``seed`` and ``label``: a larger m extends the same stream, and no
    class depends on how many draws another one had.

    Parameters
    ----------
    mean : ndarray, (d,)
        Mean.
    cov : ndarray, (d, d) or (d,), or Factor
        Covariance, variances, or a factor of them.
    m : int
        Number of draws.
    seed, label : int
        Seed of the run and class, both not negative.
    method : {"auto", "eigh", "cholesky"}
        As in `factorise`.
    dtype : dtype
        Of the result; draws and products are float64.

    Returns
    -------
    ndarray, (m, d)
    """
    if m < 0:
        raise ValueError(f"the number of draws must not be negative, got {m}")
    factor = cov if isinstance(cov, Factor) else factorise(cov, method)
    middle = np.asarray(mean, dtype=np.float64)
    generator = np.random.default_rng([seed, STREAM, label])
    drawn = np.empty((m, middle.size), dtype=dtype)
    for start in range(0, m, DRAWS):
        rows = drawn[start : start + DRAWS]
        rows[:] = draw(middle, factor, generator.standard_normal(rows.shape), dtype)
    return drawn


def allot(counts: Int64, samples: int, mode: Literal["fixed", "proportional"] = "fixed") -> Int64:
    """Return M_c, how many virtual features each class gets.

    Parameters
    ----------
    counts : ndarray, (C,), integer
        N_c; classes of which nothing was seen get none.
    samples : int
        M, mean number of a class seen.
    mode : {"fixed", "proportional"}
        M for every class, or shares of the same total as ``N_c / |D|``, rounded, and at least 1.

    Returns
    -------
    ndarray, (C,), int64
    """
    seen = counts > 0
    if mode == "fixed":
        return np.where(seen, samples, 0)
    share = counts / max(1, counts.sum())
    return np.where(seen, np.maximum(1, np.rint(samples * seen.sum() * share)), 0).astype(np.int64)


def virtual_features(
    statistics: ClassMoments,
    per_class: int | Sequence[int] | Int64,
    seed: int,
    shrinkage: float = 0.0,
    target: Literal["pooled", "isotropic"] = "pooled",
    method: Method = "auto",
) -> tuple[npt.NDArray[np.float32], Int64, dict[int, float]]:
    """Return a set of virtual features, drawn from the Gaussians of all classes that were seen.

    Parameters
    ----------
    statistics : ClassMoments
        Pooled statistics.
    per_class : int, or (C,) of int
        Draws of each class. Classes of which nothing was seen get none.
    seed : int
        Seed of the run.
    shrinkage, target
        As in `ClassMoments.gaussian`.
    method : {"auto", "eigh", "cholesky"}
        As in `factorise`.

    Returns
    -------
    features : ndarray, (S, d), float32
        Sorted by class; memory is ``4 S d`` bytes and one d x d matrix at a time.
    labels : ndarray, (S,), int64
    jitter : dict of int to float
        What had to be added to the diagonal of which class's covariance, where it was not zero.
    """
    draws = np.broadcast_to(np.asarray(per_class, dtype=np.int64), (statistics.num_classes,))
    if (draws < 0).any():
        raise ValueError("the numbers of draws must not be negative")
    classes = statistics.classes
    labels = np.repeat(classes, draws[classes])
    features = np.empty((labels.size, statistics.width), dtype=np.float32)
    jitter: dict[int, float] = {}
    needs_pooled = (statistics.counts[classes] == 1).any() or (shrinkage > 0 and target == "pooled")
    within = statistics.pooled_cov() if needs_pooled else None
    end = 0
    common: Factor | None = None
    for c in classes.tolist():
        mean, cov = statistics.gaussian(c, shrinkage, target, within)
        factor = common if common is not None else factorise(cov, method)
        if statistics.form == "pooled":
            common = factor
        if factor.jitter:
            jitter[c] = factor.jitter
        start, end = end, end + int(draws[c])
        features[start:end] = sample(mean, factor, int(draws[c]), seed, c)
    return features, labels, jitter


@overload
def tukey(z: Array, power: float = 0.5) -> Array: ...
@overload
def tukey(z: torch.Tensor, power: float = 0.5) -> torch.Tensor: ...
def tukey(z: Array | torch.Tensor, power: float = 0.5) -> Array | torch.Tensor:
    """Return ``max(z, 0)^power`` entry by entry: ReLU, then Tukey's ladder of powers, which makes features less skewed.

    Parameters
    ----------
    z : ndarray or Tensor
        Features of any sign.
    power : float
        Positive; the paper uses 0.5.
    """
    if power <= 0:
        raise ValueError(f"the power must be positive, got {power}")
    if isinstance(z, torch.Tensor):
        positive = z.clamp_min(0)
        return positive.sqrt() if power == 0.5 else positive.pow(power)
    kept = np.maximum(z, 0)
    result: Array = np.sqrt(kept) if power == 0.5 else kept**power
    return result


# Analyses -----------------------------------------------------------------------------------------


def _spreads(directions: Float64, cov: Float64) -> Float64:
    """Return the standard deviation along every direction, (L,)."""
    along = directions**2 @ cov if cov.ndim == 1 else np.einsum("ld,ld->l", directions @ cov, directions)
    spread: Float64 = np.sqrt(np.maximum(along, 0.0))
    return spread


def sliced_wasserstein(
    mean_a: Array, cov_a: Array, mean_b: Array, cov_b: Array, directions: Array
) -> tuple[float, Float64]:
    """Return the sliced Wasserstein-2 distance of two Gaussians (paper, Section 4, Figure 6).

    Along a unit vector two Gaussians are normal, with squared distance ``(t.mu - t.mu')^2 + (s - s')^2``.

    Parameters
    ----------
    mean_a, mean_b : ndarray, (d,)
        Means.
    cov_a, cov_b : ndarray, (d, d) or (d,)
        Covariances.
    directions : ndarray, (L, d)
        Unit vectors.

    Returns
    -------
    distance : float
        Root of the mean of the squared distances.
    squared : ndarray, (L,)
        Squared distance along every direction.
    """
    unit = np.asarray(directions, dtype=np.float64)
    shift = unit @ (np.asarray(mean_a, dtype=np.float64) - np.asarray(mean_b, dtype=np.float64))
    squared = shift**2 + (_spreads(unit, np.asarray(cov_a)) - _spreads(unit, np.asarray(cov_b))) ** 2
    return float(np.sqrt(squared.mean())), squared


def separability(statistics: ClassMoments, seed: int, directions: int = 500) -> float:
    """Return the mean sliced Wasserstein distance over all pairs of classes (paper, Figure 6).

    Parameters
    ----------
    statistics : ClassMoments
        Pooled statistics of at least two classes.
    seed : int
        Seed of the random directions, which are the same for all pairs.
    directions : int
        Number of directions L.
    """
    classes = statistics.classes
    if classes.size < 2:
        raise ValueError(f"separability needs at least two classes, got {classes.size}")
    unit = np.random.default_rng([seed, STREAM]).standard_normal((directions, statistics.width))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    middles = statistics.means[classes] @ unit.T
    spreads = np.stack([_spreads(unit, statistics.cov(c)) for c in classes])
    distances = [
        np.sqrt(((middles[i] - middles[j]) ** 2 + (spreads[i] - spreads[j]) ** 2).mean())
        for i, j in itertools.combinations(range(classes.size), 2)
    ]
    return float(np.mean(distances))


def linear_cka(x: Array, y: Array) -> float:
    """Return the linear centred kernel alignment of two layers' features of the same samples (paper, Figure 1).

    ``||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F)`` of the centred features (Kornblith et al., ICML 2019, Eq. 5): 1 for
    features equal up to rotation and scale.

    Parameters
    ----------
    x, y : ndarray, (N, d) and (N, d')
        Features.

    Returns
    -------
    float
        In 0..1; NaN if one of them does not vary at all.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[0] != y.shape[0]:
        raise ValueError(f"two matrices with equal numbers of rows are needed, got {x.shape} and {y.shape}")
    a = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    b = y.astype(np.float64) - y.mean(axis=0, dtype=np.float64)
    if x.shape[0] < max(x.shape[1], y.shape[1]):  # the same three numbers from N x N matrices
        a, b = a @ a.T, b @ b.T
        cross, own_a, own_b = (a * b).sum(), np.linalg.norm(a), np.linalg.norm(b)
    else:
        cross, own_a, own_b = np.linalg.norm(b.T @ a) ** 2, np.linalg.norm(a.T @ a), np.linalg.norm(b.T @ b)
    with np.errstate(invalid="ignore"):
        return float(np.divide(cross, own_a * own_b))
