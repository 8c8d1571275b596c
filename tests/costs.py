"""The costs of a round of each method, counted in a small run: `python -m tests.costs ID ...` writes them down.

They stand in `fedapp/conf/lists/methods.toml`. tests/test_contract.py makes the same runs and compares.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from clients.base import FedClient
from clients.fedproto import FedProtoClient
from fedapp import registry
from fedapp.cli.listing import NOTES
from fedapp.engines.local import RunResult, run
from fedapp.models import SplitModel

SETTINGS: dict[str, Any] = {
    "dataset": "digits", "data_fraction": 0.3, "clients": 3, "local_epochs": 1, "batch_size": 64, "alpha": 1.0,
}  # fmt: skip
SCORING = ((FedClient, "measure"), (FedProtoClient, "score_nearest"))
"""Functions whose passes are scoring and no cost of the method."""


def mixed(method: str) -> str:
    """Two architectures where the method allows them."""
    return "digits-a,digits-b" if registry.get(method).heterogeneous else "digits-a"


@contextlib.contextmanager
def counted() -> Iterator[dict[int, list[float]]]:
    """Count in a run, by round, the images that clients put through networks and their training images."""
    seen: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    on: list[int] = []
    represent, restore, train_round = SplitModel.represent, FedClient.restore, FedClient.train_round

    def add(x: torch.Tensor) -> None:
        if on and on[-1]:
            seen[on[-1]][0] += len(x)

    def through(model: SplitModel, x: torch.Tensor) -> torch.Tensor:
        add(x)
        with unseen():
            return represent(model, x)

    def restores(self: FedClient, *args: Any, **further: Any) -> None:
        restore(self, *args, **further)
        # A method may ask the trunk itself, for what comes before the last activation.
        self.model.features.register_forward_pre_hook(lambda _, given: add(given[0]))

    @contextlib.contextmanager
    def unseen() -> Iterator[None]:
        on.append(0)
        try:
            yield
        finally:
            on.pop()

    def trains(self: FedClient, payload: Any, server_round: int, **further: Any) -> Any:
        seen[server_round][1] += self.task.num_samples
        on.append(server_round)
        try:
            return train_round(self, payload, server_round, **further)
        finally:
            on.pop()

    def apart(original: Callable[..., Any]) -> Callable[..., Any]:
        def scores(self: FedClient, *args: Any, **further: Any) -> Any:
            with unseen():
                return original(self, *args, **further)

        return scores

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(SplitModel, "represent", through))
        stack.enter_context(mock.patch.object(FedClient, "restore", restores))
        stack.enter_context(mock.patch.object(FedClient, "train_round", trains))
        for owner, name in SCORING:
            stack.enter_context(mock.patch.object(owner, name, apart(getattr(owner, name))))
        yield seen


def costs(result: RunResult, seen: Mapping[int, list[float]]) -> list[float]:
    """Return kB up and down of a client in the last round, kB of its answers after it, and passes of that round."""
    last = result.rounds.iloc[-1]
    once = sum(float(v) for name, v in result.summary.items() if name.startswith("bytes_up_query."))
    images, own = seen[int(last["round"])]
    kilobytes = [float(value) / 1e3 for value in (last["bytes_up"], last["bytes_down"], once)]
    return [round(value, 1) for value in (*kilobytes, images / own)]


def main(names: Sequence[str]) -> None:
    """Count the named methods and write their costs."""
    text = NOTES.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for method in names:
            with counted() as seen:
                result = run(method=method, rounds=2, out=Path(folder) / method, model=mixed(method), **SETTINGS)
            found = f"{method} = {{ costs = {costs(result, seen)}, "
            text = re.sub(rf"^{method} = \{{ (costs = \[.*?\], )?", found, text, flags=re.M)
    NOTES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
