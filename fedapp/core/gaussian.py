"""Per-class Gaussian statistics of features: accumulate, send, pool (CCVR). `virtual` draws from them.

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021,
arXiv:2106.05001, Section 4 and Appendix A.

==================  =======================================================================================
``N_ck``            number of samples of class c on client k; ``N_c`` their sum over clients
``mu_ck``           mean of the d features (Eq. 2), ``mu_c`` the pooled mean (Eq. 3)
``Sigma_ck``        covariance with divisor ``N_ck - 1`` (Eq. 2), ``Sigma_c`` the pooled covariance (Eq. 4)
``M2``              scatter: the sum of squared deviations ``(N - 1) Sigma``; it is accumulated here
==================  =======================================================================================

Equation 4 as printed subtracts ``mu_c mu_c^T`` from a sum of ``mu_ck mu_ck^T``. Where means are large compared with the
spread, that difference loses all digits. The same equation in centred form is used instead:
``(N_c - 1) Sigma_c = sum_k (N_ck - 1) Sigma_ck + sum_k N_ck (mu_ck - mu_c)(mu_ck - mu_c)^T``. All of its terms are
positive semidefinite. Accumulation batch by batch is the same rule with batches in the place of clients (Chan, Golub,
LeVeque 1979). Everything is float64: scatters are sums of squares over thousands of rows, and the covariances are often
singular, with zero eigenvalues that the rounding of float32 would turn into negative ones.

Statistics have three forms: ``full`` (one scatter matrix per class), ``diag`` (only its diagonal) and ``pooled`` (one
matrix for the deviations of all classes from their own means, as in linear discriminant analysis).

Runs must be equal bit for bit, whatever the number of threads. The last bits of PyTorch's products depend on it, but
every process sets it (``torch.set_num_threads``). BLAS has a number of its own, so only those of its functions are
called that give the same bits with any number: the symmetric update ``dsyrk``, which is half the work of a full
product, and the product of a vector with a matrix.

The file is long because each rule has three forms, which are read side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import as_tensor
from fedapp.errors import Impossible
from fedapp.lazy import blas, lapack, torch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Form = Literal["full", "diag", "pooled"]
Mode = Literal["full", "diag", "lowrank", "pooled", "sums"]

BUFFER = 8192
"""Rows of features that are gathered before they are added to the scatters."""
BLOCK = 512
"""Rows that are widened to float64, centred and multiplied at a time: they fit the cache."""
REPLIES = 64
"""Replies whose means a pool holds before it merges them into one."""


# Packed symmetric matrices ------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _above(width: int) -> npt.NDArray[np.bool_]:
    """Return which entries of a square lie above its diagonal."""
    return ~np.tri(width, dtype=bool)


@lru_cache(maxsize=4)
def _places(width: int) -> Int64:
    """Return the places of a square's entries in the packed form, (d, d)."""
    rows, columns = np.triu_indices(width)
    places = np.empty((width, width), dtype=np.int64)
    places[rows, columns] = places[columns, rows] = np.arange(rows.size)
    return places


