"""A common head over private adapters, for docs/frozen.md: `python -m reproduction study adapters --features DIR`.

The 20 clients of Banking77 are those of `frozen`. Every second one has another body: random projections of MiniLM's
features. With `model = adapter` each client has a linear layer of its own before the head. The search of
`frozen_gradient` chooses each method's step. The table has the mean accuracy of the clients of each body, on their own
test rows and after one more local epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.pages import markdown
from fedapp import config as configuration
from fedapp.engines.local import run
from fedapp.results.statistics import spread
from fedapp.tasks.simulated import federated
from reproduction.studies.frozen import SETTINGS
from reproduction.studies.frozen_gradient import EVEN, SEEDS, STEPS, step_of

METHODS = ("local", "lgfedavg", "fedgh", "fedclassavg", "cwfedavg(share=head)", "cwfedavg(share=head lam=0)")
WIDTH = 24
"""Random projections that stand for the features of a weak body."""
ROUNDS = 15


def write_sites(features: Path, folder: Path) -> None:
    """Write a file for each client of the setting `banking77`; clients with odd numbers have projections."""
    flat = {"dataset": "npz", "data-dir": str(features), "model": "identity", "method": "fedavg"}
    dealt = {name.replace("_", "-"): value for name, value in SETTINGS["banking77"].values.items()}
    data = federated(configuration.from_flat({**flat, **dealt, "partition-seed": 0}), int(dealt["clients"]))
    projection = np.random.default_rng(0).normal(size=(data.inputs.shape[0], WIDTH)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    for number, client in enumerate(data.partition.clients):
        x, y = data.dataset.take(np.concatenate([client.train, client.test]))
        split = np.repeat(["train", "test"], [len(client.train), len(client.test)])
        x = x.astype(np.float32) @ projection if number % 2 else x
        np.savez(folder / f"{number}.npz", x=x, y=y, split=split, class_names=list(data.dataset.classes))


def measured(method: str, folder: Path, out: Path) -> list[str]:
    """Return the method's row: its step, and for each body the mean over clients, with the spread over seeds."""
    values = {**EVEN, "rounds": ROUNDS, "data_dir": folder, "partition": "by-client", "model": "adapter"}
    step = step_of(method, STEPS["banking77"], values, out / f"{method}-search")
    name, _, args = method.rstrip(")").partition("(")
    scores = []
    for seed in range(SEEDS):
        final = run(method=name, method_args=args, lr=step, seed=seed, out=out / f"{method}-s{seed}", **values).final
        own = final.set_index(final["name"].astype(int))["trained_accuracy"]
        scores.append([own[own.index % 2 == odd].mean() for odd in (0, 1)])
    return [method, f"{step:g}", *(spread(column) for column in np.transpose(scores).tolist())]


def main(
    features: Annotated[Path, typer.Option(help="folder with banking77.npz")],
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/adapters"),
) -> None:
    """Measure all methods and print the table."""
    out = out.expanduser().absolute()
    write_sites(features.expanduser().absolute() / "banking77.npz", out / "sites")
    rows = [measured(method, out / "sites", out) for method in METHODS]
    print("\n".join(markdown("method|step:|MiniLM|projections", rows)))
