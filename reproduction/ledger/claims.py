"""The ledger: falsifiable claims of the four papers, the runs that each needs, and the rules that decide them.

The claims are data, `claims.toml`. A claim *holds* or *does not hold* where a test says so at 5 %;
otherwise, or where runs are missing, it is *not decided*. The rules:

- Accuracies of clients are compared in pairs over (seed, client) with Wilcoxon's signed-rank test, two-sided:
  significant in the claimed direction is `holds`, significant in the other is `does not hold`.
- One number per seed (such as a global accuracy) is decided likewise by a one-sample t-test over seeds.
- A claimed difference that is not significant `does not hold` where the 90 % interval of the mean lies within one point
  of zero: that is an equivalence test, and such a difference is too small to matter. Counts of rounds have no such
  margin.
- Variants with different numbers of seeds are compared over the seeds that both have.
- A claim of equality within a margin is decided by whether the confidence interval lies inside or outside the margin.
- Facts that are counted, such as bytes, are compared as they are.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BeforeValidator, Field

from fedapp.errors import BadRequest
from fedapp.experiments.shipped import Entry, read
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, interval, reached, signed_rank, spread, t_test
from reproduction.ledger.studies import FOLDER, RunKey, keys_of, studies

Outcome = Literal["holds", "does not hold", "not decided"]
LEVEL = 0.05
NEGLIGIBLE = 0.01
"""Difference of accuracies that is too small to matter."""
Protocol = Literal["received", "trained"]


@dataclass(frozen=True)
class Verdict:
    """How a claim stands: the outcome, and our numbers with their spread."""

    outcome: Outcome
    ours: str


class MissingRun(Exception):
    """A run that a claim needs has not finished; names it."""


class Pair(NamedTuple):
    """A study and one of its variants: a run for each seed."""

    study: str
    variant: str


def _pair(text: object) -> object:
    study, _, variant = str(text).partition("/")
    if study not in studies() or variant not in studies()[study].variants:
        raise ValueError(f"'{text}' is no study/variant of studies.toml")
    return study, variant


PairText = Annotated[Pair, BeforeValidator(_pair)]
"""A pair as the file has it: `study/variant`."""


class Evidence:
    """The finished runs: those in `kept`, and those below `out` (None: no others), each read once."""

    def __init__(self, out: Path | None, kept: Mapping[RunKey, RunResult] | None = None) -> None:
        self._out = out
        self._read: dict[RunKey, RunResult | None] = dict(kept or {})

    def run(self, key: RunKey) -> RunResult | None:
        """Return a run, None if it has not finished."""
        if key not in self._read:
            run = RunResult(self._out / key.folder) if self._out is not None else None
            self._read[key] = run if run is not None and run.ok else None
        return self._read[key]

    def runs(self, pair: Pair) -> list[RunResult]:
        """Return all seeds of a variant.

        Raises
        ------
        MissingRun : one of them has not finished.
        """
        found = []
        for key in keys_of([pair]):
            if (run := self.run(key)) is None:
                raise MissingRun(key.folder)
            found.append(run)
        return found

    def finished(self, *names: str) -> dict[RunKey, RunResult]:
        """Return the finished runs of the named studies, of all without names."""
        pairs = [(name, variant) for name in names or studies() for variant in studies()[name].variants]
        return {key: run for key in keys_of(pairs) if (run := self.run(key)) is not None}

    def common(self, pairs: Sequence[Pair]) -> list[list[RunResult]]:
        """Return of each variant the seeds that all of them have."""
        found = [self.runs(pair) for pair in pairs]
        fewest = min(map(len, found))
        return [runs[:fewest] for runs in found]

    def clients(self, pairs: Sequence[Pair], protocol: str) -> list[pd.Series]:
        """Return of each variant the accuracy in [0, 1] of every (seed, client) after the last round."""
        column = f"{protocol}_accuracy"
        return [
            pd.concat({seed: run.final.set_index("client") for seed, run in enumerate(runs)}, names=["seed"])[
                column
            ].dropna()
            for runs in self.common(pairs)
        ]

    def one_row(self, pairs: Sequence[Pair]) -> float:
        """Return what one test row of the median client adds to its accuracy."""
        return 1 / float(pd.concat([run.test_rows for runs in self.common(pairs) for run in runs]).median())

    def seeds(self, pairs: Sequence[Pair], values: Iterable[Callable[[RunResult], float]]) -> list[Floats]:
        """Return of each variant one number per seed: what its function says."""
        every = zip(self.common(pairs), values, strict=True)
        return [np.array([value(run) for run in runs], dtype=np.float64) for runs, value in every]


MEASURES: dict[str, Callable[[RunResult], float]] = {
    "received": lambda run: float(run.final["received_accuracy"].mean()),
    "trained": lambda run: float(run.final["trained_accuracy"].mean()),
    "trained spread": lambda run: float(run.final["trained_accuracy"].std(ddof=0)),
    "before": lambda run: float(run.summary["calibration"]["before"]),
    "after": lambda run: float(run.summary["calibration"]["after"]),
    "oracle": lambda run: float(run.summary["calibration"]["oracle"]),
}
"""One number of a run: the mean over clients, their standard deviation, and CCVR's accuracies around calibration."""


