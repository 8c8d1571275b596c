"""Class-wise federated averaging and the regulariser that makes it possible.

Lee and Choi, "Class-Wise Federated Averaging for Efficient Personalization", ICCV 2025, arXiv:2406.07800.

================  ==============================================================================
``pt_ij``         share of class j in client i's head: normalised norm of its row (Eq. 4)
``q_ij``          weight of client i in the global model of class j (Eq. 6); columns sum to 1
``g_j``           global model of class j, ``sum_i q_ij theta_i`` (Eq. 5)
``theta_i``       personalised model, ``sum_j pt_ij g_j`` (Eq. 7)
``R_i``           ``|| p_i - pt_i ||_2``, weight-distribution regulariser WDR (Eq. 8), not squared
================  ==============================================================================

Equations 6 and 7 together are one product: with the m uploaded models as rows of ``Theta``, the recipients' models are
the rows of ``P Q^T Theta``. It can be multiplied as ``(P Q^T) Theta`` or as ``P (Q^T Theta)``. Both give the same
models, and neither holds the K global models of a whole network in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.core.pairwise import Model, combine, product
from fedapp.lazy import Tensor, torch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

TOLERANCE = 1e-4
"""How far the sum of a distribution may be from 1: float32 rounding over a few hundred classes stays well below."""


def norm_distribution(head_weight: Array) -> Float64:
    """Return the class distribution that a head's weight norms suggest (Eq. 4): row norms divided by their sum.

    Parameters
    ----------
    head_weight : ndarray, (K, d)
        Weight matrix of the output layer, one row per class, without the bias.

    Returns
    -------
    ndarray, (K,), float64
        Sums to 1.

    Raises
    ------
    ValueError
        Values that are not finite, or all rows zero.
    """
    norms: Float64 = np.linalg.norm(head_weight.astype(np.float64), axis=1)
    total = norms.sum()
    if not np.isfinite(total):
        raise ValueError("the head has weights that are not finite")
    if total == 0:
        raise ValueError("all rows of the head are zero: its norms have no information about classes")
    distribution: Float64 = norms / total
    return distribution


def _distributions(what: str, rows: Array) -> Float64:
    """Return a matrix in float64; refuse rows that are not distributions."""
    shares = np.asarray(rows, dtype=np.float64)
    if shares.ndim != 2:
        raise ValueError(f"{what} must be a matrix, got shape {shares.shape}")
    if not np.isfinite(shares).all() or (shares < 0).any():
        raise ValueError(f"{what} must be finite and not negative")
    error = np.abs(shares.sum(axis=1) - 1)
    if error.max(initial=0.0) > TOLERANCE:
        worst = int(error.argmax())
        raise ValueError(f"row {worst} of {what} sums to {shares[worst].sum():.6g}, not to 1")
    return shares


def class_weights(n: Array, p: Array) -> Float64:
    """Return the weight of every client in every class's global model (Eq. 6).

    ``q_ij = n_i p_ij / sum_i' n_i' p_i'j``; the divisor n of the paper's ``n_i / n`` cancels. A class that no client
    holds (possible with empirical distributions only) would be 0/0. Its global model is then the FedAvg mean,
    ``q_ij = n_i / n``, so that every column still sums to 1.

    Parameters
    ----------
    n : array_like, (m,)
        Sample counts of the clients that answered.
    p : ndarray, (m, K)
        Their class distributions, rows summing to 1.

    Returns
    -------
    ndarray, (m, K), float64
        Columns sum to 1.

    Raises
    ------
    ValueError
        Shapes that do not fit, negative or non-finite values, rows that are not distributions, or no samples at all.
    """
    shares = _distributions("the class distributions", p)
    counts = np.asarray(n, dtype=np.float64)
    if counts.shape != shares.shape[:1]:
        raise ValueError(f"{len(shares)} distributions need {len(shares)} sample counts, got shape {counts.shape}")
    if not np.isfinite(counts).all() or (counts < 0).any() or counts.sum() == 0:
        raise ValueError("sample counts must be finite, not negative, and not all zero")
    mass = counts[:, None] * shares
    held = mass.sum(axis=0)
    fedavg = counts / counts.sum()
    return np.where(held > 0, mass / np.where(held > 0, held, 1.0), fedavg[:, None])


def weakly_held(n: Array, p: Array, tau: float) -> npt.NDArray[np.bool_]:
    """Return which classes the clients that answered hardly hold.

    Class j is weakly held if ``sum_i n_i p_ij < tau * sum_i n_i / K``: it has less than ``tau`` times the mass of an
    even split. A server under partial participation may keep the previous global model for such a class.

    Parameters
    ----------
    n, p : as in `class_weights`
        Sample counts and class distributions.
    tau : float
        Threshold; 0 marks no class.

    Returns
    -------
    ndarray, (K,), bool
    """
    shares, counts = _distributions("the class distributions", p), np.asarray(n, dtype=np.float64)
    weak: npt.NDArray[np.bool_] = counts @ shares < tau * counts.sum() / shares.shape[1]
    return weak


def mixing_matrix(recipients: Array, weights: Array) -> Float64:
    """Return ``A = P Q^T``: how much of every uploaded model goes into every recipient's (Eq. 5 in Eq. 7).

    Parameters
    ----------
    recipients : ndarray, (R, K)
        P, class distributions of the recipients. A client that never answered has 1/K everywhere.
    weights : ndarray, (m, K)
        Q, from `class_weights`.

    Returns
    -------
    ndarray, (R, m), float64
        Not negative. Rows sum to 1, because the rows of P and the columns of Q do.

    Raises
    ------
    ValueError
        Rows of P or columns of Q that do not sum to 1.
    """
    p, q = _distributions("the recipients' distributions", recipients), _columns(weights)
    # By PyTorch: its number of threads, on which the last bits depend, is set in every process.
    mixing: Float64 = (torch.from_numpy(p) @ torch.from_numpy(q).T).numpy()
    return mixing


def _columns(weights: Array) -> Float64:
    """Return Q in float64 after checking that its columns sum to 1."""
    return _distributions("the transposed class weights", np.asarray(weights).T).T


def cheaper_order(recipients: int, uploads: int, classes: int) -> Literal["direct", "factored"]:
    """Return the cheaper order of ``P Q^T Theta`` for R recipients, m uploads and K classes.

    ``direct``, ``(P Q^T) Theta``, needs R m multiply-adds per parameter; ``factored``, ``P (Q^T Theta)``, K (m + R).
    With everybody taking part, direct is cheaper below 2K clients.
    """
    return "direct" if recipients * uploads < classes * (uploads + recipients) else "factored"


def mix(models: Sequence[Model], recipients: Array, weights: Array) -> list[dict[str, Array]]:
    """Return the personalised models ``P Q^T Theta`` of R recipients (Eq. 5 and 7), in the cheaper order.

    Parameters
    ----------
    models : sequence of m mappings of str to ndarray
        Uploaded models, floating point, equal in names and shapes.
    recipients, weights : ndarray, (R, K) and (m, K)
        P and Q, as in `mixing_matrix`, whose errors are raised here too.

    Returns
    -------
    list of R dicts of str to ndarray
        See `fedapp.core.pairwise.product` for memory and precision. The mixing matrix is formed in float64.
    """
    mixing = mixing_matrix(recipients, weights)
    if cheaper_order(len(recipients), len(weights), weights.shape[1]) == "direct":
        return product([mixing], models)
    return product([recipients, weights.T], models)


def class_globals(models: Sequence[Model], weights: Array) -> list[dict[str, Array]]:
    """Return the K class-specific global models ``Q^T Theta`` (Eq. 5).

    They take the place of the uploads where K is smaller than the number of these.

    Parameters
    ----------
    models : sequence of m mappings of str to ndarray
        Uploaded models.
    weights : ndarray, (m, K)
        Q, from `class_weights`.

    Returns
    -------
    list of K dicts of str to ndarray
    """
    return combine(_columns(weights).T, models)


class Uploads:
    """The models of the clients that answered, added as they arrive, with at most 2K models in memory.

    When there are more, the K global models take their place. In all further sums (Eq. 5 and 6), that of class j is an
    upload of ``sum_i n_i p_ij`` samples, all of class j: it adds the same to the numerator and to the denominator.

    Parameters
    ----------
    num_classes : int
        K.

    Attributes
    ----------
    models : list of dict of str to ndarray
        What is held, m models.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.models: list[dict[str, Array]] = []
        self._n: list[float] = []
        self._p: list[Float64] = []

    @property
    def n(self) -> Float64:
        """Sample counts, (m,)."""
        return np.array(self._n, dtype=np.float64)

    @property
    def p(self) -> Float64:
        """Class distributions, (m, K)."""
        return np.array(self._p, dtype=np.float64)

    def add(self, model: dict[str, Array], n: float, p: Float64) -> None:
        """Add a model, kept by reference, with its sample count and its class distribution (K,)."""
        if len(self.models) == 2 * self.num_classes:
            mass = self.n @ self.p
            self.models = class_globals(self.models, class_weights(self.n, self.p))
            self._n, self._p = list(mass), list(np.eye(self.num_classes))
        self.models.append(model)
        self._n.append(n)
        self._p.append(p)


def wdr(head_weight: Tensor, p: Tensor) -> Tensor:
    """Return the weight-distribution regulariser ``|| p - pt ||_2`` (Eq. 8), not squared.

    The gradient keeps its length as the distance shrinks; the paper's factors lambda are chosen for that. At distance
    zero, and for a row of zeros, the subgradient is 0.

    Parameters
    ----------
    head_weight : Tensor, (K, d)
        Weight matrix of the output layer, without the bias.
    p : Tensor, (K,)
        Label distribution of the client's training data. No gradient flows into it.

    Returns
    -------
    Tensor, ()
        float32 (float64 for a float64 head), also inside an autocast region. A head of zeros counts as ``pt = 0``.
    """
    with torch.autocast(head_weight.device.type, enabled=False):
        rows = head_weight if head_weight.dtype == torch.float64 else head_weight.float()
        # vector_norm has a zero gradient at a row of zeros; the root of a sum of squares would have NaN there.
        norms = torch.linalg.vector_norm(rows, dim=1)
        share = norms / norms.sum().clamp_min(1e-12)  # Eq. 4
        distance: Tensor = torch.linalg.vector_norm(p.detach().to(share.dtype) - share)
        return distance
