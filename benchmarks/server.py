"""Benchmark (c): every computation of the server (and CCVR's statistics) against its naive form and against the floor.

The floor is the best that the machine allows: the bytes that must be read or written once at the speed of memory, or
the operations of the cheapest known form at the speed of a large matrix product, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import machine
from benchmarks.machine import Speeds
from benchmarks.reference import naive_mix
from benchmarks.timing import Times, alternate
from clients.cwfedavg import CwFedAvgHParams
from clients.fedamp import FedAMPHParams
from fedapp import process
from fedapp.core.averages import RunningMean
from fedapp.core.classwise import class_weights, norm_distribution
from fedapp.core.gaussian import MomentsPool, moments, pack
from fedapp.core.heads import retrain
from fedapp.core.pairwise import combine
from fedapp.core.virtual import virtual_features
from fedapp.engines.resources import usable_cores
from fedapp.method import Reply, ServerContext
from fedapp.models import build_model
from fedapp.reduce.plain import MeanReducer
from fedapp.reduce.spec import Mean
from strategies.cwfedavg import METHOD as CWFEDAVG
from strategies.cwfedavg import CwFedAvg
from strategies.fedamp import attention
from strategies.fedgh import LARs, batches, header_step

NUMBERS = {"0.88 M": 878_538, "11.4 M": 11_444_298, "10 k": 9738}
"""Parameters of `cnn`, `resnet18` and `digits-c` with ten classes."""

FORMS = ("naive", "ours")

Model = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Problem:
    """One computation on one input.

    Attributes
    ----------
    naive, ours : alternatives that give the same result.
    bytes : bytes that must move.   flops : operations of the cheapest form.   double : whether they are in float64.
    random : whether the results are random draws, which are not compared.
    """

    naive: Callable[[], Any]
    ours: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    double: bool = False
    random: bool = False

    def floor(self, speeds: Speeds) -> float:
        """Return the seconds of the floor at the given speeds."""
        return max(self.bytes / speeds.memory, self.flops / (speeds.double if self.double else speeds.single))


def difference(a: Any, b: Any) -> float:
    """Largest difference between two results, relative to the largest entry of its array."""
    if isinstance(a, dict | list):
        left, right = (x.values() if isinstance(x, dict) else x for x in (a, b))
        return max(difference(x, y) for x, y in zip(left, right, strict=True))
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max())


def models(count: int, size: str) -> list[Model]:
    """Models with arrays in the proportions of the small CNN's."""
    rng = np.random.default_rng(0)
    edges = [int(NUMBERS[size] * share) for share in (0, 0.003, 0.06, 0.99, 1)]
    return [
        {f"layer{i}": rng.standard_normal(n, dtype=np.float32) for i, n in enumerate(np.diff(edges))}
        for _ in range(count)
    ]


def average(count: int, size: str) -> Problem:
    """FedAvg's average of models as replies arrive; naive: weighted copies, then a sum per array."""
    uploads = models(count, size)
    sizes = [100 + i for i in range(count)]
    replies = [Reply(i, n, m, {}) for i, (m, n) in enumerate(zip(uploads, sizes, strict=True))]

    def naive() -> Model:
        weighted = [[a * n for a in m.values()] for m, n in zip(uploads, sizes, strict=True)]
        sums = [reduce(np.add, arrays) / sum(sizes) for arrays in zip(*weighted, strict=True)]
        return dict(zip(uploads[0], sums, strict=True))

    def ours() -> dict[str, NDArray[Any]]:
        mean = MeanReducer(uploads[0], RunningMean(), Mean())
        for reply in replies:
            mean.add(reply)
        return mean.result()

    return Problem(naive, ours, 4.0 * NUMBERS[size] * (count + 1))


