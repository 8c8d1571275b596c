"""The cases of `tools.goldens`: command lines, by name, and the data files that they read."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

ROOT = Path(__file__).parent.parent
Steps = list[list[str]]
"""Arguments of `fedapp` for each step of a case, or `["delete", PATH]`."""
TINY = "data-fraction=0.4 local-epochs=1 batch-size=32"
VARIANTS = {
    "fedavg-adam": "fedavg partition=pathological optimizer=adam fraction-train=0.5 evaluate-every=1",
    "fedavg-fp16": "fedavg wire-dtype=fp16 clip-update=0.5",
    "fedclassavg-paper": "fedclassavg method-args=preset=paper optimizer=adam",
    "fedclassavg-authors": "fedclassavg method-args=preset=authors optimizer=adam",
    "fedclassavg-all": "fedclassavg method-args=share=all",
    "fedclassavg-none": "fedclassavg method-args=share=none",
    "cwfedavg-empirical": "cwfedavg method-args=dist=empirical fraction-train=0.5",
    "ccvr-sums": "ccvr method-args=base=fedprox,cov=sums",
    "ccvr-oracle": "ccvr method-args=base=moon,transform=feature,oracle=true",
    "pccvr-fedbabu": "pccvr method-args=base=fedbabu",
    "fed3r-fednh": "fed3r method-args=base=fednh",
    "fedproto-all": "fedproto method-args=down=all",
    "ktpfl-weights": "ktpfl method-args=share=weights",
    "fedghg-count": "fedghg method-args=weights=count",
    "fedetf-linear": "fedetf method-args=etf=false",
}
"""A method with other settings than its defaults; a comma stands between hyperparameters."""
TYPICAL = {
    "fedavg": "", "fedclassavg": "", "cwfedavg": "", "fedgh": "", "ccvr": "", "fedproto": "", "scaffold": "",
    "fedper": "", "fed3r": "", "ifca": "",
}  # fmt: skip
"""Methods that run with every policy."""
POLICIES = {
    "robust": "robust=median",
    "robust-own": "robust=own",
    "count-cap": "count-cap=1.2",
    "secure-sum": "secure-sum=true",
    "dp-example": "dp=example dp-test=true",
    "dp-client": "dp=client dp-test=true clip-update=1.0",
    "dp-sgd": "dp=sgd dp-test=true",
    "select": "select=validation validation=0.2 evaluate-every=1 lr=0.2",
    "unseen": "unseen=1",
}
"""What a run does against liars, for privacy, to choose a round, with clients that do not train."""
NEEDED = {
    ("ccvr", "secure-sum"): "cov=sums", ("ccvr", "dp-example"): "base=none", ("fed3r", "dp-example"): "base=none",
    ("fedproto", "secure-sum"): "down=all",
}  # fmt: skip
"""Hyperparameters without which a policy would be refused."""
LIARS = {"liar": "1e6", "great-liar": "1e8"}
"""What the samples of a lying client are multiplied by. Its finite replies spoil the model: the run goes back."""
SMALLEST = (
    "method/fedclassavg", "method/fedgh", "method/ccvr", "method/cwfedavg", "mixed/fedproto", "robust/fedavg",
    "secure-sum/fedper", "resume/scaffold", "great-liar/fedproto", "dry-run/fedavg",
)  # fmt: skip
"""The cases that CI runs."""
PUBLISHED = {
    "mnist": (10, 28, 1), "fashion_mnist": (10, 28, 1), "emnist_letters": (26, 28, 1), "cifar10": (10, 32, 3),
    "cifar100": (100, 32, 3), "tiny_imagenet": (200, 64, 3), "cinic10": (10, 32, 3),
}  # fmt: skip
"""Classes, side and channels of the data sets of the recipes."""


def line(settings: str, clients: int = 5, rounds: int = 2) -> list[str]:
    """Return the arguments of a run whose `settings` are a method and `key=value` texts."""
    method, *pairs = settings.split()
    sets = [f"--set={pair.replace(',', ' ') if pair.startswith('method-args') else pair}" for pair in pairs]
    size = ["--clients", str(clients), "--rounds", str(rounds)]
    return ["run", "--method", method, "--engine", "local", "--out", "run", *size, *sets]


def of_methods() -> Iterator[tuple[str, Steps]]:
    """Yield the cases of every method: one architecture, several, and the text of a dry run."""
    files = sorted(p.stem for p in (ROOT / "strategies").glob("[a-z]*.py"))
    for method in (name for name in files if name != "base"):
        yield f"method/{method}", [line(f"{method} {TINY}")]
        mixed = f"{method} {TINY} model=digits-a,digits-b,digits-c fraction-train=0.7"
        yield f"mixed/{method}", [line(mixed)]
        yield f"dry-run/{method}", [["run", "--method", method, "--engine", "local", "--dry-run"]]
    for name, settings in VARIANTS.items():
        yield f"variant/{name}", [line(f"{settings} {TINY}")]


def of_policies(data: Path) -> Iterator[tuple[str, Steps]]:
    """Yield each typical method with each policy, with a lost state, with a resume and with liars."""
    for (method, args), (policy, settings) in itertools.product(TYPICAL.items(), POLICIES.items()):
        given = NEEDED.get((method, policy), args)
        yield f"{policy}/{method}", [line(f"{method} {TINY} {settings} method-args={given}")]
    for method in TYPICAL:
        # Two of three rounds, then the state folder of client 1 is gone.
        begun = line(f"{method} {TINY} min-replies=0.5 fraction-train=0.8")
        resumed = ["run", "--engine", "local", "--resume", "run", "--rounds", "3"]
        lost = ["delete", "run/state/run/1"]
        yield f"resume/{method}", [begun, resumed]
        yield f"lost-state/{method}", [begun, lost, resumed]
        yield f"lost-state-restart/{method}", [begun, lost, [*resumed, "--set", "lost-state=restart"]]
        for name, scale in LIARS.items():
            own = f"dataset=npz data-dir={data / f'{scale}.npz'} normalise=none"
            weak = "min-replies=0.6 max-abs=1e30 lr=0.3 local-epochs=1 batch-size=32"
            yield f"{name}/{method}", [line(f"{method} {own} {weak}", rounds=4)]


def of_recipes(data: Path) -> Iterator[tuple[str, Steps]]:
    """Yield each recipe: its text, and the whole configuration that it gives, with what would travel."""
    found = [tomllib.loads(p.read_text(encoding="utf-8")) for p in (ROOT / "fedapp" / "conf").rglob("*.toml")]
    names = [str(recipe["name"]) for file in found for recipe in file.get("recipe", ())]
    for name in sorted([*names, "digits", "har"]):
        where = data / "har.npz" if name == "har" else data
        given = [] if name == "digits" else [f"--set=data-dir={where}"]
        yield f"recipe/{name}", [["recipes", name], ["run", name, "--engine", "local", "--dry-run", *given]]


def all_cases(data: Path) -> dict[str, Steps]:
    """Return all cases by name.

    Parameters
    ----------
    data : folder of the files that :func:`write_data` writes.
    """
    return dict(itertools.chain(of_methods(), of_policies(data), of_recipes(data)))


def write_data(data: Path, recipes: bool) -> None:
    """Write the data files: digits of five clients of which the last one lies; with `recipes` black pictures too."""
    data.mkdir()
    digits = load_digits()
    client = np.arange(300) % 5
    for scale in LIARS.values():
        x = (digits.data[:300] / 16).astype(np.float32)
        x[client == 4] *= float(scale)
        np.savez(data / f"{scale}.npz", x=x, y=digits.target[:300], client=client)
    if not recipes:
        return
    for name, (classes, side, channels) in PUBLISHED.items():
        x_train, x_test = (np.zeros((count, side, side, channels), np.uint8) for count in (10_000, 2_000))
        y_train, y_test = (np.arange(len(x)) % classes for x in (x_train, x_test))
        np.savez_compressed(data / f"{name}.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    person = np.repeat(np.arange(30), 60)
    windows = np.random.default_rng(0).normal(size=(1800, 9, 128)).astype(np.float32)
    np.savez(data / "har.npz", x=windows, y=np.arange(1800) % 6, client=person)
