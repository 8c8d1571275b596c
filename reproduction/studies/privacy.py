"""The measured tables of docs/privacy.md: `python -m reproduction study privacy --data DIR`.

`accuracy` : global accuracy against epsilon of heads from noised statistics, on a body that was trained on other
data. Features are read once for each data set and seed. What the clients release and what the server makes of it is the
code of a run (`fedapp.privacy.statistics`, `core.privacy.noised`, the strategies), so a cell with noise at each client
is the score of a run with these keys. Noise on the sum: each client adds its share of the variance
(`core.secure_sum.noise_share`) and the server adds up what all of them send, as it would be opened to it.

`choice` : the weight of second moments and the least eigenvalue of a scatter, on persons of HAR's training split.

`rows` : rows of features rebuilt from their second moments (`leakage.from_moments`).

`attacks` and `cost` : see `reproduction/studies/leakage.py` and `reproduction/studies/secure_sums.py`.

What the tables need is kept in docs/privacy.json. Without `--data` nothing is measured, and the tables are made of it.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast
from unittest import mock

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.pages import markdown, replaced
from clients.base import FedClient
from fedapp import registry, sampling
from fedapp.core import privacy
from fedapp.core.noise import seeded
from fedapp.core.privacy import Joint, Privacy, Squares, noise_for, noised
from fedapp.core.secure_sum import noise_share, threshold
from fedapp.data.transforms import InputSpec
from fedapp.engines import local as engines
from fedapp.method import Arrays, Reply, ServerContext
from fedapp.models import SplitModel, build_model
from fedapp.privacy import statistics
from fedapp.reduce.reader import Policy
from fedapp.results.directory import write_text
from fedapp.results.statistics import spread
from fedapp.settings import ModelSettings
from reproduction.figures.models import head_inputs
from reproduction.studies import leakage, secure_sums
from reproduction.studies.choosing import DOCS, named

Array = NDArray[Any]
Change = Callable[[Any], None]

CLIENTS = 10
COLLUDERS = 1
DROPOUT = 0.34
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
PLACES = ("client", "sum")
SEEDS = (0, 1, 2)
ROUNDS = 100
"""Of FedGH, whose header takes one step for each class mean in a round; its clients release once."""
METHODS: dict[str, tuple[str, str, Squares]] = {
    "fedgh": ("", "noised/", "none"),
    "ccvr": ("base=none", "statistics/", "classes"),
    "fed3r": ("base=none lam=0.01", "sums/", "all"),
    "lda": ("base=none", "sums/", "all"),
    "fedncm": ("base=none", "sums/", "none"),
}
"""By method: its arguments, the prefix of what its clients send, and the second moments among it."""
SHOWN = ("fedgh", "ccvr", "fed3r", "fedncm")


@dataclass(frozen=True)
class Source:
    """A data set, and the other one that its body is trained on.

    Attributes
    ----------
    title, note : for the tables.   public : of the body, by its file in the folder of data.   model : of both.
    side : of the body's images after averaging, 0 = as they are.   fraction : share of the data set's images that
        is used.
    """

    title: str
    note: str
    public: str
    model: str
    side: int = 0
    fraction: float = 1.0


TENTH = "a tenth of the images, 6,000 for training and 1,000 for the test; `fedproto-a`, 50 features, body trained on"
SOURCES = {
    "digits": Source(
        "Digits", "all 1,797 images; `digits-a`, 64 features, body trained on MNIST averaged to 8 × 8 pixels",
        "mnist", "digits-a", 8,
    ),
    "mnist": Source("MNIST", f"{TENTH} Fashion-MNIST", "fashion_mnist", "fedproto-a", fraction=0.1),
    "fashion_mnist": Source("Fashion-MNIST", f"{TENTH} MNIST", "mnist", "fedproto-a", fraction=0.1),
}  # fmt: skip


# ---- features --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """What the head sees, of norm 1.

    Attributes
    ----------
    clients, test : features (n, d) float32 with labels (n,) int64, of each client's training images and of test images.
    head : `head.weight` and `head.bias` that a run begins with.   classes : C.
    """

    clients: list[tuple[Array, Array]]
    test: tuple[Array, Array]
    head: Arrays
    classes: int

    @property
    def width(self) -> int:
        """The number of features, d."""
        return int(self.test[0].shape[1])


def shrunk(images: Array, side: int) -> Array:
    """Return images (n, H, W) uint8 as (n, side, side): means over squares, without the border that is left over."""
    step = images.shape[1] // side
    border = (images.shape[1] - step * side) // 2
    inner = images[:, border : border + step * side, border : border + step * side].astype(np.float64)
    means = inner.reshape(len(images), side, step, side, step).mean(axis=(2, 4))
    rounded: Array = np.rint(means).astype(np.uint8)
    return rounded


def extractor(data: Path, source: Source, seed: int, folder: Path) -> Path:
    """Train a body on a tenth of another data set's training images, and return its file of weights.

    The run is FedAvg with one client: 3 rounds of one epoch at the method's defaults.
    """
    where: dict[str, Any] = {"dataset": source.public, "data_dir": str(data)}
    if source.side:
        small = folder / f"{source.public}-{source.side}.npz"
        if not small.is_file():
            with np.load(data / f"{source.public}.npz") as stored:
                np.savez(small, x=shrunk(stored["x_train"], source.side), y=stored["y_train"])
        where = {"dataset": "npz", "data_dir": str(small)}
    out = folder / f"{source.public}-{source.side}-s{seed}"
    return trained(out, model=source.model, rounds=3, seed=seed, data_fraction=0.1, **where)


def trained(out: Path, **values: Any) -> Path:
    """Train a model by FedAvg with one client, and return its file of weights."""
    engines.run(
        out=out, method="fedavg", clients=1, partition="iid", local_epochs=1, protocols="global", final_training=False,
        keep_models=False, **values,
    )  # fmt: skip
    return out / "models" / "last.safetensors"


def head_of(net: SplitModel) -> Arrays:
    """Return a copy of the head's arrays."""
    return {f"head.{name}": p.detach().numpy().copy() for name, p in net.head.named_parameters()}


