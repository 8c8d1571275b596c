"""The ledger: falsifiable claims of the four papers, the runs each needs, and the test that decides it.

A claim *holds* or *does not hold* where a test says so at 5 %; else, or where runs are missing, it is *not decided*.

- Accuracies of clients are compared in pairs over (client, seed) with Wilcoxon's signed-rank test, two-sided:
  significant in the claimed direction is `holds`, significant in the other `does not hold`.
- Where there is one number a seed (a global accuracy, a correlation), a one-sample t-test over seeds decides likewise.
- A claim of equality within a margin is decided by whether the confidence interval lies inside or outside the margin.
- Facts that are counted, such as bytes, are compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from fedapp.engines import local as engines
from fedapp.experiments.studies import STUDIES, RunKey

Outcome = Literal["holds", "does not hold", "not decided"]
LEVEL = 0.05
Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    """How a claim stands: the outcome, and our numbers with their spread."""

    outcome: Outcome
    ours: str


class Missing(Exception):
    """A run that a claim needs is not there."""


@dataclass
class Evidence:
    """Reads finished runs below `out`."""

    out: Path
    _cache: dict[tuple[str, str, int], Any] = field(default_factory=dict)

    def runs(self, study: str, variant: str) -> dict[int, Run]:
        """All seeds of a variant; raises `Missing` if one is not finished."""
        found = {}
        for seed in range(STUDIES[study].seeds):
            key = (study, variant, seed)
            if key not in self._cache:
                folder = self.out / RunKey(*key).folder
                if not engines.summary_of(folder).get("ok"):
                    raise Missing(RunKey(*key).folder)
                self._cache[key] = Run(folder)
            found[seed] = self._cache[key]
        return found

    def spent(self, study: str) -> tuple[int, float]:
        """Finished runs of a study, and their seconds together."""
        count, seconds = 0, 0.0
        for variant in STUDIES[study].variants:
            for seed in range(STUDIES[study].seeds):
                summary = engines.summary_of(self.out / RunKey(study, variant, seed).folder)
                if summary.get("ok"):
                    count, seconds = count + 1, seconds + float(summary["seconds"])
        return count, seconds


@dataclass(frozen=True)
class Run:
    """One finished run."""

    out: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Its summary."""
        return engines.summary_of(self.out)

    @cached_property
    def final(self) -> pd.DataFrame:
        """Clients scored after the last round, by client id."""
        return pd.read_csv(self.out / "final.csv").set_index("client")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row a round."""
        return pd.read_csv(self.out / "rounds.csv")


def clients(e: Evidence, study: str, variant: str, protocol: str) -> pd.Series:
    """Accuracy in [0, 1] of every (seed, client) after the last round."""
    parts = {s: r.final[f"{protocol}_accuracy"] for s, r in e.runs(study, variant).items()}
    series: pd.Series = pd.concat(parts, names=["seed"]).dropna()
    return series


def seeds(e: Evidence, study: str, variant: str, value: Callable[[Run], float]) -> Numbers:
    """One number a seed."""
    return np.array([value(r) for r in e.runs(study, variant).values()], dtype=np.float64)


def points(values: Numbers | pd.Series, signed: bool = False) -> str:
    """Format mean ± standard deviation over seeds in percentage points."""
    if isinstance(values, pd.Series):
        values = values.groupby("seed").mean().to_numpy()
    sign = "+" if signed else ""
    return f"{100 * values.mean():{sign}.1f} ± {100 * values.std(ddof=1):.1f}"


def outcome(mean: float, p: float) -> Outcome:
    """Decide a directed claim from a difference (claimed positive) and its two-sided p-value."""
    if not np.isfinite(p) or p >= LEVEL:
        return "not decided"
    return "holds" if mean > 0 else "does not hold"


def over_clients(e: Evidence, a: tuple[str, str], b: tuple[str, str], protocol: str) -> Verdict:
    """Decide whether variant `a` is better than variant `b`, in pairs over (seed, client)."""
    x, y = (clients(e, *v, protocol) for v in (a, b))
    common = x.index.intersection(y.index)
    d = (x - y).loc[common]
    p = float(stats.wilcoxon(d).pvalue) if (d != 0).any() else float("nan")
    by_seed = d.groupby("seed").mean()
    text = f"{points(x)} against {points(y)} ({protocol}), difference {points(d, signed=True)}, p = {p:.1g}"
    return Verdict(outcome(float(by_seed.mean()), p), text)


def over_seeds(differences: Numbers, text: str) -> Verdict:
    """Decide whether a number that was measured once a seed is positive."""
    spread = differences.std(ddof=1)
    if spread == 0:
        p = 0.0 if differences.mean() != 0 else float("nan")
    else:
        p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return Verdict(outcome(float(differences.mean()), p), f"{text}, p = {p:.1g}")


def within(e: Evidence, a: tuple[str, str], b: tuple[str, str], protocol: str, margin: float) -> Verdict:
    """Decide whether two variants differ by less than `margin`: 90 % interval of the mean over (seed, client)."""
    x, y = (clients(e, *v, protocol) for v in (a, b))
    d = (x - y).dropna()
    half = float(stats.t.ppf(0.95, len(d) - 1)) * float(d.std(ddof=1)) / np.sqrt(len(d))
    low, high = float(d.mean()) - half, float(d.mean()) + half
    text = f"{points(x)} against {points(y)} ({protocol}), 90 % interval {100 * low:+.1f} to {100 * high:+.1f} points"
    if -margin < low and high < margin:
        return Verdict("holds", text)
    return Verdict("does not hold" if low > margin or high < -margin else "not decided", text)


def every(*parts: Verdict) -> Verdict:
    """All parts must hold; one that does not decides against the whole."""
    outcomes = {p.outcome for p in parts}
    total: Outcome = (
        "does not hold" if "does not hold" in outcomes else "holds" if outcomes == {"holds"} else "not decided"
    )
    return Verdict(total, "; ".join(p.ours for p in parts))


def counted(holds: bool, text: str) -> Verdict:
    """Decide a fact that is counted, not estimated."""
    return Verdict("holds" if holds else "does not hold", text)


@dataclass(frozen=True)
class Claim:
    """One falsifiable claim.

    Attributes
    ----------
    id : short name.   text : the claim in our words, with the place in the paper.
    paper : the paper's numbers.   runs : (study, variant) pairs it needs.   test : decides it.
    """

    id: str
    text: str
    paper: str
    runs: tuple[tuple[str, str], ...]
    test: Callable[[Evidence], Verdict]

    def decide(self, evidence: Evidence) -> Verdict:
        """Decide the claim; missing runs leave it undecided."""
        try:
            return self.test(evidence)
        except Missing as e:
            return Verdict("not decided", f"runs are missing, such as {e}")


H, HS, HF, HO = "hetero-cifar10", "hetero-cifar10-skewed", "hetero-fashion", "homo-cifar10"
G, G6 = "fedgh-cifar10", "fedgh-cifar10-6"
P, D, D1, M = "cw-pathological", "cw-dirichlet", "cw-dirichlet-1", "cw-mnist"
C5, C1, C05 = "ccvr-0.5", "ccvr-0.1", "ccvr-0.05"


def _better(name: str, text: str, paper: str, a: tuple[str, str], b: tuple[str, str], protocol: str) -> Claim:
    return Claim(name, text, paper, (a, b), lambda e: over_clients(e, a, b, protocol))


def _spread(e: Evidence, study: str, a: str, b: str, protocol: str) -> Verdict:
    def deviation(r: Run) -> float:
        return float(r.final[f"{protocol}_accuracy"].std(ddof=0))

    x, y = seeds(e, study, a, deviation), seeds(e, study, b, deviation)
    return over_seeds(y - x, f"std over clients {points(x)} against {points(y)} ({protocol})")


def rounds_to(run: Run, target: float, protocol: str = "trained") -> float:
    """First round whose mean accuracy reaches `target`; one more than the last if none does."""
    reached = run.rounds[run.rounds[f"{protocol}_accuracy"] >= target]
    return float(reached["round"].iloc[0]) if len(reached) else float(run.rounds["round"].iloc[-1] + 1)


def _target(e: Evidence, study: str, variant: str = "lgfedavg", protocol: str = "trained") -> float:
    """The target of a study: what `variant` reaches in its last round, mean over seeds, less one point."""
    return float(seeds(e, study, variant, lambda r: float(r.rounds[f"{protocol}_accuracy"].iloc[-1])).mean()) - 0.01


def _fewer_rounds(e: Evidence, study: str, a: str, b: str) -> Verdict:
    target = _target(e, study)
    x, y = (seeds(e, study, v, lambda r: rounds_to(r, target)) for v in (a, b))
    first, second = (f"{v.mean():.1f} ± {v.std(ddof=1):.1f}" for v in (x, y))
    return over_seeds(y - x, f"{first} against {second} rounds to {100 * target:.1f} %")


def _traffic(e: Evidence) -> Verdict:
    head = seeds(e, H, "fedclassavg", lambda r: float(r.summary["bytes_up"]))[0]
    model = 45_815_752.0  # ResNet-18 with a 512-wide layer and 10 classes, parameters and buffers
    return counted(
        model / head > 2000, f"{head:,.0f} B against {model:,.0f} B for ResNet-18: {model / head:,.0f} times"
    )


def _same_cost(e: Evidence) -> Verdict:
    a, b = (
        seeds(e, P, v, lambda r: float(r.summary["bytes_up"] + r.summary["bytes_down"]))[0]
        for v in ("cwfedavg", "fedavg")
    )
    return counted(a == b, f"{a:,.0f} B against {b:,.0f} B per client and round")


def _gh_cost(e: Evidence) -> Verdict:
    a, b = (seeds(e, G, v, lambda r: float(r.summary["bytes_up"]))[0] for v in ("fedgh", "lgfedavg"))
    return counted(a < b, f"{a:,.0f} B against {b:,.0f} B up per client and round")


def _gap(e: Evidence) -> Verdict:
    def gap(study: str) -> Numbers:
        def accuracy(r: Run) -> float:
            return float(r.final["received_accuracy"].mean())

        return np.subtract(seeds(e, study, "cwfedavg", accuracy), seeds(e, study, "fedavg", accuracy))

    skewed, even = gap(D), gap(D1)
    text = f"gain {points(skewed, True)} at alpha 0.1, {points(even, True)} at alpha 1.0 (received)"
    return over_seeds(skewed - even, text)


def calibration(e: Evidence, study: str, variant: str, which: str) -> Numbers:
    """`before`, `after` or `oracle` of CCVR's calibration, one number a seed."""
    return seeds(e, study, variant, lambda r: float(r.summary["calibration"][which]))


