"""Benchmark (c): every computation of the server (and CCVR's statistics) against its naive form and against the floor.

The floor is what the machine could do at best: the bytes that must be read or written once, at the speed of memory, or
the operations of the cheapest known form at the speed of a large matrix product, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from benchmarks.memory import peak_of
from benchmarks.reference import naive_mix
from benchmarks.timing import Times, alternate
from clients.cwfedavg import CwFedAvgHParams
from clients.fedamp import FedAMPHParams
from fedapp import process
from fedapp.core.classwise import class_weights, norm_distribution
from fedapp.core.gaussian import MomentsPool, moments, pack
from fedapp.core.heads import retrain
from fedapp.core.pairwise import combine
from fedapp.core.virtual import virtual_features
from fedapp.engines.resources import usable_cores
from fedapp.method import Reply, ServerContext
from fedapp.models import build_model
from strategies.base import weighted_mean
from strategies.cwfedavg import METHOD as CWFEDAVG
from strategies.cwfedavg import CwFedAvg
from strategies.fedamp import attention
from strategies.fedgh import LARs, batches, header_step

CNN = 878_538
"""Parameters of `cnn` with ten classes."""
RESNET = 11_444_298
"""Parameters of `resnet18` with ten classes."""

Model = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Problem:
    """One computation on one input.

    Attributes
    ----------
    naive, ours : alternatives that give the same result.
    bytes : that must move.   flops : of the cheapest form.   double : whether in float64.
    check : compares the two results, largest difference relative to the largest entry; None = random by nature.
    """

    naive: Callable[[], Any]
    ours: Callable[[], Any]
    bytes: float
    flops: float = 0.0
    double: bool = False
    check: Callable[[Any, Any], float] | None = None

    def floor(self, speeds: Speeds) -> float:
        """Seconds at the given speeds."""
        return max(self.bytes / speeds.memory, self.flops / (speeds.double if self.double else speeds.single))


def difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Largest difference relative to the largest entry."""
    return float(np.abs(a - b).max() / np.abs(a).max())


def models(count: int, numbers: int) -> list[Model]:
    """Models of `numbers` parameters in arrays of the small CNN's proportions."""
    rng = np.random.default_rng(0)
    cuts = [int(numbers * share) for share in (0.003, 0.06, 0.99)]
    edges = [0, *cuts, numbers]
    return [
        {f"layer{i}": rng.standard_normal(size, dtype=np.float32) for i, size in enumerate(np.diff(edges))}
        for _ in range(count)
    ]


def average(count: int, numbers: int) -> Problem:
    """FedAvg's average of models as replies arrive; naive: weighted copies, then a sum per array."""
    uploads = models(count, numbers)
    sizes = [100 + i for i in range(count)]
    replies = [Reply(i, n, m, {}) for i, (m, n) in enumerate(zip(uploads, sizes, strict=True))]

    def naive() -> Model:
        weighted = [[a * n for a in m.values()] for m, n in zip(uploads, sizes, strict=True)]
        sums = [reduce(np.add, arrays) / sum(sizes) for arrays in zip(*weighted, strict=True)]
        return dict(zip(uploads[0], sums, strict=True))

    return Problem(
        naive,
        lambda: weighted_mean(iter(replies), uploads[0]),
        4.0 * numbers * (count + 1),
        check=lambda a, b: max(difference(a[n], b[n]) for n in a),
    )


def cwfedavg(count: int, classes: int, small: bool = False) -> Problem:
    """Class-wise averages of all layers and a blend for each client; naive: K global models, then the mixes.

    Ours is the strategy itself: it takes the replies, and computes what each client is sent.
    """
    model = build_model(
        "digits-c" if small else "cnn", num_classes=classes, channels=1 if small else 3, size=8 if small else 32, seed=0
    )
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

    def check(a: list[list[torch.Tensor]], b: list[Model]) -> float:
        return max(
            difference(x.numpy(), y)
            for left, right in zip(a, b, strict=True)
            for x, y in zip(left, right.values(), strict=True)
        )

    numbers = sum(a.size for a in initial.values())
    products = count * min(count, 2 * classes)
    return Problem(
        lambda: naive_mix(tensors, torch.from_numpy(p), torch.from_numpy(q)),
        ours,
        8.0 * count * numbers,
        2.0 * products * numbers,
        check=check,
    )