def settings(data: Path, dataset: str, weights: Path, seed: int) -> dict[str, Any]:
    """Return the run-config keys that a cell's run has besides method, epsilon and rounds."""
    return {
        "dp": "example", "dataset": dataset, "data-dir": str(data), "model": SOURCES[dataset].model, "seed": seed,
        "weights": str(weights), "clients": CLIENTS, "partition": "dirichlet", "alpha": 0.5, "protocols": "global",
        "data-fraction": SOURCES[dataset].fraction,
    }  # fmt: skip


def read_features(data: Path, dataset: str, weights: Path, seed: int) -> Features:
    """Read the features of all clients' training images and of the central test images, as a run does."""
    values = settings(data, dataset, weights, seed)
    found, net = leakage.parts_of({"method": "fedncm", "method-args": "base=none", **values})
    cpu = torch.device("cpu")
    central = found.central(cpu)
    assert central is not None
    sets = [*(found.tensors("train", client, cpu) for client in range(CLIENTS)), central]
    *parts, test = [(head_inputs(net, x, found.inputs), y.numpy()) for x, y in sets]
    return Features(parts, test, head_of(net), found.dataset.num_classes)


# ---- from features to a score ----------------------------------------------------------------------------------------


def exact(features: Features, squares: Squares) -> list[Array]:
    """Return what each client would release, as one vector, before the noise."""
    found: list[Array] = []

    def keep(values: Array, sensitivity: float, what: str) -> tuple[Array, bool]:
        found.append(values)
        return values, False

    for z, y in features.clients:
        client = SimpleNamespace(
            releaser=SimpleNamespace(release_once=keep),
            model=SimpleNamespace(width=features.width),
            task=SimpleNamespace(num_classes=features.classes),
        )
        statistics.release(cast(FedClient, client), [(torch.from_numpy(z), torch.from_numpy(y))], squares, "")
    return found


