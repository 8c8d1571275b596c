"""The measured tables of docs/frozen.md: `python -m reproduction study frozen --features DIR --out runs/frozen`.

DIR holds files that `fedapp features` wrote, as `PICTURES` and `TEXTS` name them. Each head is a run of its method with
the settings' partition and the seed. Beside it stand, made with NumPy and scikit-learn on the same rows: the same kind
of head on the stacked training rows of all clients (`ridge`, `discriminant`, `nearest_mean`), logistic regression on
them, each client's own logistic regression and discriminant, and its majority class.

What the tables need is one line of docs/frozen.jsonl for each setting, seed and model. What is there is not measured
again. Without `--features` nothing is measured.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from benchmarks.pages import markdown, replaced
from fedapp import config as configuration
from fedapp import registry
from fedapp.bodies.known import KNOWN
from fedapp.data import datasets
from fedapp.data.partitions import ClientSplit, Partition
from fedapp.engines.local import run
from fedapp.results import statistics
from fedapp.results.directory import write_text
from fedapp.results.intervals import margin_of
from fedapp.results.loading import load as load_model
from fedapp.results.runs import RunResult
from fedapp.results.statistics import DASH, spread, tally, worst
from reproduction.studies.choosing import DOCS, UNMEASURED, named

Array = NDArray[Any]
Scores = dict[str, Any]
"""Numbers by name; `recalls` is a list of them."""

CHOOSING = "lda, choose"
HEADS = ("fed3r", "lda", CHOOSING, "fedncm", "fedcof")
"""Methods with `personal=true`, and one with `choose=true`."""
OF_TEXTS = (*HEADS, "qda", "fed3r, random features")
OPTIONS = {"": "personal=true", "choose": "choose=true", "random features": "personal=true random_features=2000"}
SHOWN = ("fed3r", "lda")
"""Heads of the first table, the same two in every setting."""
CURVED = ("qda", "fed3r, random features")
"""Heads that are not linear in the features; the first table has no column of them."""
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Penalties of logistic regression, of which rows held out of the training rows choose one for each data set."""
OWN_SHRINK = 0.3
"""Share of the mean variance in the covariance of a client's own discriminant."""
FEW = 500
"""Training rows below which a client has few."""
QUADRATIC = (0.7, 0.2)
"""Of `qda`: share of the covariance within classes, and of the mean variance."""


@dataclass(frozen=True)
class Setting:
    """A data set's features and their assignment to clients.

    Attributes
    ----------
    file : of DIR, without its ending.   values : run-config keys.   heads : methods.
    """

    title: str
    file: str
    values: Mapping[str, Any] = field(default_factory=dict)
    heads: Sequence[str] = HEADS


def dealt(clients: int, alpha: float = 0.1, **others: Any) -> dict[str, Any]:
    """Return the keys of a Dirichlet partition."""
    return {"clients": clients, "partition": "dirichlet", "alpha": alpha, **others}


TWO = {"partition": "pathological", "classes_per_client": 2}
SETTINGS = {
    "cifar10-20": Setting("CIFAR-10, 20 clients, Dirichlet 0.1", "cifar10", dealt(20)),
    "cifar10-100": Setting("CIFAR-10, 100 clients, Dirichlet 0.1", "cifar10", dealt(100)),
    "banking77": Setting("Banking77, 20 clients, Dirichlet 0.1", "banking77", dealt(20), OF_TEXTS),
    "clinc150": Setting("CLINC150, ten domains as clients", "clinc150", {"partition": "by-client"}, OF_TEXTS),
    "clinc150-20": Setting("CLINC150, 20 clients, Dirichlet 0.1", "clinc150", dealt(20), OF_TEXTS),
    "fashion-20": Setting("Fashion-MNIST, 20 clients, Dirichlet 0.1", "fashion_mnist", dealt(20)),
    "fashion-100": Setting("Fashion-MNIST, 100 clients, Dirichlet 0.1", "fashion_mnist", dealt(100)),
    "cifar10-20-skewed": Setting("CIFAR-10, 20 clients, Dirichlet 0.05", "cifar10", dealt(20, 0.05)),
    "cifar10-100-skewed": Setting("CIFAR-10, 100 clients, Dirichlet 0.05", "cifar10", dealt(100, 0.05, min_samples=5)),
    "cifar10-20-two": Setting("CIFAR-10, 20 clients, two classes each", "cifar10", {"clients": 20, **TWO}),
    "cifar10-100-two": Setting("CIFAR-10, 100 clients, two classes each", "cifar10", {"clients": 100, **TWO}),
}
PLAIN = tuple(SETTINGS)
"""The settings of the first tables."""
FEW_ROWS = {"cifar10-few": 1536, "banking77-few": 461}
"""Number of training rows of the small data sets: 1.2 per feature."""
for _name, _plain in {"cifar10-few": SETTINGS["cifar10-20"], "banking77-few": SETTINGS["banking77"]}.items():
    _title = f"{_plain.title.partition(',')[0]}, {FEW_ROWS[_name]} training rows, ten clients, Dirichlet 0.1"
    SETTINGS[_name] = Setting(_title, _name, dealt(10, min_samples=2), ("fed3r", "lda", "fedncm"))