def fedamp(count: int, numbers: int) -> Problem:
    """FedAMP's attention over all pairs of models and the mixes; naive: a loop over pairs."""
    uploads = models(count, numbers)
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
        naive,
        lambda: combine(attention(uploads, hparams), uploads),
        12.0 * count * numbers,
        2.0 * count * count * numbers * 3,  # distances in float64 count as two
        check=lambda a, b: max(difference(x[n], y[n]) for x, y in zip(a, b, strict=True) for n in x),
    )


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

    return Problem(
        naive, ours, 4.0 * samples * width, float(samples) * width * width, True,
        lambda a, b: max(difference(x, y) for x, y in zip(a, b, strict=True)),
    )  # fmt: skip


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

    return Problem(
        naive, ours, 4.0 * clients * classes * width * (width + 1) / 2, float(clients) * classes * width * width, True,
        lambda a, b: max(difference(x, y) for x, y in zip(a, b, strict=True)),
    )  # fmt: skip


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
    return Problem(naive, lambda: virtual_features(statistics, draws, 0)[0], 4.0 * classes * draws * width, work, True)


def ccvr_retraining(draws: int, classes: int, width: int) -> Problem:
    """One epoch of the head's re-training; naive: a `DataLoader`."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(classes), draws)
    z = rng.standard_normal((len(y), width)).astype(np.float32) + y[:, None].astype(np.float32) / classes
    weight, bias = np.zeros((classes, width), np.float32), np.zeros(classes, np.float32)

    def naive() -> None:
        w, b = torch.zeros(classes, width, requires_grad=True), torch.zeros(classes, requires_grad=True)
        optimizer = torch.optim.SGD([w, b], lr=0.01, momentum=0.9)
        data = TensorDataset(torch.from_numpy(z), torch.from_numpy(y))
        for x, labels in DataLoader(data, batch_size=64, shuffle=True):
            loss = F.cross_entropy(F.linear(x, w, b), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def steps() -> Iterator[NDArray[np.int64]]:
        order = np.random.default_rng(0).permutation(len(y))
        return iter([order[i : i + 64] for i in range(0, len(order), 64)])

    flops = 4.0 * len(y) * width * classes
    return Problem(naive, lambda: retrain(weight, bias, z, y, steps(), 0.01, momentum=0.9), 4.0 * z.size, flops)


def fedgh_header(clients: int, classes: int, width: int) -> Problem:
    """A pass of single steps over all clients' class means; naive: autograd and an optimizer."""
    rng = np.random.default_rng(0)
    lars = [LARs(rng.standard_normal((classes, width)), np.arange(classes)) for _ in range(clients)]
    start = rng.standard_normal((classes, width)) / width

    def naive() -> NDArray[np.float64]:
        head = torch.nn.Linear(width, classes).double()
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(start))
            head.bias.zero_()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
        for lar in lars:
            for r, s in zip(torch.from_numpy(lar.r), torch.from_numpy(lar.s), strict=True):
                loss = F.cross_entropy(head(r[None]), s[None])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return head.weight.detach().numpy().copy()

    def ours() -> NDArray[np.float64]:
        w, b = start.copy(), np.zeros(classes)
        for r, s in batches(lars, "sample", None):
            header_step(w, b, r, s, 0.01)
        return w

    return Problem(
        naive, ours, 8.0 * clients * classes * width, 6.0 * clients * classes * classes * width, True, difference
    )


@dataclass(frozen=True)
class Row:
    """A problem of the table.

    Attributes
    ----------
    key : name in performance.json, or "".   repeats : turns; large naive forms get few.
    threads : of both forms; 0 = one a core. One is what `threads` and `server-threads` are by default.
    """

    name: str
    sizes: str
    problem: Callable[[], Problem]
    key: str = ""
    repeats: int = 5
    threads: int = 1