def accuracy(method: str, features: Features, answers: Sequence[Arrays], noise: float, seed: int) -> float:
    """Return the accuracy on the test images of the head that the method's server makes of the clients' answers.

    Parameters
    ----------
    answers : parts of each client's release, by name.   noise : z of each client's, which the server knows.
    """
    arguments, prefix, _ = METHODS[method]
    described, hparams = registry.configured(method, arguments)
    strategy = described.strategy(described, hparams, policy=Policy(privacy=Privacy("example", math.inf, DELTA, noise)))

    def score(arrays: Mapping[str, Array], scalars: Any = None) -> float:
        z, y = features.test
        return float(np.mean((z @ arrays["head.weight"].T + arrays["head.bias"]).argmax(axis=1) == y))

    state = strategy.init(ServerContext(
        seed=seed, clients=(), num_classes=features.classes, width=features.width, initial=features.head,
        initial_from=lambda k: features.head, rng=lambda purpose, *n: sampling.rng(seed, purpose, *n), score=score,
    ))  # fmt: skip
    replies = [
        Reply(k, len(y), {prefix + name: array for name, array in parts.items()}, {"total": 0, "correct": 0})
        for k, (parts, (_, y)) in enumerate(zip(answers, features.clients, strict=True))
    ]
    if method == "fedgh":
        for server_round in range(1, ROUNDS + 1):
            state = strategy.aggregate(state, server_round, replies)
        return score(state["model"])

    query = strategy.reader.query(lambda exchange, payload, check: replies)
    arrays = strategy.global_arrays(strategy.finalize(state, query))
    assert arrays is not None
    return score(arrays)


def noise_of(epsilon: float, place: str) -> float:
    """Return z of the noise that each client adds: for its own release, or its share of that on the sum."""
    if math.isinf(epsilon):
        return 0.0
    share = noise_share(CLIENTS, threshold(CLIENTS, DROPOUT), COLLUDERS) if place == "sum" else 1.0
    return noise_for(epsilon, DELTA, 1) * math.sqrt(share)


def released(vectors: Sequence[Array], joint: Joint, noise: float, seed: int, *numbers: int) -> list[Arrays]:
    """Return what the clients send, with noise of a generator that `seed` and `numbers` decide."""
    if not noise:
        return [joint.parts(vector) for vector in vectors]
    source = seeded(sampling.derived_seed(seed, "privacy-benchmark", *numbers))
    # In one call for all clients, which is many times as fast; the grid is then coarser by less than a thousandth.
    together = noised(np.concatenate(vectors), joint.sensitivity, noise, source)
    return [joint.parts(part) for part in np.split(together, len(vectors))]


def measured(
    features: Features, methods: Iterable[str], seed: int, epsilons: Sequence[float] = EPSILONS
) -> dict[str, float]:
    """Return the accuracy of every method, place and epsilon, by `name_of`."""
    scores = {}
    for method in methods:
        squares = METHODS[method][2]
        joint, vectors = Joint(features.classes, features.width, squares), exact(features, squares)
        for place in PLACES:
            for i, epsilon in enumerate(epsilons):
                noise = noise_of(epsilon, place)
                answers = released(vectors, joint, noise, seed, i, PLACES.index(place))
                if noise or place == PLACES[0]:
                    scores[name_of(method, place, epsilon)] = accuracy(method, features, answers, noise, seed)
    return scores


def name_of(method: str, place: str, epsilon: float) -> str:
    """Return the name of a cell; without noise it does not matter where it would be."""
    return f"{method} {'none' if math.isinf(epsilon) else f'{place} {epsilon:g}'}"


# ---- what is chosen beforehand, on other data ------------------------------------------------------------------------

BETAS = (0.125, 0.25, 0.5, 1.0, 2.0)
FLOORS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Least eigenvalues, in multiples of the largest one that noise alone has, see `edge`."""
PUBLIC, VALIDATION = 7, 4
"""Persons of HAR's training split whose windows train the body, and whose windows the head is scored on."""
CHOSEN_BY = (0.5, 2.0, 8.0)


def edge(joint: Joint, noise: float, clients: int) -> float:
    """Return the largest eigenvalue of the noise on one matrix of second moments, for large d.

    Entries off the diagonal are independent, with variance ``s^2 / 2`` each where s is the deviation on the
    diagonal. So the eigenvalues fill a semicircle of radius ``2 sqrt(d) s / sqrt(2)`` (Wigner 1955), and those of the
    sum over clients one of ``sqrt(K)`` times that.
    """
    return float(joint.deviations(noise)["square"] * math.sqrt(2 * clients * joint.width))


@contextmanager
def least(value: float) -> Iterator[None]:
    """Let servers take another least eigenvalue of a scatter."""
    projected = privacy.projected

    def other(count: Array, total: Array, square: Array | None = None, bound: float = 1.0, floor: float = 0.0) -> Any:
        return projected(count, total, square, bound, value)

    with mock.patch.object(privacy, "projected", other):
        yield