def _calibrated(e: Evidence, study: str, variant: str = "fedavg") -> Numbers:
    return np.subtract(calibration(e, study, variant, "after"), calibration(e, study, variant, "before"))


def _ccvr(e: Evidence, study: str, variant: str = "fedavg") -> Verdict:
    before, after = (calibration(e, study, variant, k) for k in ("before", "after"))
    return over_seeds(after - before, f"{points(before)} to {points(after)} (global)")


def _oracle(e: Evidence, study: str) -> Verdict:
    after, oracle = (calibration(e, study, "fedavg", k) for k in ("after", "oracle"))
    return over_seeds(oracle - after, f"CCVR {points(after)}, on real features {points(oracle)} (global)")


def _more_gain(e: Evidence) -> Verdict:
    x, y = _calibrated(e, C1), _calibrated(e, C5)
    return over_seeds(x - y, f"gain {points(x, True)} at alpha 0.1, {points(y, True)} at alpha 0.5")


def _more_samples(e: Evidence) -> Verdict:
    x, y = (calibration(e, C1, v, "after") for v in ("fedavg", "mc-50"))
    return over_seeds(x - y, f"{points(x)} with 2000, {points(y)} with 50 virtual samples a class")


def _transform(e: Evidence) -> Verdict:
    x, y = (calibration(e, C1, v, "after") for v in ("transform", "fedavg"))
    return over_seeds(x - y, f"{points(x)} with, {points(y)} without")


