"""Linear heads in closed form, from sums of features that add up over clients.

With h = (z, 1), features and a constant, two sums over samples are enough:

==========  =================================================================================
``A``       ``sum h h^T`` (d + 1, d + 1): second moments, sums and the number of samples
``b``       ``sum h`` of every class, (C, d + 1): row c holds ``S_c = sum z`` and ``n_c``
==========  =================================================================================

``b`` alone gives the nearest class mean; both give ridge regression on one-hot labels and linear discriminant analysis,
since the scatter within classes is ``A_zz - sum_c S_c S_c^T / n_c``. Sums do not depend on how samples are dealt to
clients, so each head equals that of all features together.

Everything is float64: with features that lie at 100, sums in float32 move the ridge solution by a fifth of its size.
Features that are multiples of ``2^-k`` have exact sums (`exact_bits`): ``A`` and ``b`` then have the same bits for any
order and any division of the samples. Heads are rows (C, d + 1), weights and then the bias; `as_head` makes arrays of
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedapp.core import masks
from fedapp.core.gaussian import pack
from fedapp.core.robust import believed
from fedapp.errors import BadRequest, Impossible
from fedapp.lazy import blas, lapack, torch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Real: TypeAlias = type[np.float32] | type[np.float64]

UNSEEN = -1e4
"""Logit of a class without samples, added to the mean logit of the others: it loses, and its probability is 0."""
SCALES: Float64 = 2.0 ** (np.arange(-24, 41) / 4)
"""Factors for logits, 1/64 to 1024; `best_scale` takes one of them."""
PENALTIES: Float64 = np.array(
    [p * f for p in (1e-2, 1e-1, 1e0, 1e1, 1e2, 1e3, 1e4) for f in (1.0, 1.7782794100389228, 3.1622776601683795,
     5.623413251903491)] + [1e5]
)  # fmt: skip
"""Multiples of a centred feature's mean square, 0.01 to 100,000; `best_penalty` takes one of them."""
MOST_BITS, LEAST_BITS = 18, 4
"""Bits behind the point of features whose sums are exact."""
OFFSET = 100.0
"""Squared length of the mean, in multiples of all variances, above which second moments in float32 do not suffice."""
TOLERANCE = 1e-9
"""How far rounding may take second moments from possible ones, relative to their largest entry."""


def exact_bits(samples: Sequence[int], largest: float) -> int | None:
    """Return the largest k for which sums of features that are multiples of ``2^-k`` are exact, or None.

    Products are multiples of ``2^-2k``, and no partial sum is larger than ``N M^2``. Float64 holds up to ``2^53`` such
    units, so k is ``(53 - log2(N M^2)) / 2``, rounded down, from `LEAST_BITS` to `MOST_BITS`. A secure sum must not
    wrap in these units.

    Parameters
    ----------
    samples : n_k of each client, (K,), N in all.   largest : M, the largest absolute value of a feature.
    """
    for k in range(MOST_BITS, LEAST_BITS - 1, -1):
        part = max(samples) * max(1.0, (float(np.rint(largest * 2.0**k)) / 2.0**k) ** 2)
        if exact(sum(samples), largest, k) and part <= masks.largest(len(samples), 2 * k):
            return k
    return None


def exact(samples: float, largest: float, bits: int) -> bool:
    """Return whether ``N M^2`` is at most ``2^53`` units of ``2^-2k``, for N samples, M and k as in `exact_bits`."""
    return samples * float(np.rint(largest * 2.0**bits)) ** 2 <= 2.0**53