def read_persons(data: Path, seed: int, folder: Path) -> Features:
    """Read features of HAR's training persons: ten are clients, others train the body or are the test."""
    with np.load(data / "har.npz") as stored:
        rows = stored["split"] == "train"
        x, y, person = stored["x"][rows], stored["y"][rows], stored["client"][rows]
    people = sampling.rng(seed, "privacy-benchmark").permutation(np.unique(person))
    public, scored, clients = np.split(people, [PUBLIC, PUBLIC + VALIDATION])
    own = folder / f"har-s{seed}.npz"
    taken = np.isin(person, public)
    np.savez(own, x=x[taken], y=y[taken])
    about: dict[str, Any] = {"dataset": "npz", "data_dir": str(own), "normalise": "none"}
    weights = trained(folder / f"har-s{seed}", model="cnn1d", rounds=5, seed=seed, **about)
    inputs = InputSpec(x.shape[1:], 1.0, (0.0,) * x.shape[1], (1.0,) * x.shape[1], kind="series")
    net = build_model(
        "cnn1d", num_classes=6, shape=inputs.shape, seed=sampling.server_model_seed(seed),
        settings=ModelSettings(weights=str(weights)), unit=True,
    )  # fmt: skip
    net.eval()

    def of(people: Array) -> tuple[Array, Array]:
        taken = np.isin(person, people)
        return head_inputs(net, torch.from_numpy(x[taken]), inputs), y[taken]

    return Features([of(p) for p in clients[:CLIENTS]], of(scored), head_of(net), 6)


def compared(features: Features, seed: int) -> dict[str, float]:
    """Return by method, beta and floor the mean accuracy over places and epsilons; the noise is drawn alike."""
    scores: dict[str, list[float]] = {}
    for method in ("fed3r", "lda", "ccvr"):
        squares = METHODS[method][2]
        for beta in BETAS:
            joint = Joint(features.classes, features.width, squares, beta=beta)
            with mock.patch.object(statistics, "Joint", lambda c, d, s, beta=beta: Joint(c, d, s, beta=beta)):
                vectors = exact(features, squares)
            for i, epsilon in enumerate(CHOSEN_BY):
                for place in PLACES:
                    noise = noise_of(epsilon, place)
                    answers = released(vectors, joint, noise, seed, i, PLACES.index(place))
                    for floor in FLOORS:
                        with least(floor * edge(joint, noise, CLIENTS)):
                            score = accuracy(method, features, answers, noise, seed)
                        scores.setdefault(f"{method} {beta:g} {floor:g}", []).append(score)
    return {name: float(np.mean(values)) for name, values in scores.items()}


def best(scores: Mapping[str, Sequence[float]], methods: Sequence[str]) -> tuple[float, float]:
    """Return the beta and the floor with the highest mean accuracy over methods, places, epsilons and seeds."""
    means = {(b, f): _over(scores, methods, b, f) for b in BETAS for f in FLOORS}
    return max(means, key=lambda pair: means[pair])


def _over(scores: Mapping[str, Sequence[float]], methods: Sequence[str], beta: float, floor: float) -> float:
    return float(np.mean([np.mean(scores[f"{method} {beta:g} {floor:g}"]) for method in methods]))


# ---- what it costs ---------------------------------------------------------------------------------------------------

HEAD = 10 * 65
"""Numbers of the head of the digits' models, and of class counts and sums of their features."""
COSTS: dict[str, tuple[str, Joint | None]] = {
    "fedclassavg": ("head, each round", None),
    "fedncm": ("counts and sums, once", Joint(10, 64)),
    "fed3r": ("the same and second moments, once", Joint(10, 64, "all")),
    "ccvr": ("the same for each class, once", Joint(10, 64, "classes")),
}
"""What is sent for ten classes and 64 features."""


REPEATS = 5


