"""The linear head on given representations: its logits, its re-training, and the ratio of its rows' norms.

Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS 2021:
Algorithm 1 re-trains a head on labelled representations, Section 4 transforms these, Section 3.3 normalises its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.lazy import F, Tensor, torch

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
ArrayOrTensor = TypeVar("ArrayOrTensor", Array, Tensor)


def tukey(z: ArrayOrTensor) -> ArrayOrTensor:
    """Return ``max(z, 0)^(1/2)`` entry by entry: ReLU, then Tukey's ladder of powers (Section 4, power 0.5).

    It makes features of any sign less skewed. The gradient is 0 where z <= 0.
    """
    if isinstance(z, torch.Tensor):
        # The root's slope is infinite at 0, and infinity times ReLU's zero would be NaN: training needs the detour.
        return torch.where(z > 0, torch.where(z > 0, z, 1).sqrt(), 0)
    return np.sqrt(np.maximum(z, 0))


def logits(z: Tensor, weight: Tensor, bias: Tensor, normalise: bool) -> Tensor:
    """Return ``W z + b``, or with ``normalise`` (Section 3.3) ``phi_i . z / ||phi_i||``.

    Parameters
    ----------
    z : Tensor, (B, d)
        Representations.
    weight, bias : Tensor, (C, d) and (C,)
        The head; with ``normalise`` the bias is not used.
    normalise : bool
        Whether only the direction of each weight vector counts.

    Returns
    -------
    Tensor, (B, C)
    """
    if normalise:
        return F.linear(z, F.normalize(weight, dim=1, eps=1e-12))
    return F.linear(z, weight, bias)


def retrain(
    head: tuple[Array, Array],
    z: Array,
    y: Array,
    steps: Iterable[Array],
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    normalise: bool = False,
) -> tuple[Float32, Float32]:
    """Re-train a head by SGD on the mean cross-entropy of labelled representations, from its present values (Alg. 1).

    Parameters
    ----------
    head : weight, ndarray (C, d), and bias, ndarray (C,)
        Not changed.
    z : ndarray, (n, d)
        Representations.
    y : ndarray, (n,), integer
        Their labels.
    steps : iterable of ndarray of int
        The rows of z that each step sees.
    lr, momentum, weight_decay : float
        Of SGD; momentum starts at 0.
    normalise : bool
        As in `logits`; the bias is then not trained.

    Returns
    -------
    weight, bias : ndarray, (C, d) and (C,), float32
        Rows of classes without a sample are left as they were, bit for bit.
    """
    from torch.optim.sgd import sgd

    # Logits of classes without a sample are left out of the loss: it would only push them down.
    seen = np.unique(y)
    w, b = (torch.tensor(part[seen], dtype=torch.float32, requires_grad=True) for part in head)
    inputs = torch.from_numpy(np.asarray(z, dtype=np.float32))
    labels = torch.from_numpy(np.searchsorted(seen, y).astype(np.int64))
    trained = [w] if normalise else [w, b]
    buffers: list[Tensor | None] = [None] * len(trained)
    for step in steps:
        rows = torch.from_numpy(step)
        loss = F.cross_entropy(logits(inputs[rows], w, b, normalise), labels[rows])
        gradients = list(torch.autograd.grad(loss, trained))
        with torch.no_grad():
            # The class SGD does the same, but loads PyTorch's compiler (100 MB) and takes 20 microseconds more a step.
            sgd(
                trained, gradients, buffers, lr=lr, momentum=momentum, weight_decay=weight_decay, dampening=0.0,
                nesterov=False, maximize=False,
            )  # fmt: skip
    new_weight, new_bias = (np.array(part, dtype=np.float32) for part in head)
    new_weight[seen], new_bias[seen] = w.detach().numpy(), b.detach().numpy()
    return new_weight, new_bias


def norm_ratio(weight: Array) -> float | None:
    """Return the largest over the smallest norm of a head's rows (C, d): 1 where no class is favoured by its norm.

    None where there are no rows or one of them is zero.
    """
    norms = np.linalg.norm(weight, axis=1)
    return float(norms.max() / norms.min()) if norms.size and norms.min() > 0 else None


def problem_of(z: Array | None, labels: Array | None, width: int, num_classes: int) -> str | None:
    """Return the reason that received arrays are not labelled representations, or None.

    Parameters
    ----------
    z, labels : ndarray or None
        What was received; None where it is missing.
    width, num_classes : int
        d and C, which the receiver expects.
    """
    fits = z is not None and labels is not None and labels.ndim == 1 and z.shape == (len(labels), width)
    if not fits or labels is None or not np.issubdtype(labels.dtype, np.integer):
        return f"features must be z (n, {width}) and integer labels (n,)"
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        return f"labels must lie in 0..{num_classes - 1}"
    return None
