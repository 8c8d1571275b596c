"""What secure sums cost: bytes and CPU seconds of one exchange, in this process.

`python -m reproduction study secure_sums`

Every client draws, shares, hides and reveals for itself, one after another, and three of them drop out with their
vectors. The least of several runs is printed. Flower's own messages come on top: three more exchanges in a round.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.datasets import load_digits

from benchmarks.pages import markdown
from fedapp.core import masks
from fedapp.core.secret_shares import SHARE
from fedapp.core.secure_sum import KEY, SEALED, Collector, Member, noise_share, threshold

HEAD = 10 * 513
"""Numbers in a head of 10 classes on 512 features: 20 KB in float32."""
GONE = 3
"""Clients whose vectors do not arrive."""
DROPOUT = 0.34


def measured(clients: int, numbers: int, gone: int) -> dict[str, float]:
    """Return CPU seconds of one exchange: the mean of a client's steps, and the server's."""
    taken: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        started = time.thread_time()
        found = work(*arguments)
        taken[name].append(time.thread_time() - started)
        return found

    rng, least = np.random.default_rng(clients), threshold(clients, DROPOUT)
    members = {c: Member(c, {}) for c in range(clients)}
    keys = {c: m.key() for c, m in members.items()}
    collector = Collector("benchmark", keys, least)
    for c, m in members.items():
        collector.offers[c] = timed("shares", m.offer, collector.tag, keys, least)
    values = {c: {"head": rng.normal(size=numbers) * 700} for c in members}
    for c in list(members)[gone:]:
        others, rows = collector.inbox(c)
        sealed = {o: row.tobytes() for o, row in zip(others, rows, strict=True)}
        vector = masks.encode(values[c], clients)
        hidden = timed("masks", members[c].hide, collector.tag, sealed, vector)
        timed("add", collector.add, c, hidden)
    left = sorted(collector.summed)
    agreed = {c: timed("agree", members[c].agree, collector.tag, left) for c in left}
    codes = {c: dict(zip(left, map(bytes, collector.codes(c, agreed)), strict=True)) for c in left}
    shares = {c: timed("reveal", members[c].reveal, collector.tag, codes[c]) for c in left}
    total = masks.decode(timed("open", collector.open, shares), {"head": (numbers,)})["head"]
    error = np.abs(total - sum(values[c]["head"] for c in left)).max()
    assert error <= masks.rounding(clients), error
    return {name: float(np.mean(seconds)) for name, seconds in taken.items()} | {"add": sum(taken["add"])}


def sizes(clients: int, numbers: int) -> dict[str, int]:
    """Return the bytes of arrays that one client sends and gets besides its payload, and the plain reply's."""
    return {
        "plain": 4 * numbers,
        "hidden": 8 * numbers,
        "up": KEY + KEY + KEY + clients * SEALED + clients * KEY + clients * SHARE,
        "down": clients * (8 + KEY) + (clients - 1) * (8 + SEALED) + 8 * clients + clients * (8 + KEY),
    }


def noise_multiplier(epsilon: float, delta: float) -> float:
    """Return sigma / sensitivity of the Gaussian mechanism (Balle and Wang, ICML 2018, Theorem 8)."""

    def passed(z: float) -> float:
        return float(norm.cdf(0.5 / z - epsilon * z) - np.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z) - delta)

    return float(brentq(passed, 1e-2, 1e3))


def utility(epsilon: float) -> dict[str, tuple[float, float]]:
    """Return accuracy of noised class means on digits, mean and deviation over 20 splits, by where the noise is.

    One release of class counts and sums of unit-norm pixels, one image added or removed, delta 1e-5. `each`: every
    client adds the noise of a release. `sum`: every client adds its share, and all answer. `worst`: t answer, of whom
    one takes its noise away; the server has the data of all, so that only the noise differs.
    """
    x, y = load_digits(return_X_y=True)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    z, least = noise_multiplier(epsilon, 1e-5) * np.sqrt(2), threshold(10, DROPOUT)
    share = noise_share(10, least, 1)
    variances = {"none": 0.0, "each": 10, "sum": 10 * share, "worst": (least - 1) * share}
    found: dict[str, list[float]] = {name: [] for name in variances}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(y))
        test, train = order[:450], order[450:]
        sums = np.stack([x[train][y[train] == c].sum(axis=0) for c in range(10)])
        counts = np.bincount(y[train], minlength=10).astype(float)
        for name, variance in variances.items():
            deviation = z * np.sqrt(variance)
            noised = counts + rng.normal(size=10) * deviation
            means = (sums + rng.normal(size=sums.shape) * deviation) / np.maximum(noised, 1)[:, None]
            nearest = ((x[test][:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
            found[name].append(float(np.mean(nearest == y[test])))
    return {name: (float(np.mean(v)), float(np.std(v))) for name, v in found.items()}


def main(
    repeats: int = 3,
    noise: Annotated[bool, typer.Option("--noise", help="accuracy of noised class means instead")] = False,
) -> None:
    """Print a table for several numbers of clients."""
    if noise:
        heads = "epsilon|none|at each client|shares, all 10 answer|shares, 7 answer and 1 helps the server"
        found = {epsilon: utility(epsilon).values() for epsilon in (0.5, 1, 2, 4, 8)}
        print(
            "\n".join(markdown(heads, [(f"{e:g}", *(f"{m:.2f} ± {d:.2f}" for m, d in of)) for e, of in found.items()]))
        )
        return
    rows = []
    for clients in (20, 100):
        runs = [measured(clients, HEAD, GONE) for _ in range(repeats)]
        best = {name: min(run[name] for run in runs) for name in runs[0]}
        size = {name: f"{value / 1000:.1f} KB" for name, value in sizes(clients, HEAD).items()}
        steps = [f"{1000 * best[name]:.1f} ms" for name in ("shares", "masks", "agree", "reveal")]
        server = f"{1000 * (best['add'] + best['open']):.0f} ms"
        sent = (size[n] for n in ("plain", "hidden", "up", "down"))
        rows.append((clients, threshold(clients, DROPOUT), *sent, *steps, server))
    heads = "clients|t|plain reply|hidden vector|further up|down|shares|masks|agree|reveal|server"
    print("\n".join(markdown(heads, rows)))