GUARDS: dict[str, Mapping[str, Any]] = {
    "secure": {"secure_sum": True},
    **{f"epsilon-{e}": {"dp": "example", "dp_epsilon": float(e), "dp_test": True} for e in (1, 3, 8)},
}
"""What is asked of the runs of the second table; `dp_test` draws the noise from the seed, with the same scale."""
GUARDED = ("cifar10-20", "banking77")
SUMMED = ("fed3r", "lda", "fedncm")
"""Heads that follow from the total alone."""
for _name in GUARDED:
    for _guard, _values in GUARDS.items():
        _plain = SETTINGS[_name]
        SETTINGS[f"{_name}-{_guard}"] = Setting(_plain.title, _plain.file, {**_plain.values, **_values}, SUMMED)
IN_ROUNDS = "-rounds"
GRADIENT = ("local", "fedavg", "fedprox", "fedavgm", "scaffold", "fedclassavg", "cwfedavg", "fedgh",
            "fedavg, plain features")  # fmt: skip
"""Methods of `frozen_gradient`, on standardised features and one on plain ones."""
ROUNDS = tuple(f"{name}{IN_ROUNDS}" for name in ("banking77", "clinc150", "cifar10-20"))
for _name in ROUNDS:
    _plain = SETTINGS[_name.removesuffix(IN_ROUNDS)]
    SETTINGS[_name] = Setting(f"{_plain.title}, 20 rounds", _plain.file, _plain.values, GRADIENT)


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Features of a data set: training and test rows, as the runs read them."""

    x: Array
    y: Array
    train: Array
    test: Array
    held_out: Array

    @classmethod
    def read(cls, path: Path) -> Rows:
        """Read a file of features; a tenth of the training rows is held out where the file has no validation rows."""
        data = datasets.load("npz", str(path), configuration.validated({}).data)
        x, y = data.take(np.arange(data.num_train + data.num_test))
        train = np.arange(data.num_train)
        if data.held_out is not None:
            held_out, train = train[data.held_out], train[~data.held_out]
        else:
            held_out = np.random.default_rng(0).permutation(train)[: len(train) // 10]
        return cls(x.astype(np.float32), y, train, np.arange(data.num_train, len(y)), held_out)

    def stacked(self, rows: Array) -> tuple[Array, Array]:
        """Return features and a one, float64 (n, d + 1), and one-hot labels (n, C)."""
        h = np.ones((len(rows), self.x.shape[1] + 1))
        h[:, :-1] = self.x[rows]
        return h, np.eye(int(self.y.max()) + 1)[self.y[rows]]


def ridge(a: Array, b: Array, lam: float) -> Array:
    """Return ridge regression of one-hot labels, (C, d + 1), of second moments and class sums."""
    solved: Array = np.linalg.solve(a + lam * np.eye(len(a)), b.T).T
    return solved


def discriminant(a: Array, b: Array, shrink: float, log_prior: Array | float = 0.0) -> Array:
    """Return the head of linear discriminant analysis, (C, d + 1); a class without rows never wins."""
    counts, width = b[:, -1], len(a) - 1
    seen = counts > 0
    means = b[:, :-1] / np.maximum(counts, 1)[:, None]
    within = a[:-1, :-1] - (means * counts[:, None]).T @ means
    sigma = within / max(counts.sum() - seen.sum(), 1)
    level = np.trace(sigma) / width
    sigma = (1 - shrink) * sigma + shrink * level * np.eye(width) if level > 0 else np.eye(width)
    weights = np.linalg.solve(sigma, means.T).T
    bias = -0.5 * (weights * means).sum(axis=1) + log_prior
    return np.column_stack([weights, np.where(seen, bias, -np.inf)])


def nearest_mean(b: Array) -> Array:
    """Return the head of the nearest class mean by cosine, (C, d + 1); a class without rows never wins."""
    norms = np.linalg.norm(b[:, :-1], axis=1, keepdims=True)
    return np.column_stack([b[:, :-1] / np.where(norms > 0, norms, 1), np.where(b[:, -1] > 0, 0, -np.inf)])


def quadratic(x: Array, y: Array, new: Array) -> Array:
    """Fit a Gaussian of each class, shrunk by `QUADRATIC`; return the classes of new rows, all equally likely."""
    x, new, classes = x.astype(np.float64), new.astype(np.float64), np.unique(y)
    parts = [x[y == c] - x[y == c].mean(axis=0) for c in classes]
    within = sum(part.T @ part for part in parts) / (len(y) - len(classes))
    share, shrink = QUADRATIC
    logits = []
    for c, part in zip(classes, parts):
        sigma = (1 - share) * part.T @ part / (len(part) - 1) + share * within
        sigma = (1 - shrink) * sigma + shrink * np.trace(sigma) / len(sigma) * np.eye(len(sigma))
        apart = new - x[y == c].mean(axis=0)
        logits.append(-(apart * np.linalg.solve(sigma, apart.T).T).sum(axis=1) - np.linalg.slogdet(sigma)[1])
    return np.asarray(classes[np.argmax(logits, axis=0)])


def predicted(head: Array, x: Array) -> Array:
    """Return the classes with the largest logit, (n,)."""
    found: Array = (x.astype(np.float64) @ head[:, :-1].T + head[:, -1]).argmax(axis=1)
    return found


def logistic(x: Array, y: Array, new: Array, penalty: float) -> Array:
    """Fit multinomial regression on standardised features by L-BFGS; return the classes of new rows.

    Parameters
    ----------
    penalty : of half the squared weights, beside the mean loss of a row.
    """
    if len(np.unique(y)) == 1:
        return np.full(len(new), y[0])
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    deviation = np.maximum(deviation, 1e-3 * np.sqrt((x**2).mean(axis=0)) + 1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 150 steps are enough for the accuracy
        model = LogisticRegression(C=1 / (penalty * len(y)), max_iter=150).fit((x - mean) / deviation, y)
    return np.asarray(model.predict((new - mean) / deviation))


class Central:
    """Heads on the stacked training rows of all clients, by NumPy and scikit-learn.

    Parameters
    ----------
    fitted : the result of `logistic`, where it is known.
    """

    def __init__(self, rows: Rows, fitted: tuple[float, float] | None = None) -> None:
        h, labels = rows.stacked(rows.train)
        self.rows, self.a, self.b = rows, h.T @ h, labels.T @ h
        del h
        self._logistic = fitted

    def logistic(self) -> tuple[float, float]:
        """Return the penalty that held-out rows choose, and the accuracy on the test rows."""
        if self._logistic is None:
            x, y, held = self.rows.x, self.rows.y, self.rows.held_out
            fitted = np.setdiff1d(self.rows.train, held)
            right = [(logistic(x[fitted], y[fitted], x[held], p) == y[held]).mean() for p in PENALTIES]
            best, test = PENALTIES[int(np.argmax(right))], self.rows.test
            found = logistic(x[self.rows.train], y[self.rows.train], x[test], best)
            self._logistic = best, float((found == y[test]).mean())
        return self._logistic

    def predicted(self, method: str, summary: Mapping[str, Any]) -> Array | None:
        """Return the classes of the test rows by the head of a method's kind; None where there is none."""
        rows, new = self.rows, self.rows.x[self.rows.test]
        if method == "qda":
            return quadratic(rows.x[rows.train], rows.y[rows.train], new)
        if method == "fed3r":
            return predicted(ridge(self.a, self.b, summary["calibration"]["lam"]), new)
        if method == "lda":
            return predicted(discriminant(self.a, self.b, 0.1), new)
        return predicted(nearest_mean(self.b), new) if method == "fedncm" else None