def cwfedavg(count: int, classes: int, size: str) -> Problem:
    """Class-wise averages of all layers and a blend for each client; naive: K global models, then the mixes.

    Ours is the strategy itself: it reads the replies and computes what each client gets.
    """
    name, channels, side = ("digits-c", 1, 8) if size == "10 k" else ("cnn", 3, 32)
    model = build_model(name, num_classes=classes, shape=(channels, side, side), seed=0)
    initial = {n: p.detach().numpy() for n, p in model.named_parameters()}
    rng = np.random.default_rng(1)
    uploads = [{n: rng.standard_normal(a.shape, np.float32) for n, a in initial.items()} for _ in range(count)]
    replies = [Reply(k, int(rng.integers(100, 1000)), arrays, {}) for k, arrays in enumerate(uploads)]
    p = np.stack([norm_distribution(r.arrays["head.weight"]) for r in replies])
    q = class_weights(np.array([r.num_samples for r in replies]), p)
    tensors = [[torch.from_numpy(a) for a in r.arrays.values()] for r in replies]
    strategy = CwFedAvg(CWFEDAVG, CwFedAvgHParams(layers="all"))
    start = strategy.init(ServerContext(0, (), classes, model.width, initial, lambda k: initial, np.random.default_rng))

    def ours() -> list[Model]:
        state = strategy.aggregate(start, 1, iter(replies))
        return [payload.arrays for _, payload in strategy.send_each(state, 2, range(count))]

    numbers = sum(a.size for a in initial.values())
    products = count * min(count, 2 * classes)
    return Problem(
        lambda: naive_mix(tensors, torch.from_numpy(p), torch.from_numpy(q)),
        ours, 8.0 * count * numbers, 2.0 * products * numbers,
    )  # fmt: skip


def fedamp(count: int, size: str) -> Problem:
    """FedAMP's attention over all pairs of models and the mixes; naive: a loop over pairs."""
    uploads, numbers = models(count, size), NUMBERS[size]
    hparams = FedAMPHParams(form="distance", sigma=2.0 * numbers, alpha=numbers / count)

    def naive() -> list[Model]:
        mixed: list[Model] = []
        for i, own in enumerate(uploads):
            weights = np.zeros(count)
            for j, other in enumerate(uploads):
                if i != j:
                    distance = sum(float(((own[n] - other[n]) ** 2).sum()) for n in own)
                    weights[j] = hparams.alpha * np.exp(-distance / hparams.sigma) / hparams.sigma
            weights *= min(1.0, (1.0 - hparams.xi) / max(weights.sum(), 1e-300))
            weights[i] = max(0.0, 1 - weights.sum())
            blend = {n: np.zeros_like(a) for n, a in own.items()}
            for j, other in enumerate(uploads):
                for n in blend:
                    blend[n] += np.float32(weights[j]) * other[n]
            mixed.append(blend)
        return mixed

    return Problem(
        naive, lambda: combine(attention(uploads, hparams), uploads), 12.0 * count * numbers,
        2.0 * count * count * numbers * 3,  # distances in float64 count as two
    )  # fmt: skip


def ccvr_statistics(samples: int, classes: int, width: int) -> Problem:
    """Mean and covariance of every class; naive: NumPy's `cov` of each class's rows."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((samples, width), dtype=np.float32)
    y = rng.integers(0, classes, samples)

    def naive() -> list[NDArray[np.float64]]:
        found = []
        for c in range(classes):
            rows = z[y == c].astype(np.float64)
            rows.mean(axis=0)
            found.append(np.cov(rows, rowvar=False))
        return found

    def ours() -> list[NDArray[np.float64]]:
        statistics = moments(z, y, classes)
        return [statistics.cov(c) for c in range(classes)]

    return Problem(naive, ours, 4.0 * samples * width, float(samples) * width * width, double=True)


def ccvr_merging(clients: int, classes: int, width: int) -> Problem:
    """Pooling the clients' statistics; naive: Eq. 3 and 4 with loops over classes and clients."""
    rng = np.random.default_rng(0)
    base = [np.cov(rng.standard_normal((width, 2 * width))).astype(np.float32) for _ in range(3)]
    counts = rng.integers(2, 100, (clients, classes))
    means = rng.standard_normal((clients, classes, width)).astype(np.float32)
    packed = [pack(cov) for cov in base]
    replies = [
        {
            "ids": np.arange(classes), "count": counts[k], "mean": means[k],
            "cov": np.stack([packed[(k + c) % 3] for c in range(classes)]),
        }
        for k in range(clients)
    ]  # fmt: skip

    def naive() -> list[NDArray[np.float64]]:
        found = []
        for c in range(classes):
            n = counts[:, c].sum()
            mean = sum(counts[k, c] * means[k, c].astype(np.float64) for k in range(clients)) / n
            cov = np.zeros((width, width))
            for k in range(clients):
                own = means[k, c].astype(np.float64)
                cov += (counts[k, c] - 1) / (n - 1) * base[(k + c) % 3] + counts[k, c] / (n - 1) * np.outer(own, own)
            found.append(cov - n / (n - 1) * np.outer(mean, mean))
        return found

    def ours() -> list[NDArray[np.float64]]:
        pool = MomentsPool(classes, width)
        for reply in replies:
            pool.add(reply)
        statistics = pool.moments()
        return [statistics.cov(c) for c in range(classes)]

    covariances = float(clients) * classes * width
    return Problem(naive, ours, 4.0 * covariances * (width + 1) / 2, covariances * width, double=True)