def pack(square: Array) -> Array:
    """Return the upper triangles of symmetric matrices (..., d, d), row by row with the diagonal.

    Returns
    -------
    ndarray, (..., d (d + 1) / 2)
        In the order of ``numpy.triu_indices(d)`` and the input's dtype. Entries below the diagonal are not read.
    """
    width = square.shape[-1]
    packed = np.empty((*square.shape[:-2], width * (width + 1) // 2), square.dtype)
    [trttp] = lapack.get_lapack_funcs(["trttp"], [square])
    for place in np.ndindex(square.shape[:-2]):  # columns of a lower triangle are rows of the upper one
        packed[place] = trttp(square[place].T, uplo="L")[0]
    return packed


def unpack(packed: Array, width: int) -> Array:
    """Return the exactly symmetric matrices (..., d, d) whose upper triangles `pack` returned; ``width`` is d."""
    return packed.take(_places(width), axis=-1)


def diagonal(width: int) -> Int64:
    """Return where the packed form of a symmetric matrix holds its diagonal, (d,)."""
    rows = np.arange(width)
    return rows * width - rows * (rows - 1) // 2


# Accumulating -------------------------------------------------------------------------------------


class ClassMoments:
    """Count, mean and scatter of every class, from features seen batch by batch.

    Memory: one d x d float64 matrix per class seen (``pooled``: one in all; ``diag``: d numbers per class), at most
    ``BUFFER`` rows of features in their own precision (twice while they are added), and ``BLOCK`` rows in float64.
    Time: one symmetric product per class each time the buffer is emptied. Rows are gathered first, because a batch with
    few rows per class would spend its time on moving the d x d matrices.

    Parameters
    ----------
    num_classes, width : int
        C and d.
    form : {"full", "diag", "pooled"}
        What is kept of the scatter.
    """

    def __init__(self, num_classes: int, width: int, form: Form = "full") -> None:
        self.num_classes, self.width, self.form = num_classes, width, form
        self._counts = np.zeros(num_classes, dtype=np.int64)
        self._means = np.zeros((num_classes, width), dtype=np.float64)
        # Column-major squares of which only the upper triangle is valid (what dsyrk writes), or rows of d variances.
        self._scatter: dict[int, Float64] = {}
        self._within: Float64 | None = None
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._waiting_rows = 0

    @property
    def counts(self) -> Int64:
        """Samples seen of every class, (C,)."""
        self._flush()
        return self._counts.copy()

    @property
    def means(self) -> Float64:
        """Mean features of every class, (C, d); zeros for a class without samples."""
        self._flush()
        return self._means.copy()

    @property
    def classes(self) -> Int64:
        """Classes with at least one sample, ascending."""
        return np.flatnonzero(self.counts)

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the pooled covariance: ``sum_c (N_c - 1)`` over the classes with samples."""
        counts = self.counts
        return int(counts.sum() - np.count_nonzero(counts))

    def update(self, features: Array | torch.Tensor, labels: Array | torch.Tensor) -> None:
        """Add a batch.

        Parameters
        ----------
        features : ndarray or Tensor, (B, d), floating point
            Kept by reference until the buffer is emptied: must not be changed afterwards.
        labels : ndarray or Tensor, (B,), integer
            Classes from 0 to C - 1.

        Raises
        ------
        ValueError
            Shapes that do not fit. Features that are not finite are found when the buffer is emptied, at the latest
            when a result is asked for.
        """
        rows, given = (
            part.detach().cpu() if isinstance(part, torch.Tensor) else as_tensor(np.asarray(part))
            for part in (features, labels)
        )
        if rows.ndim != 2 or rows.shape[1] != self.width or given.shape != rows.shape[:1]:
            got = f"{tuple(rows.shape)} and {tuple(given.shape)}"
            raise ValueError(f"features (B, {self.width}) and labels (B,) are needed, got {got}")
        if given.is_floating_point() or not rows.is_floating_point():
            raise ValueError(f"features must be floating point and labels integers, got {rows.dtype} and {given.dtype}")
        if given.numel() == 0:
            return
        self._waiting.append((rows, given))
        self._waiting_rows += rows.shape[0]
        if self._waiting_rows >= BUFFER:
            self._flush()

    def _flush(self) -> None:
        """Add the rows in the buffer to the statistics, class by class."""
        if not self._waiting:
            return
        rows = torch.cat([batch for batch, _ in self._waiting]) if len(self._waiting) > 1 else self._waiting[0][0]
        labels = torch.cat([given for _, given in self._waiting]).long()
        self._waiting, self._waiting_rows, self._within = [], 0, None
        order = torch.argsort(labels, stable=True)
        counts = torch.bincount(labels, minlength=self.num_classes).tolist()
        ends = list(itertools.accumulate(counts))
        # All blocks are gathered, widened, centred and multiplied in the same memory, which stays in the cache.
        size = min(BLOCK, max(counts))
        gathered = torch.empty(size, self.width, dtype=rows.dtype)
        scratch = torch.empty(size + 1, self.width, dtype=torch.float64)
        for c, (count, end) in enumerate(zip(counts, ends)):
            for start in range(end - count, end, size):
                chosen = order[start : min(start + size, end)]
                self._add_block(c, torch.index_select(rows, 0, chosen, out=gathered[: chosen.numel()]), scratch)

    def _add_block(self, c: int, rows: torch.Tensor, scratch: torch.Tensor) -> None:
        """Add rows of one class: Eq. 3 and 4 for two parts, the samples so far and these."""
        count = rows.shape[0]
        deviations = scratch[:count].copy_(rows)
        # The sum over rows as a product with ones: a third of the time of PyTorch's sum.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = torch.from_numpy(np.ones(count) @ deviations.numpy()).div_(count)
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"features of class {c} are not finite")
        deviations -= mean
        kept_mean = torch.from_numpy(self._means[c])
        before, total = int(self._counts[c]), int(self._counts[c]) + count
        shift = mean - kept_mean
        # Both means' terms of Eq. 4 together are n m / (n + m) shift shift^T: one more row of the same product.
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
            blas.dsyrk(1.0, rows.T, beta=1.0, c=kept, overwrite_c=1)

    def _set_means(self, counts: Int64, means: Sequence[Float64]) -> None:
        """Set counts and means from N_ck (k, C) and mu_ck (k arrays (C, d)), and add the spread of the latter."""
        self._counts = counts.sum(axis=0)
        for c in np.flatnonzero(self._counts).tolist():
            members = np.flatnonzero(counts[:, c]).tolist()
            weight = counts[members, c].astype(np.float64)
            rows = np.stack([means[k][c] for k in members])
            # Eq. 3, as a mean of differences from the first part: equal means then stay equal bit for bit.
            mean = rows[0] + (weight[:, None] * (rows - rows[0])).sum(axis=0) / weight.sum()
            self._means[c] = mean
            if len(members) > 1:  # Eq. 4, second sum
                self._add_rows(c, np.sqrt(weight)[:, None] * (rows - mean))
            else:
                self._kept(c)

    def scatter(self, c: int) -> Float64:
        """Return class c's scatter M2, (d, d) or in the ``diag`` form (d,); in the ``pooled`` form that of all classes.

        It is zero for a class without samples.
        """
        self._flush()
        kept = self._scatter.get(self._key(c))
        if kept is None:
            return np.zeros(self.width if self.form == "diag" else (self.width, self.width))
        if self.form == "diag":
            return kept.copy()
        full: Float64 = kept.T.copy()  # valid on and below the diagonal; the valid triangle of `kept` is its mirror
        np.copyto(full, kept, where=_above(self.width))
        return full

    def cov(self, c: int) -> Float64:
        """Return class c's covariance with divisor ``N - 1`` (Eq. 2); in the ``pooled`` form the common one.

        Returns
        -------
        ndarray, (d, d), or (d,) in the ``diag`` form
            Zeros for a class of one sample: Eq. 2 divides by 0 there, and the weight ``N - 1`` in Eq. 4 is 0.

        Raises
        ------
        ValueError
            The class has no samples.
        """
        count = int(self.counts[c])
        if count == 0:
            raise ValueError(f"class {c} has no samples, and so no covariance")
        cov = self.scatter(c)
        cov /= max(self.degrees if self.form == "pooled" else count - 1, 1)
        return cov

    def pooled_cov(self) -> Float64:
        """Return the within-class covariance ``sum_c (N_c - 1) Sigma_c / sum_c (N_c - 1)``, shaped as in `cov`.

        It is zero where no class has two samples. It is computed once and must not be changed.
        """
        self._flush()
        if self._within is None:
            keys = list(self._scatter)
            total = sum((self.scatter(key) for key in keys[1:]), self.scatter(keys[0] if keys else 0))
            self._within = total / max(self.degrees, 1)
        return self._within


def moments(
    features: Array | torch.Tensor, labels: Array | torch.Tensor, num_classes: int, form: Form = "full"
) -> ClassMoments:
    """Return the statistics of features (N, d) with labels (N,) that are all at hand; see `ClassMoments`."""
    result = ClassMoments(num_classes, features.shape[1], form)
    result.update(features, labels)
    result._flush()
    return result


# What travels -------------------------------------------------------------------------------------


def form_of(mode: Mode) -> Form:
    """Return the form in which statistics are accumulated for a mode of sending, see `to_arrays`."""
    return mode if mode in ("diag", "pooled") else "full"


def _low_rank(cov: Float64, rank: int) -> tuple[Float64, Float64]:
    """Return the leading ``rank`` eigenvectors times the roots of their eigenvalues, and the variances left over."""
    values, vectors = (part.numpy() for part in torch.linalg.eigh(torch.from_numpy(cov)))  # ascending
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
    """Return what a client sends. Equations 3 and 4 need ``N_ck``, so the counts travel too (Eq. 2 omits them).

    ==============  ===========================================================================================
    ``full``        ``ids`` (S,), ``count`` (S,), ``mean`` (S, d), ``cov`` (S, d (d + 1) / 2) packed
    ``diag``        the same with ``cov`` (S, d), the variances
    ``lowrank``     ``ids``, ``count``, ``mean``, ``factor`` (S, r, d), ``rest`` (S, d):
                    ``cov ~ factor^T factor + diag(rest)``, with the variances exact
    ``pooled``      ``ids``, ``count``, ``mean``, ``cov`` (d (d + 1) / 2,), the within-class covariance
    ``sums``        ``count`` (C,), ``sum`` (C, d), ``square`` (C, d (d + 1) / 2), always float64: see `sums`
    ==============  ===========================================================================================

    S is the number of classes with samples, ascending in ``ids``; only ``sums`` holds the other classes too. Counts
    and ids are int64.

    Parameters
    ----------
    statistics : ClassMoments
        In the form that `form_of` names.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        Form of the covariances in the reply.
    rank : int
        r of ``lowrank``, at least 1.
    dtype : dtype
        Precision of means and covariances.
    centres : ndarray, (C, d), optional
        What ``sums`` are taken around.
    """
    if statistics.form != form_of(mode):
        raise ValueError(f"mode {mode!r} needs statistics of form {form_of(mode)!r}, got {statistics.form!r}")
    if mode == "sums":
        return sums(statistics, centres)
    ids, width = statistics.classes, statistics.width
    arrays: dict[str, Array] = {
        "ids": ids,
        "count": statistics.counts[ids],
        "mean": statistics.means[ids].astype(dtype),
    }
    if mode == "pooled":
        arrays["cov"] = pack(statistics.pooled_cov()).astype(dtype)
    elif mode == "lowrank":
        pairs = [_low_rank(statistics.cov(c), rank) for c in ids]
        arrays["factor"] = np.array([factor for factor, _ in pairs], dtype=dtype).reshape(ids.size, rank, width)
        arrays["rest"] = np.array([rest for _, rest in pairs], dtype=dtype).reshape(ids.size, width)
    else:
        arrays["cov"] = np.empty((ids.size, width if mode == "diag" else width * (width + 1) // 2), dtype=dtype)
        for row, c in zip(arrays["cov"], ids):
            row[:] = statistics.cov(c) if mode == "diag" else pack(statistics.cov(c))
    return arrays


def _finite(array: Array) -> bool:
    """Return whether all entries are finite. A finite sum proves it in one cheap pass; one that overflowed does not."""
    return bool(torch.isfinite(as_tensor(array).sum())) or bool(np.isfinite(array).all())


ROUNDING = 1e-3
"""Share of the largest variance by which half precision and sums may take another one below 0."""


def problem_of(arrays: Mapping[str, Array], mode: Mode, num_classes: int, width: int) -> str | None:
    """Return the reason that received arrays cannot be statistics, or None.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        What was received.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        What was asked for, see `to_arrays`.
    num_classes, width : int
        C and d.
    """
    triangle = width * (width + 1) // 2
    shapes: dict[str, tuple[int, ...]]
    if mode == "sums":
        shapes = {"count": (num_classes,), "sum": (num_classes, width), "square": (num_classes, triangle)}
    else:
        seen = arrays["ids"].shape[0] if "ids" in arrays and arrays["ids"].ndim == 1 else 0
        shapes = {"ids": (seen,), "count": (seen,), "mean": (seen, width)}
        if mode == "lowrank":
            rank = arrays["factor"].shape[1] if "factor" in arrays and arrays["factor"].ndim == 3 else 0
            shapes |= {"factor": (seen, rank, width), "rest": (seen, width)}
        else:
            shapes["cov"] = {"full": (seen, triangle), "diag": (seen, width), "pooled": (triangle,)}[mode]
    if set(arrays) != set(shapes):
        return Impossible(f"statistics of mode {mode!r} consist of {sorted(shapes)}, got {sorted(arrays)}")
    for name, shape in shapes.items():
        array = arrays[name]
        kind = np.integer if name in ("ids", "count") else np.floating
        if array.shape != shape or not np.issubdtype(array.dtype, kind):
            got = f"{array.dtype} of shape {array.shape}"
            return Impossible(f"array {name!r} of statistics must be {kind.__name__} of shape {shape}, got {got}")
        if kind is np.floating and not _finite(array):
            return f"array {name!r} of statistics has values that are not finite"
    if mode == "sums":
        return "counts of statistics must not be negative" if (arrays["count"] < 0).any() else None
    # With a count of 0 the weight N_ck - 1 in Eq. 4 would be -1.
    if (arrays["count"] < 1).any():
        return "counts of statistics must be positive: classes without samples must be left out"
    ids = arrays["ids"]
    if (ids < 0).any() or (ids >= num_classes).any() or np.unique(ids).size != ids.size:
        return Impossible(
            f"class ids of statistics must be distinct and lie in 0..{num_classes - 1}, got {ids.tolist()}"
        )
    cov = arrays.get("cov")
    if cov is not None and cov.size:
        variances = cov if mode == "diag" else cov[..., diagonal(width)]
        if (variances < -ROUNDING * np.abs(variances).max(initial=1.0)).any():
            return "variances of statistics must not be negative"
    return None


class MomentsPool:
    """Pooled statistics of all clients' replies, added as they arrive (Eq. 3 and 4).

    Memory, however many clients reply: one packed float64 covariance per class seen (``pooled``: one in all), and the
    means of at most ``REPLIES`` replies. The order of the replies matters in the last bits only. In the mode ``sums``
    only the totals over clients enter the result.

    Parameters
    ----------
    num_classes, width : int
        C and d.
    mode : {"full", "diag", "lowrank", "pooled", "sums"}
        What the clients send, see `to_arrays`.
    centres : ndarray, (C, d), optional
        What the clients subtracted in the mode ``sums``.
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
        """Add one client's reply (as from `to_arrays`, in any floating precision; it is only read).

        Raises
        ------
        ValueError
            The reply cannot be statistics of this mode, see `problem_of`. The pool is then unchanged.
        """
        if problem := problem_of(arrays, self.mode, self.num_classes, self.width):
            raise ValueError(problem)
        if self.mode == "sums":
            for name, array in arrays.items():
                if name in self._totals:
                    self._totals[name] += array
                else:
                    self._totals[name] = array.astype(np.int64 if name == "count" else np.float64)
            return
        if len(self._counts) == REPLIES:
            self._condense()
        ids = arrays["ids"]
        counts = np.zeros(self.num_classes, dtype=np.int64)
        counts[ids] = arrays["count"]
        means = np.zeros((self.num_classes, self.width))
        means[ids] = arrays["mean"]
        self._counts.append(counts)
        self._means.append(means)
        # Eq. 4, first sum: (N_ck - 1) Sigma_ck. A single sample's covariance, whatever was sent, has weight 0.
        if self.mode == "pooled":
            self._accumulate(0, as_tensor(arrays["cov"]), float(counts.sum() - ids.size))
            return
        for row, c in enumerate(ids.tolist()):
            if self.mode == "lowrank":
                factor = arrays["factor"][row].astype(np.float64)
                cov = torch.from_numpy(pack(factor.T @ factor + np.diag(arrays["rest"][row].astype(np.float64))))
            else:
                cov = as_tensor(arrays["cov"][row])
            self._accumulate(c, cov, float(counts[c] - 1))

    def _condense(self) -> None:
        """Replace the means of many replies by one mean per class, and add their spread around it to the scatter."""
        counts = np.stack(self._counts)
        means = np.zeros((self.num_classes, self.width))
        for c in np.flatnonzero(counts.any(axis=0)).tolist():
            one = ClassMoments(1, self.width, self.form)
            one._set_means(counts[:, [c]], [mean[[c]] for mean in self._means])
            means[c], spread = one._means[0], one.scatter(0)
            key = 0 if self.form == "pooled" else c
            self._accumulate(key, torch.from_numpy(spread if self.form == "diag" else pack(spread)), 1.0)
        self._counts, self._means = [counts.sum(axis=0)], [means]

    def _accumulate(self, key: int, scatter: torch.Tensor, weight: float) -> None:
        if key not in self._scatter:
            self._scatter[key] = torch.zeros(scatter.shape, dtype=torch.float64)
        if self._widened.shape != scatter.shape:
            self._widened = torch.empty(scatter.shape, dtype=torch.float64)
        # Widened first: PyTorch's addition of two precisions converts entry by entry and takes longer.
        self._scatter[key].add_(self._widened.copy_(scatter), alpha=weight)

    def moments(self) -> ClassMoments:
        """Return the statistics of all replies added so far.

        Raises
        ------
        ValueError
            No reply was added.
        """
        if self._totals:
            return self._from_totals(self._totals["count"], self._totals["sum"], self._totals["square"])
        if not self._counts:
            raise ValueError("no statistics to pool")
        result = ClassMoments(self.num_classes, self.width, self.form)
        for key, scatter in self._scatter.items():
            flat = scatter.numpy()
            result._scatter[key] = flat.copy() if self.form == "diag" else unpack(flat, self.width).T
        result._set_means(np.stack(self._counts), self._means)
        return result

    def _from_totals(self, count: Int64, total: Float64, square: Float64) -> ClassMoments:
        """Return the statistics for which sums over all samples stand; the inverse of `sums`."""
        result = ClassMoments(self.num_classes, self.width)
        result._counts = count.copy()
        centres = np.zeros(total.shape) if self.centres is None else self.centres.astype(np.float64)
        for c in np.flatnonzero(count).tolist():
            n, first = int(count[c]), total[c]
            result._means[c] = centres[c] + first / n
            scatter = result._kept(c)
            if n > 1:  # one sample has no deviation, but the difference of its squares would leave rounding
                scatter += unpack(square[c], self.width) - np.outer(first, first) / n
        return result


def sums(statistics: ClassMoments, centres: Array | None = None) -> dict[str, Array]:
    """Return plain sums over samples, which add up over clients and so suit secure aggregation.

    Without centres, ``S2 - S1 S1^T / N`` loses about as many digits as the squared means exceed the variances. Two
    exchanges avoid it: the first sums, without centres, give the global means; the second are taken around these, again
    from the statistics at hand, and have nothing left to cancel.

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
        packed sum of ``(z - centre)(z - centre)^T``. Zeros for classes without samples, so that which classes a client
        holds does not show.
    """
    if statistics.form != "full":
        raise ValueError(f"sums need statistics of form 'full', got {statistics.form!r}")
    counts, offset = statistics.counts, statistics.means
    if centres is not None:
        if centres.shape != offset.shape:
            raise ValueError(f"centres must have shape {offset.shape}, got {centres.shape}")
        offset -= centres
    offset[counts == 0] = 0.0
    square = np.zeros((statistics.num_classes, statistics.width * (statistics.width + 1) // 2))
    for c in np.flatnonzero(counts).tolist():
        square[c] = pack(statistics.scatter(c) + counts[c] * np.outer(offset[c], offset[c]))
    return {"count": counts, "sum": counts[:, None] * offset, "square": square}