def counts_of(right: Sequence[Array]) -> pd.DataFrame:
    """Return correct and total test rows by client."""
    rows = [(client, int(r.sum()), len(r)) for client, r in enumerate(right) if len(r)]
    return pd.DataFrame(rows, columns=["client", "correct", "total"]).set_index("client")


def accuracies(counts: pd.DataFrame) -> pd.Series:
    """Return each client's accuracy."""
    return counts["correct"] / counts["total"]


def of_clients(counts: pd.DataFrame, name: str = "own") -> Scores:
    """Return the mean over clients and over their worst 10 %."""
    accuracy = accuracies(counts)
    return {name: float(accuracy.mean()), "worst": worst(accuracy)[1]}


def sizes(y: Array, clients: Sequence[ClientSplit]) -> Scores:
    """Return the median client's training rows, test rows, and share of training rows whose class no other has."""
    held = np.array([np.bincount(y[client.train], minlength=int(y.max()) + 1) for client in clients])
    unshared = np.where(held == held.sum(axis=0), held, 0).sum(axis=1) / held.sum(axis=1)
    tests = [len(client.test) for client in clients]
    medians = {"rows": held.sum(axis=1), "tests": tests, "unshared": unshared}
    return {name: float(np.median(values)) for name, values in medians.items()}