def ccvr_sampling(draws: int, classes: int, width: int) -> Problem:
    """Virtual features of every class; naive: NumPy's `multivariate_normal`."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((classes * (width + 50), width), dtype=np.float32)
    y = np.repeat(np.arange(classes), width + 50)
    statistics = moments(z, y, classes)
    means, covs = statistics.means, [statistics.cov(c) for c in range(classes)]

    def naive() -> NDArray[np.float64]:
        generator = np.random.default_rng(0)
        return np.concatenate([generator.multivariate_normal(means[c], covs[c], draws) for c in range(classes)])

    work = classes * (width**3 / 3 + float(draws) * width * width)
    return Problem(
        naive, lambda: virtual_features(statistics, draws, 0)[0], 4.0 * classes * draws * width, work,
        double=True, random=True,
    )  # fmt: skip


def autograd_steps(w: torch.Tensor, b: torch.Tensor, batches: Iterable[Any], momentum: float = 0.0) -> None:
    """Train a head as PyTorch's tutorials do; the naive form."""
    optimizer = torch.optim.SGD([w.requires_grad_(), b.requires_grad_()], lr=0.01, momentum=momentum)
    for x, y in batches:
        loss = F.cross_entropy(F.linear(x, w, b), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def ccvr_retraining(draws: int, classes: int, width: int) -> Problem:
    """One epoch of the head's re-training; naive: a `DataLoader`."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(classes), draws)
    z = rng.standard_normal((len(y), width)).astype(np.float32) + y[:, None].astype(np.float32) / classes
    weight, bias = np.zeros((classes, width), np.float32), np.zeros(classes, np.float32)

    def naive() -> None:
        data = TensorDataset(torch.from_numpy(z), torch.from_numpy(y))
        loader = DataLoader(data, batch_size=64, shuffle=True)
        autograd_steps(torch.zeros(classes, width), torch.zeros(classes), loader, momentum=0.9)

    order = np.random.default_rng(0).permutation(len(y))
    steps = [order[i : i + 64] for i in range(0, len(order), 64)]
    flops = 4.0 * len(y) * width * classes
    return Problem(
        naive, lambda: retrain((weight, bias), z, y, iter(steps), 0.01, momentum=0.9), 4.0 * z.size, flops, random=True
    )


def fedgh_header(clients: int, classes: int, width: int) -> Problem:
    """A pass of single steps over all clients' class means; naive: autograd and an optimizer."""
    rng = np.random.default_rng(0)
    lars = [LARs(rng.standard_normal((classes, width)), np.arange(classes)) for _ in range(clients)]
    start = rng.standard_normal((classes, width)) / width

    def naive() -> NDArray[np.float64]:
        w, b = torch.tensor(start), torch.zeros(classes, dtype=torch.float64)
        pairs = (pair for lar in lars for pair in zip(torch.from_numpy(lar.r), torch.from_numpy(lar.s), strict=True))
        autograd_steps(w, b, ((r[None], s[None]) for r, s in pairs))
        return w.detach().numpy()

    def ours() -> NDArray[np.float64]:
        w, b = start.copy(), np.zeros(classes)
        for r, s in batches(lars, "sample", None):
            header_step(w, b, r, s, 0.01)
        return w

    numbers = 1.0 * clients * classes * width
    return Problem(naive, ours, 8.0 * numbers, 6.0 * numbers * classes, double=True)


@dataclass(frozen=True)
class Row:
    """A problem of the table.

    Attributes
    ----------
    key : name in performance.json, or "".   repeats : number of turns; few for large naive forms.
    threads : threads of both forms; 0 = one per core. The default of `threads` and `server-threads` is 1.
    """

    name: str
    sizes: str
    problem: Callable[[], Problem]
    key: str
    repeats: int
    threads: int


KINDS: dict[Callable[..., Problem], tuple[str, str, int]] = {
    average: ("average", "{0} x {1}", 5),
    cwfedavg: ("cwFedAvg, all layers", "M = {0}, K = {1}, {2}", 3),
    fedamp: ("FedAMP", "M = {0}, {1}", 3),
    ccvr_statistics: ("CCVR statistics", "{0:,} x {2}, K = {1}", 5),
    ccvr_merging: ("CCVR merging", "M = {0}, K = {1}, d = {2}", 3),
    ccvr_sampling: ("CCVR sampling", "K = {1}, {0} draws, d = {2}", 3),
    ccvr_retraining: ("CCVR re-training, an epoch", "K = {1}, {0} draws, d = {2}", 5),
    fedgh_header: ("FedGH head, a pass", "M = {0}, K = {1}, d = {2}", 3),
}
"""Name and sizes in the table, and turns."""


def row(make: Callable[..., Problem], *args: int | str, key: str = "", threads: int = 1) -> Row:
    """Return the row of a problem of the given sizes."""
    name, sizes, repeats = KINDS[make]
    return Row(name, sizes.format(*args), partial(make, *args), key, repeats, threads)


ROWS = [
    row(average, 20, "0.88 M", key="average_vs_naive_20x4mb"),
    row(average, 100, "0.88 M", key="average_vs_naive_100x4mb"),
    row(average, 20, "11.4 M", key="average_vs_naive_one_thread"),
    row(average, 20, "11.4 M", key="average_vs_naive", threads=0),
    row(cwfedavg, 20, 10, "0.88 M", key="cwfedavg_server_vs_naive_m20_k10"),
    row(cwfedavg, 20, 100, "0.88 M"),
    row(cwfedavg, 20, 200, "0.88 M"),
    *(row(cwfedavg, 100, k, "0.88 M", key=f"cwfedavg_server_vs_naive_k{k}") for k in (10, 100, 200)),
    row(fedamp, 20, "0.88 M"),
    row(fedamp, 100, "0.88 M", key="fedamp_server_vs_naive"),
    row(ccvr_statistics, 50_000, 10, 512, key="ccvr_statistics_vs_numpy"),
    row(ccvr_statistics, 50_000, 100, 512, key="ccvr_statistics_vs_numpy_k100"),
    row(ccvr_statistics, 50_000, 200, 512),
    row(ccvr_merging, 20, 10, 512),
    row(ccvr_merging, 100, 10, 512, key="ccvr_merging_vs_numpy"),
    row(ccvr_merging, 20, 100, 512),
    row(ccvr_sampling, 1000, 10, 512, key="ccvr_sampling_vs_numpy"),
    row(ccvr_sampling, 200, 100, 512),
    row(ccvr_sampling, 100, 200, 512),
    row(ccvr_retraining, 1000, 10, 512, key="ccvr_retraining_vs_dataloader"),
    row(ccvr_retraining, 200, 100, 512),
    row(fedgh_header, 20, 10, 500, key="fedgh_header_vs_autograd"),
    row(fedgh_header, 100, 10, 500),
    row(fedgh_header, 20, 100, 500),
]

SMALL = [
    row(average, 4, "10 k", key="average_vs_naive"),
    row(cwfedavg, 4, 3, "10 k", key="cwfedavg_server_vs_naive_k100"),
    row(fedamp, 4, "10 k", key="fedamp_server_vs_naive"),
    row(ccvr_statistics, 500, 3, 16, key="ccvr_statistics_vs_numpy"),
    row(ccvr_merging, 4, 3, 16, key="ccvr_merging_vs_numpy"),
    row(ccvr_sampling, 50, 3, 16, key="ccvr_sampling_vs_numpy"),
    row(ccvr_retraining, 50, 3, 16, key="ccvr_retraining_vs_dataloader"),
    row(fedgh_header, 4, 3, 16, key="fedgh_header_vs_autograd"),
]


@dataclass(frozen=True)
class Found:
    """The measurements of a row; `floor` is in seconds."""

    row: Row
    times: Times
    threads: int
    floor: float

    @property
    def speedup(self) -> float:
        """Return the ratio of the naive form to ours."""
        return self.times.ratio("naive", "ours")

    @property
    def over(self) -> float:
        """Return the ratio of ours to the floor."""
        return self.times.median("ours") / self.floor


def measure(rows: list[Row], small: bool = False) -> list[Found]:
    """Measure all rows."""
    process.quiet_blas()
    found = []
    for row in rows:
        threads = row.threads or usable_cores()
        speeds = machine.speeds(threads, small)
        process.prepare(threads)
        problem = row.problem()
        times = alternate({form: getattr(problem, form) for form in FORMS}, 1 if small else row.repeats)
        found.append(Found(row, times, threads, problem.floor(speeds)))
    return found
