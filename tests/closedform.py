"""What the tests of heads from sums share: the worked example, a server, and clients that hold given features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fedapp import registry
from fedapp.core import sums
from fedapp.core.sums import FeatureSums
from fedapp.method import Arrays, Payload, Reply, ServerContext, ServerState
from fedapp.reduce.spec import Totals
from strategies._sums import HeadFromSums
from tests import handmade

W, B = "head.weight", "head.bias"
Data = Sequence[tuple[Any, Any]]
CLIENTS: Data = [
    ([[1, 2], [2, 1], [3, 3], [0, 4], [1, 5]], [0, 0, 0, 1, 1]),
    ([[4, 0], [2, 6], [0, 6], [5, 5]], [0, 1, 1, 2]),
    ([[3, 4]], [1]),
]
"""Three clients, three classes, d = 2."""


def context(classes: int = 3, width: int = 2) -> ServerContext:
    rng = np.random.default_rng(0)
    initial = {
        "features.0.weight": rng.standard_normal((4, 3)).astype(np.float32),
        W: rng.standard_normal((classes, width)).astype(np.float32),
        B: rng.standard_normal(classes).astype(np.float32),
    }
    return handmade.context(initial, 0, num_classes=classes, width=width)


def server(method: str, args: str = "", ctx: ServerContext | None = None) -> tuple[HeadFromSums, ServerState]:
    outer = registry.get(method)
    hparams = registry.parse_args(outer, args)
    resolved = registry.resolve(outer, hparams)
    strategy = resolved.strategy(resolved, hparams)
    assert isinstance(strategy, HeadFromSums)
    return strategy, strategy.init(ctx or context())


def answer(strategy: HeadFromSums, z: Any, y: Any) -> Arrays:
    """What a client with these features answers to `sums`."""
    c, d = strategy.context.num_classes, strategy.context.width
    labels = torch.tensor(y, dtype=torch.int64)
    keep = torch.bincount(labels, minlength=c)[labels] >= strategy.settings.min_count
    found = FeatureSums(c, d, strategy.method.client.squares, strategy.settings.energy())
    found.update(torch.tensor(z, dtype=torch.float64)[keep], labels[keep])
    return {f"sums/{n}": a for n, a in found.arrays().items()}


def asker(strategy: HeadFromSums, data: Data) -> Callable[[str, Payload], list[Reply]]:
    """Answer like clients that hold these features; every answer goes through the strategy's own check."""

    def ask(kind: str, payload: Payload) -> list[Reply]:
        replies = []
        for client, (z, y) in enumerate(data):
            if kind == "sums":
                arrays = answer(strategy, z, y)
            else:
                head = [torch.from_numpy(payload.all()[n]).double() for n in (W, B)]
                logits = torch.tensor(z, dtype=torch.float64) @ head[0].T + head[1]
                arrays = {"sums/loss": sums.scaled_losses(logits, torch.tensor(y, dtype=torch.int64))}
            metrics = {"received-correct": 1, "received-total": 2}
            replies.append(Reply(client, len(y), arrays, metrics, kind=f"query.{kind}"))
            assert strategy.schema({}, f"query.{kind}").check(replies[-1]) is None
        return replies

    return ask


def summed(strategy: HeadFromSums, state: ServerState, ask: Callable[[str, Payload], list[Reply]]) -> Totals:
    """The sums over clients that give the replies of `ask`."""
    return handmade.asking(strategy, ask)("sums", Payload(common=state["model"])).totals("sums")


def repaired(
    method: str, args: str = "", data: Data = CLIENTS, ctx: ServerContext | None = None
) -> tuple[Arrays, dict[str, Any]]:
    """The head that a method makes of these clients' features, as it is unless `args` say more, and what it reports."""
    strategy, state = server(method, args if "scale=" in args else f"{args} scale=none", ctx)
    state = strategy.finalize(state, handmade.asking(strategy, asker(strategy, data)))
    return state[method]["head"], strategy.report(state, {})["calibration"]


def together(data: Data) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.concatenate([np.asarray(z, np.float64) for z, _ in data]), np.concatenate(
        [np.asarray(y) for _, y in data]
    )


def random_data(clients: int, classes: int = 4, width: int = 5, seed: int = 0, shift: float = 0.0) -> Data:
    """Features of a number of clients; the union is the same for any number, dealt differently."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, 300)
    z = rng.standard_normal((300, width)) @ rng.standard_normal((width, width)) + y[:, None] + shift
    owner = np.random.default_rng([seed, clients]).integers(0, clients, 300)
    return [(z[owner == k], y[owner == k]) for k in range(clients) if (owner == k).any()]


def one_class_each(data: Data) -> Data:
    z, y = together(data)
    return [(z[y == c], y[y == c]) for c in np.unique(y)]
