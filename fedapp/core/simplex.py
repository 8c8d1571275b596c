"""The smallest value of a quadratic form on the probability simplex.

FedPAC weighs heads by it (Xu, Tong, Huang, ICLR 2023). An active set finds it exactly, up to rounding: one variable
enters at a time, the equations of the present support are solved, and variables that would become negative leave. This
is Wolfe's method for the point of smallest norm (Mathematical Programming 11, 1976), on P instead of a Gram matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
RIDGE = 1e-12
"""Times the trace of P: the ridge on the diagonal, and how much smaller a gradient must be to count as smaller."""


def minimise(p: Float64) -> Float64:
    """Return the a >= 0 with sum 1 that minimises a^T P a.

    Parameters
    ----------
    p : (m, m) float64, symmetric and positive semidefinite; m >= 1.

    Returns
    -------
    (m,) float64. At the minimum (P a)_j is the same wherever a_j > 0, and not smaller elsewhere. Without a diagonal all
    are equally good, and the answer is 1/m each.
    """
    m = len(p)
    little = RIDGE * float(np.trace(p))
    if little <= 0:
        return np.full(m, 1 / m)
    q = p + little * np.eye(m)  # positive definite, so that every support has one solution
    a = np.zeros(m)
    a[int(np.argmin(np.diag(q)))] = 1.0
    for _ in range(10 * m):  # each pass lowers the value; rounding alone could go round in circles
        gradient = q @ a
        enters = int(np.argmin(np.where(a > 0, np.inf, gradient))) if (a == 0).any() else -1
        if enters < 0 or gradient[enters] >= a @ gradient - little:
            break
        support = np.append(np.flatnonzero(a), enters)
        while True:
            x = np.linalg.solve(q[np.ix_(support, support)], np.ones(len(support)))
            x /= x.sum()
            if (x > 0).all():
                break
            # Go towards x until the first entry becomes 0, and leave that one out.
            falls = x <= 0
            steps = np.where(falls, a[support] / np.where(falls, a[support] - x, 1.0), np.inf)
            first = int(np.argmin(steps))
            a[support] += steps[first] * (x - a[support])
            a[support[first]] = 0.0
            support = np.delete(support, first)
        a = np.zeros(m)
        a[support] = x
    return a
