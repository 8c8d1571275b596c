"""Heads, client states and label shares of a run, as its directory holds them.

Every function takes a run (`fedapp.results.runs`). Where its directory lacks what is needed, the function raises
`Unavailable` with the reason and with the command that would make the missing piece.

| symbol (cwFedAvg)     | here                                                                |
|-----------------------|---------------------------------------------------------------------|
| p_i                   | `label_shares`, (K, C) shares of the classes in the training splits |
| A = p~ Q^T (Eq. 6, 7) | `who_learns_from_whom`                                              |
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import registry
from fedapp.config import RunConfig
from fedapp.learning.state import StateError, read_safetensors
from fedapp.method import Arrays, Blend, Method
from fedapp.results.runs import RUN_MARK, RunResult
from fedapp.results.statistics import Floats, Ints
from fedapp.transport import checkpoint


class Unavailable(Exception):
    """A run directory lacks what a computation needs.

    Parameters
    ----------
    why : one sentence without a full stop.
    command : what would make it, or an empty string.
    """

    def __init__(self, why: str, command: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.command = command


def config_of(run: RunResult) -> RunConfig:
    """Return the run's configuration; raise `Unavailable` where this version does not accept it."""
    if run.config is None:
        raise Unavailable(f"this version does not accept the run's configuration ({run.problem})")
    return run.config


def client_folders(run: RunResult) -> dict[int, Path]:
    """Return the folders in which the clients of this run keep their state, by client."""
    config = config_of(run)
    # A run directory that was moved or copied takes OUT/state along.
    root = Path(config.storage.state_dir) if config.storage.state_dir else run.out / "state"
    folder = root / (config.storage.federation or "run")
    numbered = sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []
    return {client: folder / str(client) for client in numbered}


def client_arrays(run: RunResult) -> dict[int, tuple[int, Arrays]]:
    """Read the newest stored state of every client: {client: (round, arrays by name)}.

    Names start with `model/` (the model after local training) or `own/`.

    Raises
    ------
    Unavailable : no client state of this run.
    """
    found: dict[int, tuple[int, Arrays]] = {}
    for client, folder in client_folders(run).items():
        if files := sorted(folder.glob(f"{run.versions.get('run', '')}.*.safetensors")):
            try:
                arrays, header = read_safetensors(files[-1])
            except StateError as e:
                raise Unavailable(str(e)) from e
            found[client] = int(str(header["round"])), arrays
    if not found:
        again = shlex.join(["fedapp", "run", str(run.out / RUN_MARK)])
        raise Unavailable("the clients' stored states are missing (OUT/state)", again)
    return found


def method_of(run: RunResult) -> tuple[Method, Any]:
    """Return the run's method and its hyperparameters."""
    return config_of(run).method_and_hparams()


def server_state(run: RunResult) -> Mapping[str, Any]:
    """Read the server's state after the last round."""
    try:
        latest = checkpoint.latest(run.out / "checkpoint")
    except StateError as e:
        raise Unavailable(f"the checkpoint is damaged ({e})") from e
    if latest is None:
        raise Unavailable("the checkpoint of the last round is missing: put checkpoint/ back")
    return latest[1]


def counts_of(run: RunResult) -> Ints:
    """Return the training images of each client and class, (K, C); `Unavailable` without a data card."""
    if not run.counts.size:
        raise Unavailable("the run has no data card: real devices keep their class counts to themselves")
    return run.counts


def label_shares(run: RunResult) -> Floats:
    """Return p (K, C), the shares of the classes in the clients' training splits; rows sum to 1.

    Raises
    ------
    Unavailable : no data card.
    """
    counts = counts_of(run)
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def head_norms(run: RunResult) -> tuple[list[int], Floats]:
    """Return client ids, and the L2 norms of the rows of their heads (K, C) after the last local training."""
    stored = client_arrays(run)
    rows = [np.linalg.norm(a["model/head.weight"].astype(np.float64), axis=1) for _, a in stored.values()]
    return list(stored), np.stack(rows)


def who_learns_from_whom(run: RunResult) -> Blend:
    """Return client ids, A (K, K) and a phrase: A[i, j] is the share of client j in the next payload of client i.

    The method's strategy says it (`Strategy.blend`), from the checkpoint of the last round.

    Raises
    ------
    Unavailable : the method sends one model to all clients, or none; or no one has taken part yet.
    """
    method, hparams = method_of(run)
    table = run.clients.drop_duplicates("client", keep="last")
    sizes = {int(c): float(n) for c, n in zip(table["client"], table["num_samples"])}
    found: Blend | None = method.strategy(method, hparams).blend(server_state(run), sizes)
    if found is None:
        one, *others = registry.blending()
        raise Unavailable(
            f"{run.method} keeps no weights of clients for each other",
            f"fedapp run --method {one} ... (or {', '.join(others)})",
        )
    return found