def by_rows(counts: pd.DataFrame, alone: pd.DataFrame, rows: Sequence[int]) -> Scores:
    """Return how many clients have fewer than `FEW` training rows, and how many not, and their summed differences."""
    apart, found = accuracies(counts) - accuracies(alone), Scores()
    few = pd.Series(rows).reindex(apart.index) < FEW
    for name, part in {"few": apart[few], "many": apart[~few]}.items():
        found |= {name: float(part.sum()), f"{name}_clients": float(len(part))}
    return found


def each_alone(rows: Rows, clients: Sequence[ClientSplit], penalty: float) -> dict[str, Any]:
    """Return correct and total test rows by client of each client's own models."""
    found: dict[str, list[Array]] = {"logistic": [], "lda": [], "majority": []}
    for client in clients:
        x, y, new, truth = rows.x[client.train], rows.y[client.train], rows.x[client.test], rows.y[client.test]
        found["logistic"].append(logistic(x, y, new, penalty) == truth)
        h, labels = rows.stacked(client.train)
        shares = (labels.sum(axis=0) + 1) / (len(y) + labels.shape[1])
        own = discriminant(h.T @ h, labels.T @ h, OWN_SHRINK, np.log(shares))
        found["lda"].append(predicted(own, new) == truth)
        found["majority"].append(np.bincount(y).argmax() == truth)
    return {name: counts_of(right) for name, right in found.items()}


def by_class(right: Array, truth: Array) -> Scores:
    """Return the recall of each class, and the lowest, of rows that are right (n,) and of the classes `truth` (n,)."""
    found = [round(float(right[truth == c].mean()), 4) for c in np.unique(truth)]
    return {"recalls": found, "recall": min(found)}


def of_the_server(done: RunResult, rows: Rows, clients: Sequence[ClientSplit], same: Array | None) -> Scores:
    """Return the scores of the head that a run's server made; `same` are the classes by the central head, (n,)."""
    guess = np.full(len(rows.y), -1)
    guess[rows.test] = load_model(done.out).predict(rows.x[rows.test]).argmax(axis=1)
    right, truth = guess == rows.y, rows.y[rows.test]
    further = done.summary["metrics"]["global"]
    scores = {"global": done.score("global"), "own": of_clients(counts_of([right[c.test] for c in clients]))["own"],
              "auc": further["auc"]["mean"], "ece": further["ece"]["mean"],
              **by_class(right[rows.test], truth)}  # fmt: skip
    return scores if same is None else scores | {"apart": float((same != guess[rows.test]).sum())}