def costs(repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """Return by method bytes that a client sends, plain, noised and hidden, and milliseconds of the processor."""
    found = {}
    for method, (_, joint) in COSTS.items():
        numbers = HEAD if joint is None else sum(map(math.prod, joint.shapes.values()))
        vector, sensitivity = np.zeros(numbers), 1.0 if joint is None else joint.sensitivity
        taken = []
        for _ in range(repeats):
            started = time.thread_time()
            noised(vector, sensitivity, noise_for(1.0, DELTA, 1))
            taken.append(time.thread_time() - started)
        hidden = [secure_sums.measured(CLIENTS, numbers, 0) for _ in range(repeats)]
        size = secure_sums.sizes(CLIENTS, numbers)
        found[method] = {
            "numbers": numbers,
            # Heads are float32 with noise and without; statistics are float64.
            "plain": size["plain"] if joint is None else 8 * numbers,
            "hidden": size["hidden"] + size["up"],
            "noise_ms": round(1000 * min(taken), 1),
            "mask_ms": round(
                1000 * min(sum(run[n] for n in ("shares", "masks", "agree", "reveal")) for run in hidden), 1
            ),
            "server_ms": round(1000 * min(run["add"] + run["open"] for run in hidden), 1),
        }
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------

ATTACKS: dict[str, tuple[str, str]] = {
    "absent, fedavg": ("absent classes, AUC", "whole models (FedAvg)"),
    "absent, fedclassavg": ("absent classes, AUC", "heads (FedClassAvg)"),
    "absent, fedgh": ("absent classes, AUC", "class means (FedGH)"),
    "absent, fedncm": ("absent classes, AUC", "class sums (FedNCM)"),
    "member, fedavg": ("member or not by the loss, AUC", "whole models"),
    "member, fedncm": ("member or not by similarity to the class sum, AUC", "class sums"),
    "known others, fedncm": ("the same by somebody who knows all other images, AUC", "class sums"),
    "similar, fedavg": ("reconstruction of one image, correlation", "one step on the whole model"),
    "named, fedavg": ("the true image is the nearest of its class", "one step on the whole model"),
    "feature, fedclassavg": ("feature of one image, cosine", "one step on the head"),
    "similar, fedncm": ("reconstruction of one image, correlation", "class sum of one image"),
    "named, fedncm": ("the true image is the nearest of its class", "class sum of one image"),
}
"""Rows of the table of attacks: what is attacked and what is sent, by the names of `leakage.attacks`."""


def accuracy_tables(cells: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Build one table for each data set: accuracy by method and place of the noise, against epsilon."""
    lines: list[str] = []
    for dataset, source in SOURCES.items():
        scores = cells.get(dataset, {})
        rows = []
        for method in SHOWN:
            for place in PLACES:
                found = [scores.get(name_of(method, place, e), []) for e in EPSILONS]
                if any(found):
                    rows.append((registry.get(method).title, f"at each {place}" if place == "client" else "on the sum",
                                 *(spread(f) for f in found)))  # fmt: skip
        if rows:
            heads = "|".join(["method", "noise", *(f"ε = {e:g}:" for e in EPSILONS[:-1]), "no noise:"])
            lines += ["", f"**{source.title}**: {source.note}.", "", *markdown(heads, rows)]
    return [*lines, ""]


def attack_table(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Build the table of attacks, by level of noise."""
    rows = []
    for name, (attack, what) in ATTACKS.items():
        cells = [found.get(f"{name}, {level}", []) for level in leakage.LEVELS]
        label = found.get(f"{name.replace('similar', 'label')}, none", [])
        beside = f" (the label alone: {np.mean(label):.2f})" if name.startswith("similar") and label else ""
        rows.append((attack + beside, what, *(spread(c, 1.0, 2) for c in cells)))
    heads = "attack|on|no noise:|image, ε = 8:|image, ε = 1:|client, ε = 8:"
    return ["", *markdown(heads, rows), ""]


BODIES = {"cifar10": "pictures, EfficientNet-Lite0", "banking77": "sentences, MiniLM"}
"""Files of features: their samples and body."""


def numbers_of_rows(width: int) -> tuple[int, ...]:
    """Return the measured numbers of rows of a client."""
    return 1, 5, 20, width // 4, width


def rebuilt(path: Path, seeds: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Return the likeness of rebuilt rows to the true rows: by number of rows, a list over the seeds."""
    with np.load(path) as arrays:
        x = arrays["x"][arrays["split"] == "train"].astype(np.float32)
    return {
        str(rows): by_name([leakage.from_moments(x, rows, seed) for seed in seeds])
        for rows in numbers_of_rows(x.shape[1])
    }


def rows_table(found: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[str]:
    """Build the table of rows that are rebuilt from second moments."""
    rows = []
    for file, by_rows in found.items():
        for score in ("rebuilt", "rotated"):
            rows.append((BODIES[file], score, *(spread(by_rows[n][score], 1.0, 2) for n in by_rows)))
    return ["", *markdown("features of|rows|n = 1:|n = 5:|n = 20:|n = d / 4:|n = d:", rows), ""]


def cost_table(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Build the table of bytes and milliseconds."""
    rows = []
    for method, (what, _) in COSTS.items():
        if method in found:
            c = found[method]
            sizes = [f"{c[n] / 1000:.1f} KB" for n in ("plain", "plain", "hidden")]
            times = [f"{c[n]:g} ms" for n in ("noise_ms", "mask_ms", "server_ms")]
            rows.append((registry.get(method).title, what, *sizes, *times))
    heads = "method|sent|plain:|with dp:|with secure-sum:|noise, client:|masks, client:|opening, server:"
    return ["", *markdown(heads, rows), ""]


def choice_table(scores: Mapping[str, Sequence[float]]) -> list[str]:
    """Build the table of the choice: mean accuracy by the weight of second moments and the least eigenvalue."""
    rows = []
    for title, methods in CHOICES.items():
        chosen = best(scores, methods)
        for beta in BETAS:
            cells = [f"{100 * _over(scores, methods, beta, f):.1f}" for f in FLOORS]
            cells = [f"**{c}**" if (beta, f) == chosen else c for c, f in zip(cells, FLOORS, strict=True)]
            rows.append((title, f"{beta:g}", *cells))
    return ["", *markdown("|".join(["heads", "β:", *(f"{f:g}:" for f in FLOORS)]), rows), ""]


CHOICES = {"Fed3R, LDA": ("fed3r", "lda"), "CCVR": ("ccvr",)}
"""Heads that share a choice."""


def page(text: str, kept: Mapping[str, Any]) -> str:
    """Return the page with every table that something is kept for."""
    tables: dict[str, Callable[[Any], list[str]]] = {
        "accuracy": accuracy_tables, "choice": choice_table, "attacks": attack_table, "rows": rows_table,
        "cost": cost_table,
    }  # fmt: skip
    for name, table in tables.items():
        if name in kept.get("made", {}):
            text = replaced(text, name, [about(name, kept["made"][name]), *table(kept[name])])
    return text


def about(part: str, made: Mapping[str, Any]) -> str:
    """Return the line of a page on how a table was made."""
    text = f"`python -m reproduction study privacy --data DIR --only {part}`, {made['machine']}, one core"
    if part == "cost":
        return f"{text}, the least of {REPEATS} runs."
    return f"{text}, seeds {', '.join(map(str, made['seeds']))}."


# ---- the command -----------------------------------------------------------------------------------------------------


def measure(part: str, data: Path, seeds: Sequence[int], folder: Path) -> Any:
    """Return what the table of one part needs, with a list over the seeds for each score."""
    if part == "cost":
        return costs()
    if part == "attacks":
        return leakage.attacks(seeds, extractor(data, SOURCES["digits"], 0, folder))
    if part == "rows":
        return {file: rebuilt(data / f"{file}.npz", seeds) for file in BODIES}
    if part == "choice":
        return by_name([compared(read_persons(data, seed, folder), seed) for seed in seeds])

    def scores(dataset: str, seed: int) -> dict[str, float]:
        weights = extractor(data, SOURCES[dataset], seed, folder)
        return measured(read_features(data, dataset, weights, seed), SHOWN, seed)

    return {dataset: by_name([scores(dataset, seed) for seed in seeds]) for dataset in SOURCES}


def by_name(scores: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return each score of several seeds, four digits of each."""
    return {name: [round(one[name], 4) for one in scores] for name in scores[0]}


PARTS = ("choice", "accuracy", "attacks", "rows", "cost")


def main(
    data: Annotated[Path | None, typer.Option(help="folder with the input files")] = None,
    only: Annotated[str, typer.Option(help=f"parts, with commas (default: {','.join(PARTS)})")] = "",
    seeds: str = ",".join(map(str, SEEDS)),
    kept: Path = DOCS / "privacy.json",
    doc: Path = DOCS / "privacy.md",
) -> None:
    """Measure what is asked for, keep it, and write the tables."""
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    parts, chosen = named(only, PARTS, "part"), [int(seed) for seed in seeds.split(",")]
    if data is not None:
        torch.set_num_threads(1)
        for part in parts:
            with tempfile.TemporaryDirectory() as folder:
                found[part] = measure(part, data.absolute(), chosen, Path(folder))
            found.setdefault("made", {})[part] = {"machine": machine.describe()["processor"], "seeds": chosen}
            write_text(kept, json.dumps(found, indent=1) + "\n")
    doc.write_text(page(doc.read_text(encoding="utf-8"), found), encoding="utf-8")
