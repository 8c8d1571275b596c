"""Figures of what a round costs; `reproduction/analysis/costs.py` computes it."""

from __future__ import annotations

import numpy as np

from fedapp.results.analysis import Unavailable
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.plots import sweep
from fedapp.results.figures.words import Runs, Words, each
from reproduction.analysis import costs
from reproduction.figures import plots


def bytes_and_flops(runs: Runs) -> Words:
    """Bytes and operations of a client in a round, one mark per method (FedClassAvg, Table 5)."""
    found = each(runs, costs.cost)
    said = "; ".join(
        f"{n}: {c.up:,.0f} B up, {c.down:,.0f} B down, {c.flops / 1e9:.3g} GFLOP" for n, c in found.items()
    )
    return (
        "Bytes that a client sends and receives in a round, against the floating-point operations of its local "
        f"training (a multiplication and an addition are two). Mean over clients: {said}.",
        f"Scatter plot of operations against bytes. {said}.",
        plots.cost({n: (c.up + c.down, c.flops) for n, c in found.items()}),
    )


def head_scaling(runs: Runs) -> Words:
    """Bytes against the N numbers before the head (FedClassAvg, Section 5.4: O(N))."""
    found = sorted({costs.head_bytes(run) for run in runs})
    classes = {c for _, c, _ in found}
    if len({n for n, _, _ in found}) < 2 or len(classes) > 1:
        raise Unavailable(
            "it needs runs on data of one number of classes with models of different widths",
            "fedapp run --method fedclassavg --set model=... for moon, fedgh-5 and cnn",
        )
    c = classes.pop()
    n, sent = np.array([w for w, _, _ in found], float), np.array([b for _, _, b in found])
    said = ", ".join(f"{b:,.0f} B for N = {w:g}" for w, b in zip(n, sent))
    return (
        f"Bytes of the head that a client sends in a round, as the runs counted them: {said}. Dashed: 4 C (N + 1), "
        f"weight and bias as float32 for C = {c} classes.",
        f"Line chart of bytes against the width of the representation: {said}.",
        sweep(
            {"": [Curve("measured", n, sent), Curve(f"4 C (N + 1), C = {c}", n, 4 * c * (n + 1))]},
            "numbers before the head, N", "bytes up per client and round", percent=False,
        ),
    )  # fmt: skip