def _moon_worse(e: Evidence) -> Verdict:
    x, y = (calibration(e, C1, v, "before") for v in ("moon", "fedavg"))
    return over_seeds(y - x, f"MOON {points(x)}, FedAvg {points(y)} before calibration")


def _clsnorm(e: Evidence) -> Verdict:
    plain, gain = (calibration(e, C1, v, "before") for v in ("fedavg", "clsnorm"))
    post = _calibrated(e, C1)
    return over_seeds(post - (gain - plain), f"clsnorm {points(gain - plain, True)}, CCVR {points(post, True)}")


CLAIMS: tuple[Claim, ...] = (
    # FedClassAvg
    _better(
        "fca-1",
        "FedClassAvg beats local training, Dirichlet 0.5 (Table 2)",
        "76.7 against 68.9",
        (H, "fedclassavg"),
        (H, "local"),
        "trained",
    ),
    _better(
        "fca-2",
        "FedClassAvg beats local training, two classes each (Table 2)",
        "92.0 against 88.7",
        (HS, "fedclassavg"),
        (HS, "local"),
        "trained",
    ),
    _better(
        "fca-3",
        "FedClassAvg beats local training on Fashion-MNIST (Table 2)",
        "93.0 against 88.4",
        (HF, "fedclassavg"),
        (HF, "local"),
        "trained",
    ),
    _better(
        "fca-4",
        "KT-pFL falls below local training on CIFAR-10 (Table 2)",
        "62.3 against 68.9",
        (H, "local"),
        (H, "ktpfl"),
        "trained",
    ),
    _better(
        "fca-5",
        "KT-pFL beats local training on Fashion-MNIST (Table 2)",
        "90.4 against 88.4",
        (HF, "ktpfl"),
        (HF, "local"),
        "trained",
    ),
    _better(
        "fca-6",
        "FedProto falls below local training (Table 2)",
        "47.4 against 68.9",
        (H, "local"),
        (H, "fedproto"),
        "trained",
    ),
    _better(
        "fca-7",
        "The contrastive term gives most: CA + CL beats CA + PR (Table 4)",
        "75.1 against 63.1",
        (H, "ca-cl"),
        (H, "ca-pr"),
        "trained",
    ),
    _better(
        "fca-8",
        "The full method beats classifier averaging alone (Table 4)",
        "76.7 against 61.5",
        (H, "fedclassavg"),
        (H, "ca"),
        "trained",
    ),
    _better(
        "fca-9",
        "Classifier averaging alone is below local training (Tables 2, 4)",
        "61.5 against 68.9",
        (H, "local"),
        (H, "ca"),
        "trained",
    ),
    _better(
        "fca-10",
        "With one architecture '+weight' beats FedAvg (Table 3)",
        "85.5 against 77.3",
        (HO, "weight"),
        (HO, "fedavg"),
        "trained",
    ),
    Claim(
        "fca-11",
        "Clients spread less than under local training (Table 2)",
        "std 5.3 against 6.7",
        ((H, "fedclassavg"), (H, "local")),
        lambda e: _spread(e, H, "fedclassavg", "local", "trained"),
    ),
    Claim(
        "fca-12",
        "A head is about 2,000 times less traffic than ResNet-18 (Table 5)",
        "22 KB against 43.73 MB",
        ((H, "fedclassavg"),),
        _traffic,
    ),
    _better(
        "fca-13",
        "Control the paper lacks: the gain is the federation's, not the local loss's",
        "-",
        (H, "fedclassavg"),
        (H, "no-federation"),
        "trained",
    ),
    # cwFedAvg
    _better(
        "cw-1",
        "cwFedAvg beats FedAvg, pathological CIFAR-10 (Table 1)",
        "91.2 against 60.7",
        (P, "cwfedavg"),
        (P, "fedavg"),
        "received",
    ),
    _better(
        "cw-2",
        "cwFedAvg beats FedAvg, Dirichlet 0.1, CIFAR-10 (Table 1)",
        "88.7 against 61.9",
        (D, "cwfedavg"),
        (D, "fedavg"),
        "received",
    ),
    _better(
        "cw-3",
        "cwFedAvg beats FedAvg, Dirichlet 0.1, MNIST (Table 1)",
        "99.5 against 98.7",
        (M, "cwfedavg"),
        (M, "fedavg"),
        "received",
    ),
    Claim(
        "cw-4",
        "Without WDR cwFedAvg is at FedAvg's level, within 3 points (Table 4)",
        "32.3 against 32.4 (CIFAR-100)",
        ((D, "cw-no-wdr"), (D, "fedavg")),
        lambda e: within(e, (D, "cw-no-wdr"), (D, "fedavg"), "received", 0.03),
    ),
    _better(
        "cw-5",
        "WDR beats true label counts without it (Table 4)",
        "55.0 against 48.3 (CIFAR-100)",
        (D, "cw-all"),
        (D, "cw-empirical"),
        "received",
    ),
    Claim(
        "cw-6",
        "The output layer alone does as well as all layers: not below by 2 points (Table 3)",
        "91.2 against 91.0",
        ((P, "cwfedavg"), (P, "cw-all")),
        lambda e: within(e, (P, "cwfedavg"), (P, "cw-all"), "received", 0.02),
    ),
    Claim(
        "cw-7",
        "The gain over FedAvg shrinks as labels even out (Table 2)",
        "23.9 to 0.7 points (CIFAR-100)",
        ((D, "cwfedavg"), (D, "fedavg"), (D1, "cwfedavg"), (D1, "fedavg")),
        _gap,
    ),
    Claim(
        "cw-8",
        "cwFedAvg sends no more than FedAvg (Table 2)",
        "2 Sigma each",
        ((P, "cwfedavg"), (P, "fedavg")),
        _same_cost,
    ),
    _better(
        "cw-9",
        "FedAMP is ahead of cwFedAvg at Dirichlet 0.1, CIFAR-10 (Table 1)",
        "89.5 against 88.7",
        (D, "fedamp"),
        (D, "cwfedavg"),
        "trained",
    ),
    _better(
        "cw-10",
        "Control the paper lacks: cwFedAvg beats local training, pathological",
        "-",
        (P, "cwfedavg"),
        (P, "local"),
        "received",
    ),
    _better(
        "cw-11",
        "IFCA falls below cwFedAvg, pathological CIFAR-10 (Table 1)",
        "72.8 against 91.2",
        (P, "cwfedavg"),
        (P, "ifca"),
        "received",
    ),
    # FedGH
    _better(
        "gh-1",
        "FedGH beats local training, two classes each (Table 3)",
        "97.6 against 96.6",
        (G, "fedgh"),
        (G, "local"),
        "trained",
    ),
    _better("gh-2", "FedGH beats LG-FedAvg (Table 3)", "97.6 against 96.4", (G, "fedgh"), (G, "lgfedavg"), "trained"),
    _better("gh-3", "FedGH beats FedProto (Table 3)", "97.6 against 96.5", (G, "fedgh"), (G, "fedproto"), "trained"),
    Claim(
        "gh-4",
        "FedGH needs fewer rounds to LG-FedAvg's level than LG-FedAvg (Table 3)",
        "2 against 11",
        ((G, "fedgh"), (G, "lgfedavg")),
        lambda e: _fewer_rounds(e, G, "fedgh", "lgfedavg"),
    ),
    Claim(
        "gh-5",
        "FedGH's clients send less than LG-FedAvg's (Table 3)",
        "4,000 B against 20,040 B",
        ((G, "fedgh"), (G, "lgfedavg")),
        _gh_cost,
    ),
    Claim(
        "gh-6",
        "The header's learning rate hardly matters: 0.001 and 1 within 2 points (Fig. 5)",
        "flat",
        ((G, "fedgh-0.001"), (G, "fedgh-1")),
        lambda e: within(e, (G, "fedgh-0.001"), (G, "fedgh-1"), "trained", 0.02),
    ),
    _better(
        "gh-7",
        "The trained header beats a frozen one, which the released code has",
        "-",
        (G, "fedgh"),
        (G, "fedgh-frozen"),
        "received",
    ),
    _better(
        "gh-8",
        "FedGH beats LG-FedAvg with six classes each (Fig. 3)",
        "above at every point",
        (G6, "fedgh"),
        (G6, "lgfedavg"),
        "trained",
    ),
    # CCVR
    Claim(
        "ccvr-1",
        "CCVR improves FedAvg at alpha 0.5 (Table 2)",
        "68.6 to 71.0",
        ((C5, "fedavg"),),
        lambda e: _ccvr(e, C5),
    ),
    Claim(
        "ccvr-2",
        "CCVR improves FedAvg at alpha 0.1 (Table 2)",
        "58.6 to 62.7",
        ((C1, "fedavg"),),
        lambda e: _ccvr(e, C1),
    ),
    Claim(
        "ccvr-3",
        "CCVR improves FedAvg at alpha 0.05 (Table 2)",
        "52.3 to 55.0",
        ((C05, "fedavg"),),
        lambda e: _ccvr(e, C05),
    ),
    Claim(
        "ccvr-4",
        "CCVR improves FedProx, FedAvgM and MOON at alpha 0.1 (Table 2)",
        "+3.7, +3.4, +4.9",
        ((C1, "fedprox"), (C1, "fedavgm"), (C1, "moon")),
        lambda e: every(*(_ccvr(e, C1, b) for b in ("fedprox", "fedavgm", "moon"))),
    ),
    Claim(
        "ccvr-5",
        "The gain grows from alpha 0.5 to 0.1 (Table 2)",
        "2.4 to 4.1",
        ((C1, "fedavg"), (C5, "fedavg")),
        _more_gain,
    ),
    Claim(
        "ccvr-6",
        "Calibration on real features is ahead of CCVR (Table 2)",
        "64.7 against 62.7",
        ((C1, "fedavg"),),
        lambda e: _oracle(e, C1),
    ),
    Claim(
        "ccvr-7",
        "More virtual samples help at alpha 0.1 (Table 3)",
        "62.7 against 61.1",
        ((C1, "fedavg"), (C1, "mc-50")),
        _more_samples,
    ),
    Claim("ccvr-8", "Tukey's transform helps (Sec. 4)", "no number", ((C1, "transform"), (C1, "fedavg")), _transform),
    Claim(
        "ccvr-9",
        "MOON is below FedAvg before calibration at alpha 0.1 (Table 2)",
        "57.4 against 58.6",
        ((C1, "moon"), (C1, "fedavg")),
        _moon_worse,
    ),
    Claim(
        "ccvr-10",
        "Calibration after training gains more than a normalised head during it (Table 1)",
        "+4.1 against +0.4",
        ((C1, "fedavg"), (C1, "clsnorm")),
        _clsnorm,
    ),
)