def _number(text: object) -> object:
    run, _, measure = str(text).partition(" ")
    if measure not in MEASURES:
        raise ValueError(f"'{text}': a run and one of {', '.join(MEASURES)}")
    return run, measure


Number = Annotated[tuple[PairText, str], BeforeValidator(_number)]
"""A run and one of `MEASURES`, written `study/variant measure`."""


# ---- outcomes --------------------------------------------------------------------------------------------------------


def directed(mean: float, p: float, text: str, bounds: tuple[float, float] | None = None) -> Verdict:
    """Decide whether a difference is positive.

    Parameters
    ----------
    mean : the difference.   p : its two-sided p-value.   text : our numbers.
    bounds : 90 % interval of the mean of a difference of accuracies; None = no difference is negligible.
    """
    text = f"{text}, p = {p:.1g}"
    if p < LEVEL:
        return Verdict("holds" if mean > 0 else "does not hold", text)
    if bounds is not None and bounds[0] > -NEGLIGIBLE and bounds[1] < NEGLIGIBLE:
        return Verdict("does not hold", f"{text}, equal within one point")
    return Verdict("not decided", text)


def over_seeds(differences: Floats, resolution: float, text: str, shares: bool = True) -> Verdict:
    """Decide whether a number that was measured once per seed is positive.

    Parameters
    ----------
    resolution : smallest step of the number.   text : our numbers.   shares : whether it is an accuracy's.
    """
    bounds = interval(differences, resolution) if shares else None
    return directed(float(differences.mean()), t_test(differences, resolution), text, bounds)


def every(*parts: Verdict) -> Verdict:
    """All parts must hold; one that does not decides against the whole."""
    outcomes = {p.outcome for p in parts}
    total: Outcome = "holds" if outcomes == {"holds"} else "not decided"
    return Verdict("does not hold" if "does not hold" in outcomes else total, "; ".join(p.ours for p in parts))


def points(accuracies: pd.Series, signed: bool = False) -> str:
    """Write the mean over clients, ± the standard deviation over seeds, in percentage points."""
    return spread(accuracies.groupby("seed").mean(), signed=signed)


# ---- rules -----------------------------------------------------------------------------------------------------------


class Rule(Entry):
    """A way to decide a claim; its fields are the values that a claim gives it."""

    def runs(self) -> list[Pair]:
        """Return the runs it needs."""
        return [value for _, value in self if isinstance(value, Pair)]

    def decide(self, e: Evidence) -> Verdict:
        """Decide it."""
        raise NotImplementedError


class BetterOverClients(Rule):
    """One variant is more accurate than another, in pairs over (seed, client)."""

    rule: Literal["better over clients"]
    better: PairText
    worse: PairText
    protocol: Protocol

    def decide(self, e: Evidence) -> Verdict:
        """Decide it."""
        x, y = e.clients(self.runs(), self.protocol)
        d = (x - y).dropna()
        text = f"{points(x)} against {points(y)} ({self.protocol}), difference {points(d, signed=True)}"
        bounds = interval(d, e.one_row(self.runs()))
        return directed(float(d.groupby("seed").mean().mean()), signed_rank(d), text, bounds)


class EqualOverClients(Rule):
    """Two variants differ by less than `margin`: the 90 % interval of the mean over (seed, client) lies inside."""

    rule: Literal["equal over clients"]
    first: PairText
    second: PairText
    protocol: Protocol
    margin: float = Field(gt=0)

    def decide(self, e: Evidence) -> Verdict:
        """Decide it; an interval that lies outside the margin decides against it."""
        x, y = e.clients(self.runs(), self.protocol)
        low, high = interval((x - y).dropna(), e.one_row(self.runs()))
        text = f"{points(x)} against {points(y)} ({self.protocol}), "
        text += f"90 % interval {100 * low:+.1f} to {100 * high:+.1f} points"
        if -self.margin < low and high < self.margin:
            return Verdict("holds", text)
        return Verdict("does not hold" if low > self.margin or high < -self.margin else "not decided", text)