def measure(
    setting: str, seed: int, heads: Iterable[str], central: Central, data: Path, out: Path
) -> dict[str, Scores]:  # fmt: skip
    """Run heads of a setting for a seed, and return the scores of each, and of the models without federation."""
    given, rows, found = SETTINGS[setting], central.rows, {}
    common = {"dataset": "npz", "data_dir": data, "seed": seed, "final_training": False, "keep_models": False,
              "metrics": "accuracy,loss,balanced,auc,ece", **given.values}  # fmt: skip
    counts: dict[str, Any] = {}
    private = "dp" in given.values
    for name in heads:
        method, _, option = name.partition(", ")
        choose = option == "choose"
        folder = out / setting / f"{name.replace(', ', '-').replace(' ', '-')}-s{seed}"
        scores: Scores = {}
        if not (done := RunResult(folder)).ok:
            shutil.rmtree(folder, ignore_errors=True)  # of a command that was stopped
            began = time.process_time()
            done = run(method=method, method_args="" if private else OPTIONS[option], out=folder, **common)
            scores["seconds"] = time.process_time() - began
        scores["bytes"] = float(sum(n for key, n in done.summary.items() if key.startswith("bytes_up_query")))
        clients = Partition.load(done.out / "partition.npz").clients
        if not counts:
            counts = each_alone(rows, clients, central.logistic()[0])
        if not private:
            scores |= of_clients(delivered := done.headline_counts(), "shares")
            scores |= dict(zip(("gain", "same", "lose"), statistics.harm(delivered, counts["logistic"])))
            scores |= by_rows(delivered, counts["logistic"], [len(client.train) for client in clients])
        if choose:
            kept_own = done.summary["choice"]["own"]
            misses = np.minimum(0, accuracies(delivered) - accuracies(counts["lda"]))
            scores |= {"own_heads": float(kept_own), "harm": float(misses.mean())}
        alike = None if private or option else central.predicted(method, done.summary)
        found[name] = scores if choose else scores | of_the_server(done, rows, clients, alike)
    found["alone"] = {**of_clients(counts["logistic"]), **sizes(rows.y, clients)}
    found["alone-lda"] = of_clients(counts["lda"])
    found["majority"] = of_clients(counts["majority"])
    found["central"] = {"global": central.logistic()[1], "penalty": central.logistic()[0]}
    return {name: rounded(scores) for name, scores in found.items()}


def rounded(scores: Scores) -> Scores:
    """Return scores with six digits behind the point."""
    return {name: value if isinstance(value, list) else round(value, 6) for name, value in scores.items()}


# ---- what is kept, and the page --------------------------------------------------------------------------------------

Kept = dict[tuple[str, int, str], Scores]
"""Scores by setting, seed and model."""
MODELS = {"alone": "each alone: logistic", "alone-lda": "each alone: LDA", "majority": "majority class",
          "central": "central: logistic"}  # fmt: skip


def load(path: Path) -> Kept:
    """Return the kept scores of settings that there are."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
    return {(line["setting"], line["seed"], line["model"]): line["scores"] for line in lines}


def save(path: Path, kept: Kept) -> None:
    """Write scores in the order of settings, seeds and models."""
    models = [*OF_TEXTS, *GRADIENT, *MODELS]
    order = sorted(kept, key=lambda key: ([*SETTINGS].index(key[0]), key[1], models.index(key[2])))
    lines = ({"setting": s, "seed": n, "model": m, "scores": kept[s, n, m]} for s, n, m in order)
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def of_setting(kept: Kept, setting: str) -> dict[str, list[Scores]]:
    """Return the scores of a setting by model, in the order of the seeds."""
    found: dict[str, list[Scores]] = {}
    for (name, _, model), scores in kept.items():
        if name == setting:
            found.setdefault(model, []).append(scores)
    return found


def cell(runs: Sequence[Scores], name: str, factor: float = 100.0, digits: int = 1) -> str:
    """Write mean ± standard deviation over seeds; a dash where it was not measured."""
    values = [run[name] for run in runs if name in run]
    return spread(values, factor, digits) if values else DASH


def title(model: str) -> str:
    """Return a model's name in a table."""
    method, *option = model.split(", ")
    return MODELS.get(model) or ", ".join([registry.get(method).title, *option])


def setting_table(runs: Mapping[str, Sequence[Scores]]) -> list[str]:
    """Build the table of one setting."""
    rows = []
    for model, found in runs.items():
        harmed = [[run[w] for w in ("gain", "same", "lose")] for run in found if "gain" in run]
        rows.append((
            title(model), cell(found, "global"), cell(found, "own"), cell(found, "shares"), cell(found, "worst"),
            tally(harmed) if harmed else DASH, cell(found, "recall"), cell(found, "auc"), cell(found, "ece"),
            f"{mean(found, 'bytes') / 1e5:.0f}" if "bytes" in found[0] else DASH, cell(found, "seconds", 1),
        ))  # fmt: skip
    heads = "model|global|own|own with shares|worst 10 %|gain / same / lose:|lowest recall|AUROC|ECE"
    return markdown(f"{heads}|up, kB:|processor s:", rows)