ROWS = [
    Row("average", "20 x 0.88 M", partial(average, 20, CNN), "average_vs_naive_20x4mb"),
    Row("average", "100 x 0.88 M", partial(average, 100, CNN), "average_vs_naive_100x4mb"),
    Row("average", "20 x 11.4 M", partial(average, 20, RESNET), "average_vs_naive_one_thread"),
    Row("average", "20 x 11.4 M", partial(average, 20, RESNET), "average_vs_naive", threads=0),
    *(
        Row("cwFedAvg, all layers", f"M = {m}, K = {k}, 0.88 M", partial(cwfedavg, m, k), key, 3)
        for m, k, key in (
            (20, 10, "cwfedavg_server_vs_naive_m20_k10"), (20, 100, ""), (20, 200, ""),
            (100, 10, "cwfedavg_server_vs_naive_k10"), (100, 100, "cwfedavg_server_vs_naive_k100"),
            (100, 200, "cwfedavg_server_vs_naive_k200"),
        )
    ),
    *(Row("FedAMP", f"M = {m}, 0.88 M", partial(fedamp, m, CNN), key, 3)
      for m, key in ((20, ""), (100, "fedamp_server_vs_naive"))),
    *(
        Row("CCVR statistics", f"50,000 x 512, K = {k}", partial(ccvr_statistics, 50_000, k, 512), key)
        for k, key in ((10, "ccvr_statistics_vs_numpy"), (100, "ccvr_statistics_vs_numpy_k100"), (200, ""))
    ),
    *(
        Row("CCVR merging", f"M = {m}, K = {k}, d = 512", partial(ccvr_merging, m, k, 512), key, 3)
        for m, k, key in ((20, 10, ""), (100, 10, "ccvr_merging_vs_numpy"), (20, 100, ""))
    ),
    *(
        Row("CCVR sampling", f"K = {k}, {n} draws, d = 512", partial(ccvr_sampling, n, k, 512), key, 3)
        for k, n, key in ((10, 1000, "ccvr_sampling_vs_numpy"), (100, 200, ""), (200, 100, ""))
    ),
    *(
        Row("CCVR re-training, an epoch", f"K = {k}, {n} draws, d = 512", partial(ccvr_retraining, n, k, 512), key)
        for k, n, key in ((10, 1000, "ccvr_retraining_vs_dataloader"), (100, 200, ""))
    ),
    *(
        Row("FedGH header, a pass", f"M = {m}, K = {k}, d = 500", partial(fedgh_header, m, k, 500), key, 3)
        for m, k, key in ((20, 10, "fedgh_header_vs_autograd"), (100, 10, ""), (20, 100, ""))
    ),
]  # fmt: skip

SMALL = [
    Row("average", "4 x 20 k", partial(average, 4, 20_000), "average_vs_naive", 1),
    Row("cwFedAvg, all layers", "M = 4, K = 3", partial(cwfedavg, 4, 3, True), "cwfedavg_server_vs_naive_k100", 1),
    Row("FedAMP", "M = 4", partial(fedamp, 4, 20_000), "fedamp_server_vs_naive", 1),
    Row("CCVR statistics", "500 x 16, K = 3", partial(ccvr_statistics, 500, 3, 16), "ccvr_statistics_vs_numpy", 1),
    Row("CCVR merging", "M = 4, K = 3", partial(ccvr_merging, 4, 3, 16), "ccvr_merging_vs_numpy", 1),
    Row("CCVR sampling", "K = 3", partial(ccvr_sampling, 50, 3, 16), "ccvr_sampling_vs_numpy", 1),
    Row("CCVR re-training, an epoch", "K = 3", partial(ccvr_retraining, 50, 3, 16), "ccvr_retraining_vs_dataloader", 1),
    Row("FedGH header, a pass", "M = 4, K = 3", partial(fedgh_header, 4, 3, 16), "fedgh_header_vs_autograd", 1),
]


@dataclass(frozen=True)
class Found:
    """What was measured of a row; seconds are medians, `over` is ours over the floor, memory in bytes."""

    row: Row
    times: Times
    threads: int
    floor: float
    error: float | None
    memory: dict[str, int]

    @property
    def speedup(self) -> float:
        """Naive over ours."""
        return self.times.ratio("naive", "ours")

    @property
    def over(self) -> float:
        """Ours over the floor."""
        return self.times.median("ours") / self.floor


def _prepared(problem: Callable[[], Problem], name: str) -> Callable[[], Any]:
    return getattr(problem(), name)  # type: ignore[no-any-return]


def measure(rows: list[Row], small: bool = False) -> list[Found]:
    """Measure all rows; unless `small`, also the peak memory of both forms, each in a process of its own."""
    process.quiet_blas()
    found = []
    for row in rows:
        threads = row.threads or usable_cores()
        speeds = machine.speeds(threads, small)
        process.prepare(threads)
        problem = row.problem()
        error = None if problem.check is None else problem.check(problem.naive(), problem.ours())
        times = alternate({"naive": problem.naive, "ours": problem.ours}, row.repeats)
        floor = problem.floor(speeds)
        del problem
        peaks = {} if small else {n: peak_of(partial(_prepared, row.problem, n)) for n in ("naive", "ours")}
        found.append(Found(row, times, threads, floor, error, peaks))
    return found
