"""Means per class, collected batch by batch.

Prototypes are mean representations (FedProto: Tan et al., AAAI 2022; FedGH: Yi et al., ACM MM 2023); federated
distillation exchanges mean outputs (Jeong et al., 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedapp.core.averages import lower_median
from fedapp.core.robust import norms_of
from fedapp.errors import Impossible
from fedapp.lazy import Tensor, torch

Array = NDArray[Any]
LONGEST = 10.0
"""A client's longest mean of a class has at most that many times 1 + the median length of the clients' longest ones."""


class Rows(NamedTuple):
    """One row for each of S classes.

    Attributes
    ----------
    values : (S, d) float32
        Means.
    labels : (S,) int32
        Classes, ascending.
    counts : (S,) int64
        Numbers of rows behind each mean, at least 1.
    """

    values: NDArray[np.float32]
    labels: NDArray[np.int32]
    counts: NDArray[np.int64]


class ClassMeans:
    """Sums of rows per class, in float64 and in the order in which they come.

    Parameters
    ----------
    num_classes, width : int
        C and d.
    device : device
        Where the rows are.
    """

    def __init__(self, num_classes: int, width: int, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(num_classes, width, dtype=torch.float64, device=device)
        self._counts = torch.zeros(num_classes, dtype=torch.int64, device=device)

    def add(self, rows: Tensor, labels: Tensor) -> None:
        """Add rows (n, d) with labels (n,) in 0 .. C - 1."""
        classes = torch.arange(len(self._counts), device=labels.device)
        # A product instead of a scattered sum: on a GPU the order of the latter changes from run to run.
        member = labels[None, :] == classes[:, None]
        self._sums += member.double() @ rows.detach().double()
        self._counts += member.sum(dim=1)

    def rows(self) -> Rows:
        """Return the mean of every class with a row."""
        labels = torch.nonzero(self._counts).reshape(-1)
        counts = self._counts[labels]
        values = (self._sums[labels] / counts[:, None]).cpu().numpy().astype(np.float32)
        return Rows(values, labels.cpu().numpy().astype(np.int32), counts.cpu().numpy())


def problem_of(values: NDArray[Any] | None, labels: NDArray[Any] | None, width: int, num_classes: int) -> str | None:
    """Return the reason that received arrays are not one row per class, or None.

    Parameters
    ----------
    values, labels : ndarray or None
        What was received; None where it is missing.
    width, num_classes : int
        d and C, which the receiver expects.
    """
    if values is None or labels is None:
        return Impossible("the values or the labels of the classes are missing")
    if not np.issubdtype(values.dtype, np.floating) or not np.issubdtype(labels.dtype, np.integer):
        return Impossible(
            f"class values have dtype {values.dtype} and labels {labels.dtype}, expected floating point and integers"
        )
    if labels.ndim != 1 or values.shape != (len(labels), width):
        return Impossible(
            f"class values have shape {values.shape} for labels of shape {labels.shape}, expected (S, {width}), (S,)"
        )
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        return Impossible(f"labels lie in {labels.min()} .. {labels.max()}, expected 0 .. {num_classes - 1}")
    if len(np.unique(labels)) < len(labels):
        return Impossible("a label occurs twice")
    return None


def shortened(means: Sequence[Array]) -> list[Array]:
    """Return the class means of all clients, (S, d) each; of a client with much longer ones than most, shorter ones."""
    longest = [float(norms_of(m.astype(np.float64)).max(initial=0.0)) for m in means]
    limit = LONGEST * (1 + lower_median(longest))
    return [m if found <= limit else m * (limit / found) for m, found in zip(means, longest, strict=True)]