def rounds_table(kept: Kept, setting: str) -> list[str]:
    """Build the table of heads trained in rounds, with those of one exchange on the same partition."""
    plain, rows = setting.removesuffix(IN_ROUNDS), []
    once = {head: [{**kept[plain, 0, head], "trained": kept[plain, 0, head]["shares"]}] for head in SHOWN}
    for model, found in {**of_setting(kept, setting), **once}.items():
        step = DASH if model in once else f"{found[0]['step']:g}"
        rows.append((
            title(model) + ", one exchange" * (model in once), step, *(
                cell(found, name) for name in ("global", "own", "trained", "worst")
            ), tally([run[w] for w in ("gain", "same", "lose")] for run in found),
            *(cell(found, name) for name in ("recall", "auc", "ece")),
            f"{mean(found, 'bytes') / 1e5:.0f}", cell(found, "seconds", 1), cell(found, "search", 1, 0).split(" ")[0],
        ))  # fmt: skip
    heads = "model|step:|global|received, own|delivered, own|worst 10 %|gain / same / lose:|lowest recall|AUROC|ECE"
    return markdown(f"{heads}|up, kB:|processor s:|search, s:", rows)


def recall_table(kept: Kept) -> list[str]:
    """Build the table of recalls: in the order of ten classes; of more classes deciles."""
    rows = []
    for setting in PLAIN:
        for model, runs in of_setting(kept, setting).items():
            if known := [run["recalls"] for run in runs if "recalls" in run]:
                recalls = 100 * np.mean(known, axis=0)
                if len(recalls) > 10:
                    recalls = np.quantile(recalls, np.linspace(0, 1, 11))
                rows.append((SETTINGS[setting].title, title(model), " ".join(f"{r:.0f}" for r in recalls)))
    return markdown("setting|model|recall by class", rows) if rows else [UNMEASURED]


def guard_table(kept: Kept) -> list[str]:
    """Build the table of accuracies with secure sums and with noise, of what was measured."""
    rows = []
    for name in GUARDED:
        for guard in ("", *GUARDS):
            found = of_setting(kept, f"{name}-{guard}" if guard else name)
            if found:
                cells = (cell(found.get(head, ()), score) for score in ("global", "own") for head in SUMMED)
                rows.append((SETTINGS[name].title, guard or "none", *cells))
    heads = (f"{title(head)}, {score}" for score in ("global", "own") for head in SUMMED)
    return markdown("|".join(["setting", "guard", *heads]), rows)


def mean(runs: Sequence[Scores], name: str) -> float:
    """Return a score's mean over seeds, in percent; NaN where it was not measured."""
    return 100 * float(np.mean([run.get(name, np.nan) for run in runs]))


def answer(kept: Kept) -> list[str]:
    """Return the sentences with which the page begins, and the table of all settings."""
    known = {name: found for name in SETTINGS if name in PLAIN and (found := of_setting(kept, name))}
    if not known:
        return [UNMEASURED]
    rows = []
    for name, found in known.items():
        pair, alone, central = [found[head] for head in SHOWN], found["alone"], found["central"]
        rows.append((
            SETTINGS[name].title, f"{mean(alone, 'rows') / 100:.0f}",
            *(cell(runs, "global") for runs in (*pair, central)), *(cell(runs, "shares") for runs in pair),
            cell(found.get(CHOOSING, ()), "shares"), cell(alone, "own"), cell(found["majority"], "own"),
        ))  # fmt: skip
    names = [title(head) for head in SHOWN]
    all_rows, own_rows = ("|".join(f"{name}, {score}" for name in names) for score in ("global", "own"))
    heads = f"setting|rows of a client:|{all_rows}|central|{own_rows}|{title(CHOOSING)}, own|alone|majority"
    first, *others = comparison(known)
    paragraphs = [" ".join(exactness(known)), first, *([" ".join(others)] if others else [])]
    return [*(line for text in paragraphs for line in (text, "")), *markdown(heads, rows)]


def mean_gain(runs: Sequence[Scores], name: str) -> float:
    """Return the mean difference to training alone of clients with `few` or `many` rows; NaN without such clients."""
    clients = sum(run[f"{name}_clients"] for run in runs)
    return 100 * sum(run[name] for run in runs) / clients if clients else np.nan