def problem_of_rounding(arrays: Mapping[str, Array], bits: int, samples: float, largest: float) -> str | None:
    """Return the reason that sums (see `problem_of`) are not of features that are multiples of ``2^-k``, or None.

    Parameters
    ----------
    samples, largest : N and M, as in `exact`; where sums of so many are exact, no entry may be larger than theirs.
    """
    width, unit = arrays["b"].shape[1], 2.0**bits
    diagonal = np.cumsum([0, *range(width, 2, -1)])  # of products of features: none is larger
    for name, power in {"b": 1, "a": 2}.items():
        if name not in arrays or arrays[name].dtype == np.float32:
            continue
        flat, entries = arrays[name].reshape(-1), arrays["a"][diagonal] if name == "a" else arrays["b"][:, :-1]
        parts = np.array_split(flat, len(flat) // 2**15 + 1)  # each stays in the processor's cache
        if any((np.rint(steps := part * unit**power) != steps).any() for part in parts):
            return Impossible(f"'{name}' holds no sums of rounded features")
        most = samples * float(np.rint(largest * unit)) ** power
        if exact(samples, largest, bits) and np.abs(entries).max() * unit**power > most:
            return Impossible(f"'{name}' is larger than {samples:g} rows with features up to {largest:g} give")
    most = samples * float(np.rint(largest * unit)) ** 2 * (1 + TOLERANCE)
    if "energy" in arrays and exact(samples, largest, bits) and arrays["energy"][0] * unit**2 > most:
        return Impossible(f"'energy' is larger than {samples:g} rows with features up to {largest:g} give")
    return None


def digest(arrays: Sequence[Array], salt: str) -> str:
    """Return a SHA-256 of the bits of arrays."""
    found = hashlib.sha256(salt.encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


class FeatureSums:
    """Adds up ``A`` and ``b`` over batches of features.

    Parameters
    ----------
    num_classes, width : C and d.   squares : whether ``A`` is wanted too.
    energy : whether ``sum |z|^2 / d`` is wanted, which is no larger than the entries of A are.
    bits : k; features are rounded to multiples of ``2^-k``. None = they are not rounded.
    """

    def __init__(
        self, num_classes: int, width: int, squares: bool = True, energy: bool = False, bits: int | None = None
    ) -> None:
        # A float64 number plus this one has no bits below 2^-k, so the addition rounds.
        self._rounder = None if bits is None else 1.5 * 2.0 ** (52 - bits)
        self.b = np.zeros((num_classes, width + 1))
        self.energy = np.zeros(1) if energy else None
        # Column-major, and only the upper triangle is valid: what dsyrk writes.
        self._a = np.zeros((width + 1, width + 1), order="F") if squares else None

    def update(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Add features (n, d) with labels (n,)."""
        y = labels.cpu().numpy()
        h = np.ones((len(y), self.b.shape[1]))
        h[:, :-1] = features.detach().cpu().numpy()
        if self._rounder is not None:
            h[:, :-1] += self._rounder
            h[:, :-1] -= self._rounder
        if self.energy is not None:
            self.energy += (h[:, :-1] ** 2).sum() / (h.shape[1] - 1)
        for c in np.unique(y):
            rows = h[y == c]
            # A product with ones: of BLAS, it has the same bits with any number of threads, as dsyrk has.
            self.b[c] += np.ones(len(rows)) @ rows
        if self._a is not None and len(y):
            blas.dsyrk(1.0, h.T, beta=1.0, c=self._a, overwrite_c=1)

    def squares(self) -> Float64:
        """Return ``sum z z^T``, (d, d): only the upper triangle is valid."""
        assert self._a is not None
        return self._a[:-1, :-1]

    def arrays(self) -> dict[str, Array]:
        """Return a client's sums: ``b`` (C, d + 1); if wanted ``a``, the upper triangle, and ``energy`` (1,)."""
        energy = {} if self.energy is None else {"energy": self.energy}
        if self._a is None:
            return {"b": self.b, **energy}
        return {"a": pack(self._a), "b": self.b, **energy}


def capped_sums(
    answers: Sequence[Mapping[str, Array]], totals: Sequence[float], factor: float
) -> list[dict[str, Array]]:
    """Return sums over samples of all clients, none of more samples than `factor` times the `lower_median`.

    All sums of a client with more are multiplied by one number, so they are those of fewer samples that are distributed
    as its own. A factor of 0 changes none.

    Parameters
    ----------
    answers : of each client.   totals : (K,), of how many samples they are; 0 for a client without any.
    """
    return [
        {name: array * (most / total) for name, array in arrays.items()} if most < total else dict(arrays)
        for arrays, total, most in zip(answers, totals, believed(totals, factor).tolist(), strict=True)
    ]


def problem_of(
    arrays: Mapping[str, Array],
    num_classes: int,
    width: int,
    squares: Real | None,
    lost: float = 0.0,
    energy: bool = False,
) -> str | None:
    """Return the reason that received arrays cannot be sums of features, or None.

    Parameters
    ----------
    arrays : as from `FeatureSums.arrays`.   energy : whether ``energy`` was asked for.
    squares : type of the numbers in ``a``; None = it was not asked for.
    lost : how far each number may have been rounded; counts are exact all the same.
    """
    d = width + 1
    shapes: dict[str, tuple[int, ...]] = {"b": (num_classes, d), **({"a": (d * (d + 1) // 2,)} if squares else {})}
    shapes |= {"energy": (1,)} if energy else {}
    if set(arrays) != set(shapes):
        return Impossible(f"sums consist of {sorted(shapes)}, got {sorted(arrays)}")
    for name, shape in shapes.items():
        array = arrays[name]
        kind = np.dtype(squares if name == "a" else np.float64)
        if array.shape != shape or array.dtype != kind:
            return Impossible(f"'{name}' must be {kind} of shape {shape}, got {array.dtype} of shape {array.shape}")
        if not np.isfinite(array).all():
            return f"'{name}' has values that are not finite"
    b = arrays["b"]
    counts, sums = b[:, -1], b[:, :-1]
    if (counts < 0).any() or (counts != np.rint(counts)).any():
        return Impossible("the last column of 'b' must hold numbers of samples")
    if sums[counts == 0].any():
        return Impossible("a class without samples has a sum of features")
    least = ((sums[counts > 0] ** 2).sum(axis=1) / counts[counts > 0]).sum() / width
    if energy and arrays["energy"][0] < least * (1 - TOLERANCE):
        return f"'energy' is {arrays['energy'][0]:g}, less than features with these sums have ({least:g})"
    return _problem_of_squares(arrays["a"], b, lost) if squares else None


def _problem_of_squares(packed: Float64, b: Float64, lost: float) -> str | None:
    """Return the reason that packed second moments contradict the sums over classes, or None."""
    # All that follows works in place on the lower triangle.
    a, _ = lapack.dtpttr(b.shape[1], packed, uplo="L")
    if (a.diagonal() < 0).any():
        return Impossible("'a' has a negative diagonal")
    if a[-1, -1] != b[:, -1].sum().astype(packed.dtype):
        return Impossible(f"'a' counts {a[-1, -1]:g} samples and 'b' {b[:, -1].sum():g}")
    # Rounding to float32 moves an eigenvalue by the norm of d + 1 rows of errors.
    tolerance = 2.0**-23 * len(a) if packed.dtype == np.float32 else TOLERANCE
    slack = tolerance * max(float(packed.max()), -float(packed.min()), 1.0)
    # The scatter subtracts S S^T / n of each class, which a rounded S moves by its mean times as much, twice.
    means = np.abs(b[:, :-1]) / np.maximum(b[:, -1:], 1)
    slack += lost * (len(a) + len(b)) * (1 + 2 * float(means.max()))
    if np.abs(a[-1] - b.sum(axis=0)).max() > slack:
        return "the last column of 'a' is not the sum of the rows of 'b'"
    # Features of which this is the scatter within classes exist if, and only if, it has no negative eigenvalue.
    seen = b[:, -1] > 0
    if seen.any():
        a = blas.dsyrk(-1.0, (b[seen] / np.sqrt(b[seen, -1:])).T, beta=1.0, c=a, lower=1, overwrite_c=1)
    np.fill_diagonal(a, a.diagonal() + slack)
    a[-1] = np.eye(1, len(a), len(a) - 1)  # the scatter has no row of the constant
    return None if is_positive(a, overwrite=True) else "no features have these second moments"


def check_offset(a: Float64) -> None:
    """Check that the means of features are not too far from 0 for second moments A (d + 1, d + 1) in float32.

    Raises
    ------
    BadRequest : the squared length of the mean is more than `OFFSET` times the variances of all features together.
    """
    n = max(float(a[-1, -1]), 1.0)
    mean = float((a[-1, :-1] / n) @ (a[-1, :-1] / n))
    if mean > OFFSET * (float(np.trace(a[:-1, :-1])) / n - mean):
        raise BadRequest("wire=f32: the features' means are too far from 0 for single precision: take wire=f64")


def scatter_within(a: Float64, b: Float64) -> Float64:
    """Return ``sum (z - mu_y)(z - mu_y)^T`` over all samples, (d, d)."""
    seen = b[:, -1] > 0
    rows = b[seen, :-1] / np.sqrt(b[seen, -1:])
    within: Float64 = a[:-1, :-1] - _product(rows)
    return within


def _product(rows: Float64) -> Float64:
    """Return ``rows^T rows`` with the same bits for any number of BLAS's threads."""
    half = blas.dsyrk(1.0, rows.T) if len(rows) else np.zeros((rows.shape[1], rows.shape[1]))
    full: Float64 = np.triu(half) + np.triu(half, 1).T
    return full


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch work on one thread, as the last bits of its solutions depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_positive(matrix: Float64, overwrite: bool = False) -> bool:
    """Return whether a symmetric matrix (d, d) is positive definite; only its lower triangle is read."""
    root, negative = lapack.dpotrf(matrix, lower=1, clean=0, overwrite_a=overwrite)
    # With values near the largest float64 a pivot may be NaN, which LAPACK takes for positive.
    return bool(negative == 0 and np.isfinite(root.diagonal()).all())


def _solve(matrix: Float64, rows: Float64) -> Float64:
    """Return X (C, d) with ``matrix x_c = rows_c``, for a matrix that is positive definite but for rounding."""
    right = torch.from_numpy(np.ascontiguousarray(rows.T))
    with _one_thread():
        root, negative = torch.linalg.cholesky_ex(torch.from_numpy(matrix))
        if not int(negative):
            return np.ascontiguousarray(torch.cholesky_solve(right, root).numpy().T)
    values, vectors = torch.linalg.eigh(torch.from_numpy(matrix))
    values = values.clamp_min(max(float(values.max()) * 1e-12, np.finfo(np.float64).tiny))
    return np.ascontiguousarray((vectors @ ((vectors.T @ right) / values[:, None])).numpy().T)


def ridge(a: Float64, b: Float64, lam: float, *, relative: bool = False, bias: bool = True) -> Float64:
    """Return the ridge regression of one-hot labels on features: ``(A + lam I)^-1 b`` (Fed3R, Fani et al., ICML 2024).

    Parameters
    ----------
    lam : penalty, > 0, on weights and bias.   relative : it is a multiple of the mean of A's diagonal.
    bias : whether there is one; without it the rows' last entries are 0.
    """
    size = b.shape[1] if bias else b.shape[1] - 1
    square, found = a[:size, :size], np.zeros(b.shape)
    penalty = lam * float(np.trace(square)) / size if relative else lam
    found[:, :size] = _solve(square + penalty * np.eye(size), b[:, :size])
    return found


def best_penalty(a: Float64, b: Float64, *, bias: bool = True) -> tuple[float, bool]:
    """Return the penalty of `ridge` with the least error by generalised cross-validation, and whether it is inside
    the grid (Golub, Heath, Wahba, Technometrics 1979).

    The sums are enough. With ``A = U diag(v) U^T`` and ``r = U^T b^T`` the residuals of one-hot labels have the sum of
    squares ``N - 2 sum |r_i|^2 / (v_i + lam) + sum v_i |r_i|^2 / (v_i + lam)^2``, the hat matrix has the trace
    ``df = sum v_i / (v_i + lam)``, and the error is ``(RSS / N) / (1 - df / N)^2``, infinite for ``df >= N``.
    """
    size, n, width = b.shape[1] if bias else b.shape[1] - 1, float(a[-1, -1]), b.shape[1] - 1
    total = a[-1, :-1]
    # The mean square of the centred features: an offset of all features must not move the grid.
    unit = (float(np.trace(a[:-1, :-1])) - float(total @ total) / n) / (width * n)
    found = [cross_validated(a[:size, :size], b[:, :size], n, PENALTIES * unit)[2]] if unit > 0 else []
    if not found or not np.isfinite(found[0]).any():  # no feature differs between samples
        return 1.0, True
    best = int(np.argmin(found[0]))
    return float(PENALTIES[best] * unit), 0 < best < len(PENALTIES) - 1


def cross_validated(a: Float64, b: Float64, n: float, penalties: Float64) -> tuple[Float64, Float64, Float64]:
    """Return sum of squared residuals, degrees of freedom and error of each penalty, as `best_penalty` says."""
    with _one_thread():
        values, vectors = torch.linalg.eigh(torch.from_numpy(a))
    v = values.clamp_min(0).numpy()[:, None]
    r = ((vectors.T @ torch.from_numpy(np.ascontiguousarray(b.T))) ** 2).sum(dim=1).numpy()[:, None]
    rss = n - 2 * (r / (v + penalties)).sum(axis=0) + (v * r / (v + penalties) ** 2).sum(axis=0)
    df = (v / (v + penalties)).sum(axis=0)
    left = np.maximum(1 - df / n, 0)
    error = np.where(left > 0, rss / n / np.where(left > 0, left, 1) ** 2, np.inf)
    return rss, df, error


def nearest_mean(b: Float64, metric: Literal["cosine", "euclidean"]) -> Float64:
    """Return the head whose largest logit is the nearest class mean (FedNCM, Legate et al., NeurIPS 2023).

    ``cosine``: ``W_c = mu_c / ||mu_c||``, no bias. ``euclidean``: ``W_c = mu_c``, bias ``-||mu_c||^2 / 2``.
    """
    means = b[:, :-1] / np.where(b[:, -1:] > 0, b[:, -1:], 1)  # fewer than one sample where `count-cap` left so few
    if metric == "cosine":
        return np.column_stack([unit_rows(means), np.zeros(len(means))])
    return np.column_stack([means, -0.5 * (means**2).sum(axis=1)])


def unit_rows(rows: Float64, floor: float = 1e-12) -> Float64:
    """Return rows of norm 1; those shorter than ``floor`` are divided by it."""
    unit: Float64 = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), floor)
    return unit


def discriminant(a: Float64, b: Float64, shrink: float, prior: Literal["uniform", "pooled"]) -> Float64:
    """Return the head of linear discriminant analysis: Gaussians of one covariance, and a class prior.

    ``Sigma`` is the scatter within classes over ``N - C_seen``, shrunk to ``(1 - g) Sigma + g tr(Sigma)/d I``;
    ``W_c = Sigma^-1 mu_c`` and the bias is ``-mu_c^T Sigma^-1 mu_c / 2 + log pi_c``. Logits are log-probabilities but
    for a constant of the sample. Where nothing is known about any spread, ``Sigma`` is the identity.

    Parameters
    ----------
    shrink : g, in 0..1.   prior : pi_c equal for all classes with samples, or ``n_c / N``.
    """
    counts = b[:, -1]
    seen = counts > 0
    width, found = b.shape[1] - 1, np.zeros(b.shape)
    means = b[seen, :-1] / counts[seen, None]
    sigma = scatter_within(a, b) / max(counts.sum() - seen.sum(), 1)
    level = float(np.trace(sigma)) / width
    known = counts.sum() > seen.sum() and level > TOLERANCE * float(np.trace(a[:-1, :-1])) / counts.sum() / width
    sigma = (1 - shrink) * sigma + shrink * level * np.eye(width) if known else np.eye(width)
    pi = counts[seen] / counts.sum() if prior == "pooled" else np.full(len(means), 1 / len(means))
    found[seen] = gaussian_rule(means, sigma, np.log(pi))
    return found


def gaussian_rule(means: Float64, sigma: Float64, log_prior: Float64) -> Float64:
    """Return the head, (C, d + 1), whose logits are log N(z; mu_c, Sigma) pi_c but for a constant of the sample.

    Parameters
    ----------
    means : (C, d).   sigma : (d, d), positive definite.   log_prior : (C,).
    """
    weights = _solve(sigma, means)
    return np.column_stack([weights, -0.5 * (weights * means).sum(axis=1) + log_prior])


def scatter_of_means(parts: Sequence[Float64], gamma: float) -> Float64:
    """Return FedCOF's matrix G, (d, d) (Goswami et al., NeurIPS 2025): second moments estimated from means alone.

    ``S_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)^T / (K_c - 1)`` over the K_c clients that own class c (0 where it is
    one) is an unbiased covariance where all of them draw from one distribution of the class;
    ``G = sum_c (n_c - 1)(S_c + gamma I) + N mu mu^T`` with mu the mean of all features.

    Parameters
    ----------
    parts : each client's ``b`` (C, d + 1); counts that were scaled down may be fractions.   gamma : shrinkage, >= 0.
    """
    total = np.sum(parts, axis=0)
    width = total.shape[1] - 1
    g = np.zeros((width, width))
    for c in np.flatnonzero(total[:, -1]):
        own = np.stack([part[c] for part in parts if part[c, -1]])
        rows = np.sqrt(own[:, -1:]) * (own[:, :-1] / own[:, -1:] - total[c, :-1] / total[c, -1])
        estimate = _product(rows) / max(len(own) - 1, 1)
        g += max(total[c, -1] - 1, 0.0) * (estimate + gamma * np.eye(width))
    n = max(total[:, -1].sum(), 1.0)
    mean = total[:, :-1].sum(axis=0) / n
    g += n * np.outer(mean, mean)
    return g


def cof(parts: Sequence[Float64], gamma: float) -> Float64:
    """Return FedCOF's head: ``S_c^T G^-1``, rows of norm 1, without bias; see `scatter_of_means`."""
    sums = np.sum(parts, axis=0)[:, :-1]
    return np.column_stack([unit_rows(_solve(scatter_of_means(parts, gamma), sums)), np.zeros(len(sums))])


def as_head(rows: Float64, seen: npt.NDArray[np.bool_], scale: float = 1.0) -> tuple[Array, Array]:
    """Return weight (C, d) and bias (C,) in float32, with logits times ``scale``; classes not ``seen`` never win.

    A fixed logit would win wherever those of all others are lower, as they may be with biases of ``-||mu||^2 / 2``. The
    mean of the others' logits never is their largest, so an unseen class gets their mean row, and `UNSEEN` with it.
    """
    scaled = scale * rows
    scaled[~seen] = scaled[seen].mean(axis=0)
    scaled[~seen, -1] += UNSEEN
    return scaled[:, :-1].astype(np.float32), scaled[:, -1].astype(np.float32)


def scaled_losses(logits: torch.Tensor, labels: torch.Tensor) -> Float64:
    """Return the sum of the cross-entropies in nats of logits (n, C) times each of `SCALES`, (65,)."""
    wide = logits.double()
    own = torch.arange(len(labels), device=labels.device)
    losses = [(torch.logsumexp(s * wide, dim=1) - s * wide[own, labels]).sum() for s in SCALES.tolist()]
    return torch.stack(losses).cpu().numpy()


def capped_losses(losses: Sequence[Float64], factor: float) -> list[Float64]:
    """Return losses (65,) of all clients, capped so that no client decides on the factor alone.

    With the smallest factor all logits are nearly equal, so that a client's loss says how many rows it has. No loss
    counts for more than that: it is worse than to know nothing. All losses of a client with more rows than `factor`
    times the `lower_median` are scaled down by one number.
    """
    rows = [float(loss[0]) for loss in losses]
    answers = [{"loss": np.minimum(loss, loss[0])} for loss in losses]
    return [of["loss"] for of in capped_sums(answers, rows, factor)]


def best_scale(losses: Float64) -> float:
    """Return the factor in `SCALES` with the smallest sum of losses (65,), and 1 where no client has a row."""
    return float(SCALES[int(np.argmin(losses))]) if losses.any() else 1.0
