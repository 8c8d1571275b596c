"""What secure sums cost: bytes and CPU seconds of one exchange, in this process: `python -m benchmarks.secure_sums`.

Every client draws, shares, hides and reveals for itself, one after another, and three of them drop out with their
vectors. The least of several runs is printed. Flower's own messages come on top: three more exchanges in a round.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedapp.core import masks
from fedapp.core.secret_shares import SHARE
from fedapp.core.secure_sum import KEY, SEALED, Collector, Member, threshold

HEAD = 10 * 513
"""Numbers in a head of 10 classes on 512 features: 20 KB in float32."""
GONE = 3
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
    left = collector.summed
    shares = {c: timed("reveal", members[c].reveal, collector.tag, left) for c in left}
    total = masks.decode(timed("open", collector.open, shares), {"head": (numbers,)})["head"]
    error = np.abs(total - sum(values[c]["head"] for c in left)).max()
    assert error <= masks.rounding(clients), error
    return {name: float(np.mean(seconds)) for name, seconds in taken.items()} | {"add": sum(taken["add"])}


def sizes(clients: int, numbers: int) -> dict[str, int]:
    """Return the bytes of arrays that one client sends and gets beside its payload, and the plain reply's."""
    return {
        "plain": 4 * numbers,
        "hidden": 8 * numbers,
        "up": KEY + KEY + KEY + clients * SEALED + clients * SHARE,
        "down": clients * (8 + KEY) + (clients - 1) * (8 + SEALED) + 8 * clients,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for several numbers of clients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--numbers", type=int, default=HEAD, help="in the vector of a client")
    parser.add_argument("--gone", type=int, default=GONE, help="clients whose vectors do not arrive")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    print(
        "| clients | t | plain reply | hidden vector | shares and keys up | down | shares | masks | reveal | server |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for clients in given.clients:
        runs = [measured(clients, given.numbers, given.gone) for _ in range(given.repeats)]
        best = {name: min(run[name] for run in runs) for name in runs[0]}
        size = {name: f"{value / 1000:.1f} KB" for name, value in sizes(clients, given.numbers).items()}
        steps = [f"{1000 * best[name]:.1f} ms" for name in ("shares", "masks", "reveal")]
        server = f"{1000 * (best['add'] + best['open']):.0f} ms"
        cells = [clients, threshold(clients, DROPOUT), *(size[n] for n in ("plain", "hidden", "up", "down")), *steps]
        print("| " + " | ".join(map(str, [*cells, server])) + " |")


if __name__ == "__main__":
    main()