def ends(values: Sequence[float], sign: str = "") -> str:
    """Write the smallest and the largest of values."""
    low, high = (f"{end(values):{sign}.1f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def exactness(known: Mapping[str, Mapping[str, Sequence[Scores]]]) -> list[str]:
    """State the gaps of heads from sums to the central head of their kind, and to logistic regression on all rows."""
    apart = [run["apart"] for found in known.values() for runs in found.values() for run in runs if "apart" in run]
    text = (
        f"One exchange gives the head that all training rows together would give: in {len(apart)} runs "
        f"{sum(apart):.0f} test rows are classified otherwise."
    )
    points = []
    for head in (*SHOWN, *CURVED):
        if values := [mean(f[head], "global") - mean(f["central"], "global") for f in known.values() if head in f]:
            some = f" (in {len(values)} of {len(known)} settings)" * (len(values) < len(known))
            points.append(f"{title(head)} {ends(values, '+')}{some}")
    return [text, f"Points from logistic regression on all rows: {', '.join(points)}."]


def comparison(known: Mapping[str, Mapping[str, Sequence[Scores]]]) -> list[str]:
    """State where both heads with class shares beat or miss training alone by the margin in every seed.

    The sentences on few rows, on classes of one's own and on `choose` follow from the scores, or are left out.
    """
    apart = {name: [100 * (run["shares"] - alone["own"]) for head in SHOWN for run, alone in zip(f[head], f["alone"])]
             for name, f in known.items()}  # fmt: skip
    margins = {name: 100 * margin_of(mean(f["alone"], "own") / 100, mean(f["alone"], "tests") / 100)
               for name, f in known.items()}  # fmt: skip
    better = [name for name in known if min(apart[name]) > margins[name]]
    worse = [name for name in known if max(apart[name]) < -margins[name]]
    parts = []
    for word, group in {"better": better, "worse": worse}.items():
        if group:
            seeds = {name: len(known[name]["alone"]) for name in group}
            titles = "; ".join(SETTINGS[n].title + (", one seed" if seeds[n] == 1 else "") for n in group)
            points = ends([abs(one) for name in group for one in apart[name]])
            parts.append(f"both are {word} in {len(group)}, in every seed, by {points} points ({titles})")
    if rest := len(known) - len(better) - len(worse):
        parts.append(f"in {rest} neither holds")
    lines = [f"With each client's class shares, against training alone in {len(known)} settings: {'; '.join(parts)}."]
    for head in CURVED:
        gains = [mean(f[head], "shares") - mean(f["alone"][: len(f[head])], "own") for f in known.values() if head in f]
        if gains:
            lines.append(f"{title(head)}: {ends(gains, '+')} points against training alone in {len(gains)} of "
                         f"{len(known)} settings.")  # fmt: skip
    harm = {name: mean(f[CHOOSING], "harm") for name, f in known.items() if CHOOSING in f}
    if harm := {name: points for name, points in harm.items() if np.isfinite(points)}:
        most = min(harm, key=lambda name: harm[name] + margins[name])
        lines.append(f"With `choose` the mean harm to clients, against LDA alone, is known in every seed of "
                     f"{len(harm)} of {len(known)} settings. It comes nearest to the margin in "
                     f"{SETTINGS[most].title}: {-harm[most]:.1f} points, margin {margins[most]:.1f}.")  # fmt: skip
    own = [name for name in known if mean(known[name]["alone"], "unshared") == 100]
    runs = [run for name, found in known.items() if name not in own for head in SHOWN for run in found[head]]
    small, large = (mean_gain(runs, name) for name in ("few", "many"))
    if small > large:
        lines.append(f"Where clients share classes, those with fewer than {FEW} training rows gain {small:+.1f} "
                     f"points, the others {large:+.1f}.")  # fmt: skip
    if worse and worse == own:
        lines.append("Both heads are worse only where no class is at two clients.")
    for name in worse:
        if chosen := known[name].get(CHOOSING):
            loss = mean(known[name]["alone"], "own") - mean(chosen, "shares")
            clients = sum(chosen[0][side] for side in ("gain", "same", "lose"))
            lines.append(f"There `choose` keeps the own head of {mean(chosen, 'own_heads') / 100:.0f} of {clients:.0f} "
                         f"clients and stays {loss:.1f} points below training alone.")  # fmt: skip
    return lines


def tables(kept: Kept, settings: Iterable[str]) -> list[str]:
    """Return a heading and the table of each setting that was measured."""
    lines = []
    for setting in settings:
        if found := of_setting(kept, setting):
            table = rounds_table(kept, setting) if setting in ROUNDS else setting_table(found)
            lines += ["", f"### {SETTINGS[setting].title}", "", *table]
    return lines[1:] or [UNMEASURED]


def costs(kept: Kept) -> str:
    """State how many processor seconds the runs of both commands took, and the searches of the second."""
    searches = {key[::2]: s["search"] for key, s in kept.items() if "search" in s}
    once, rounds = (
        sum(s.get("seconds", 0) for key, s in kept.items() if (key[0] in ROUNDS) == r) for r in (False, True)
    )
    return (
        f"The runs of the first command took {once:,.0f} processor seconds, those of the second {rounds:,.0f}, its "
        f"searches {sum(searches.values()):,.0f}. Extraction, central and own models are not counted."
    )


DIGITS = {"efficientnet-lite0": "64bf41b3", "minilm": "faef4414"}
"""First digits of the bodies' digests, which `fedapp features` prints."""


def bodies() -> list[str]:
    """Build the table of the known bodies."""
    inputs = {b.name: f"pictures of {b.size} pixels" if b.size else "English sentences" for b in KNOWN}
    rows = [(b.name, b.package, DIGITS[b.name], b.weights, b.licence, inputs[b.name]) for b in KNOWN]
    return markdown("body|packages|digits for `bodies`|SHA-256 of the weights|licence|input", rows)


def page(text: str, kept: Kept) -> str:
    """Return the page with its answer and its tables."""
    made = {"answer": answer(kept), "costs": [costs(kept)], "bodies": bodies(), "recalls": recall_table(kept),
            "settings": tables(kept, (*PLAIN, *FEW_ROWS)), "rounds": tables(kept, ROUNDS),
            "guards": guard_table(kept)}  # fmt: skip
    for name, lines in made.items():
        text = replaced(text, name, lines)
    return text


def features_of(folder: Path, file: str, out: Path) -> Path:
    """Return the file of a data set's features; where few training rows are drawn it is made in `out`."""
    if (number := FEW_ROWS.get(file)) is None:
        return folder / f"{file}.npz"
    with np.load(folder / f"{file.removesuffix('-few')}.npz") as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    train = np.flatnonzero(columns["split"] == "train")
    taken = np.sort(np.append(np.random.default_rng(0).choice(train, number, replace=False),
                              np.flatnonzero(columns["split"] == "test")))  # fmt: skip
    rows = len(columns["y"])
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / f"{file}.npz", **{n: a[taken] if a.shape[:1] == (rows,) else a for n, a in columns.items()})
    return out / f"{file}.npz"