class LargerOverSeeds(Rule):
    """One number per seed is larger than another; each is one number of a run, or the first of two less the second.

    `{larger}` and `{smaller}` in `ours` stand for the two.
    """

    rule: Literal["larger over seeds"]
    larger: tuple[Number, ...] = Field(min_length=1, max_length=2)
    smaller: tuple[Number, ...] = Field(min_length=1, max_length=2)
    ours: str

    def runs(self) -> list[Pair]:
        """Return the runs it needs."""
        return [pair for pair, _ in (*self.larger, *self.smaller)]

    def decide(self, e: Evidence) -> Verdict:
        """Decide it."""
        measures = [MEASURES[measure] for _, measure in (*self.larger, *self.smaller)]
        found = iter(e.seeds(self.runs(), measures))
        values, texts = [], []
        for numbers in (self.larger, self.smaller):
            first, *rest = (next(found) for _ in numbers)
            values.append(first - rest[0] if rest else first)
            texts.append(spread(values[-1], signed=bool(rest)))
        step = max(run.resolution() for runs in e.common(self.runs()) for run in runs)
        return over_seeds(values[0] - values[1], step, self.ours.format(larger=texts[0], smaller=texts[1]))


def target_of(runs: list[RunResult], protocol: str) -> float:
    """Return the accuracy to count rounds to: what runs reach after the last round, mean over seeds, less one point."""
    return float(np.mean([run.curve(protocol)["accuracy"].iloc[-1] for run in runs])) - 0.01


def rounds_to(run: RunResult, target: float, protocol: str = "trained") -> float:
    """Return after how many completed rounds the mean accuracy reaches `target`; one more than all if it never does."""
    first, _ = reached(run.curve(protocol, everyone=True), target)
    return float(run.rounds["round"].iloc[-1]) + 1 if np.isnan(first) else first


class FewerRounds(Rule):
    """One variant needs fewer rounds than another to the level of `level_of`."""

    rule: Literal["fewer rounds"]
    fewer: PairText
    more: PairText
    level_of: PairText
    protocol: Protocol

    def decide(self, e: Evidence) -> Verdict:
        """Decide it."""
        target = target_of(e.runs(self.level_of), self.protocol)
        needed = functools.partial(rounds_to, target=target, protocol=self.protocol)
        x, y = e.seeds((self.fewer, self.more), (needed, needed))
        text = f"{spread(x, factor=1)} against {spread(y, factor=1)} rounds to {100 * target:.1f} %"
        return over_seeds(y - x, 1.0, text, shares=False)


class FewerBytes(Rule):
    """A client sends fewer bytes in a round than under another variant, or both ways exactly as many."""

    rule: Literal["fewer bytes up", "same bytes"]
    first: PairText
    second: PairText

    def decide(self, e: Evidence) -> Verdict:
        """Decide it by the first seed: bytes do not depend on seeds."""
        up = self.rule == "fewer bytes up"
        keys = ("bytes_up",) if up else ("bytes_up", "bytes_down")
        a, b = (sum(e.runs(pair)[0].summary[key] for key in keys) for pair in self.runs())
        text = f"{a:,.0f} B against {b:,.0f} B {'up ' if up else ''}per client and round"
        return Verdict("holds" if (a < b if up else a == b) else "does not hold", text)


class TimesFewerBytes(Rule):
    """A client sends less than a `times`-th of `than` bytes in a round."""

    rule: Literal["times fewer bytes"]
    run: PairText
    times: float
    than: int
    than_name: str

    def decide(self, e: Evidence) -> Verdict:
        """Decide it by the first seed: bytes do not depend on seeds."""
        sent = e.runs(self.run)[0].summary["bytes_up"]
        ratio = self.than / sent
        text = f"{sent:,.0f} B against {self.than:,.0f} B for {self.than_name}: {ratio:,.0f} times"
        return Verdict("holds" if ratio > self.times else "does not hold", text)


AnyRule = Annotated[
    BetterOverClients | EqualOverClients | LargerOverSeeds | FewerRounds | FewerBytes | TimesFewerBytes,
    Field(discriminator="rule"),
]


# ---- claims ----------------------------------------------------------------------------------------------------------


class Claim(Entry):
    """One falsifiable claim.

    Attributes
    ----------
    id : short name.   text : the claim in our words, with the place in the paper.
    paper : the paper's numbers.   tests : all of them must hold.
    """

    id: str
    text: str
    paper: str
    tests: tuple[AnyRule, ...] = Field(min_length=1)

    @property
    def runs(self) -> tuple[Pair, ...]:
        """The (study, variant) pairs it needs."""
        return tuple(dict.fromkeys(pair for test in self.tests for pair in test.runs()))

    def decide(self, evidence: Evidence) -> Verdict:
        """Decide the claim; missing runs leave it undecided."""
        try:
            return every(*(test.decide(evidence) for test in self.tests))
        except MissingRun as e:
            return Verdict("not decided", f"runs are missing, such as {e}")


class Claims(Entry):
    """The file."""

    claim: tuple[Claim, ...]


@functools.cache
def claims() -> dict[str, Claim]:
    """Return all claims by id.

    Raises
    ------
    BadRequest : the file is not as it should be, or two claims share an id.
    """
    path = FOLDER / "claims.toml"
    found = read(path, Claims).claim
    twice = [name for name, count in Counter(c.id for c in found).items() if count > 1]
    if twice:
        raise BadRequest(f"{path}: two claims are called {', '.join(twice)}")
    return {c.id: c for c in found}
