"""FedPer on HAR in plain PyTorch: `python -m reproduction study har_plain har.npz`, a check of docs/har.md.

It shares no code with fedapp but, with `--start fedapp`, the initial models. It prints for each seed the mean accuracy
of the 30 people, in percent: `received`, the last average under each person's own head, and `trained` before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

ROUNDS, EPOCHS, BATCH = 20, 2, 16
State = dict[str, Tensor]


def network() -> nn.Sequential:
    """Return `cnn1d` for 9 channels of 128 steps; the last layer is the head."""
    return nn.Sequential(
        nn.Conv1d(9, 32, 7, 2, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(32, 48, 5, padding=2), nn.ReLU(),
        nn.MaxPool1d(2), nn.Conv1d(48, 64, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(),
        nn.Linear(512, 56), nn.ReLU(), nn.Linear(56, 6),
    )  # fmt: skip


def initial(seed: int, start: str) -> State:
    """Return the initial model of a seed: PyTorch's own, or the values with which a run of fedapp begins."""
    torch.manual_seed(seed)
    state = network().state_dict()
    if start == "own":
        return state
    from fedapp import sampling
    from fedapp.models import build_model

    net = build_model("cnn1d", num_classes=6, shape=(9, 128), seed=sampling.server_model_seed(seed))
    values = [*net.features.parameters(), net.head.weight, net.head.bias]
    return {name: value.detach().clone() for name, value in zip(state, values, strict=True)}


def scores(path: Path, seed: int, start: str) -> tuple[float, float]:
    """Return the means of `received` and `trained`."""
    data = np.load(path)
    x, train = data["x"].astype(np.float32), data["split"] == "train"
    x = (x - x[train].mean((0, 2), keepdims=True)) / x[train].std((0, 2), keepdims=True)
    x, y = torch.from_numpy(x), torch.from_numpy(np.unique(data["y"], return_inverse=True)[1])
    people = [(np.flatnonzero(train & (data["client"] == c)), np.flatnonzero(~train & (data["client"] == c)))
              for c in np.unique(data["client"])]  # fmt: skip
    net, shared = network(), initial(seed, start)
    head = [name for name in shared if name.startswith("12.")]
    heads = [{name: shared[name] for name in head} for _ in people]

    def accuracy(rows: np.ndarray) -> float:
        with torch.inference_mode():
            return float((net(x[rows]).argmax(1) == y[rows]).float().mean())

    trained: list[float] = []
    for number in range(ROUNDS):
        total: State = {name: torch.zeros_like(value) for name, value in shared.items()}
        trained = []
        for client, (rows, held) in enumerate(people):
            net.load_state_dict({**shared, **heads[client]})
            step = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
            for epoch in range(EPOCHS):
                order = np.random.default_rng([seed, number, client, epoch]).permutation(rows)
                for at in range(0, len(order), BATCH):
                    step.zero_grad()
                    batch = order[at : at + BATCH]
                    F.cross_entropy(net(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                    step.step()
            trained.append(accuracy(held))
            mine = {name: value.clone() for name, value in net.state_dict().items()}
            heads[client] = {name: mine[name] for name in head}
            total = {name: total[name] + len(rows) * mine[name] for name in total}
        shared = {name: value / sum(len(rows) for rows, _ in people) for name, value in total.items()}
    received = []
    for client, (_, held) in enumerate(people):
        net.load_state_dict({**shared, **heads[client]})
        received.append(accuracy(held))
    return 100 * float(np.mean(received)), 100 * float(np.mean(trained))


def main(
    data: Annotated[Path, typer.Argument(help="har.npz")],
    start: Annotated[Literal["own", "fedapp"], typer.Option(help="initial models")] = "own",
    seeds: int = 6,
) -> None:
    """Print the scores of six seeds."""
    torch.set_num_threads(1)
    for seed in range(seeds):
        received, trained = scores(data, seed, start)
        print(f"seed {seed}: received {received:.1f}, trained {trained:.1f}", flush=True)