def run_missing(settings: Iterable[str], seeds: int, features: Path, out: Path, path: Path) -> None:
    """Measure what `path` lacks, seed by seed; one data set's rows are in memory at a time."""
    kept = load(path)
    todo = {
        (s, n): lacking
        for s in settings
        for n in range(1 if SETTINGS[s].values.get("partition") == "by-client" else seeds)
        if (lacking := [head for head in SETTINGS[s].heads if (s, n, head) not in kept])
    }
    for file in dict.fromkeys(SETTINGS[setting].file for setting, _ in todo):
        data = features_of(features.expanduser().absolute(), file, out)
        fitted = (s for (setting, _, m), s in kept.items() if m == "central" and SETTINGS[setting].file == file)
        central = Central(Rows.read(data), next(((s["penalty"], s["global"]) for s in fitted), None))
        for (setting, seed), heads in todo.items():
            if SETTINGS[setting].file == file:
                found = measure(setting, seed, heads, central, data, out)
                kept |= {(setting, seed, model): scores for model, scores in found.items()}
                save(path, kept)


def main(
    features: Annotated[Path | None, typer.Option(help="folder of features (default: measure nothing)")] = None,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/frozen"),
    only: Annotated[str, typer.Option(help="settings, with commas (default: all)")] = "",
    seeds: int = 5,
    kept: Path = DOCS / "frozen.jsonl",
    doc: Path = DOCS / "frozen.md",
) -> None:
    """Measure what is asked for, and write the tables."""
    chosen = named(only, [name for name in SETTINGS if name not in ROUNDS], "setting")
    if features is not None:
        run_missing(chosen, seeds, features, out.expanduser().absolute(), kept)
    doc.write_text(page(doc.read_text(encoding="utf-8"), load(kept)), encoding="utf-8")
