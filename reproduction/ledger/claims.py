"""The ledger: falsifiable claims of the four papers, the runs that each needs, and the rules that decide them.

The claims are data, `claims.toml`. A claim *holds* or *does not hold* where an interval says so;
otherwise, or where runs are missing, it is *not decided*. The rules:

- The unit is the seed: one number for each, such as the mean over clients. Clients of one seed share a federation.
- A directed claim holds where the 95 % t interval of the mean difference lies above zero, and does not hold where it
  lies below. It does not hold either where the difference is shown to be smaller than one point (two one-sided t-tests
  at 5 %). Counts of rounds have no such margin.
- Claims whose seeds were extended after a look, to five or ten, are decided at 2.2 % instead of 5 %: three looks at
  5 % would give 11 to 12 % false decisions.
- Variants with different numbers of seeds are compared over the seeds that both have.
- A claim of equality within a margin holds where the interval of two one-sided tests lies inside the margin, and does
  not hold where it lies outside.
- Facts that are counted, such as bytes, are compared as they are.
- A claim whose runs also differ in something else is not decided.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from fedapp.errors import BadRequest
from fedapp.experiments.shipped import Entry, read
from fedapp.results.intervals import differences_of, points
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, holm, reached, spread
from reproduction.ledger.studies import FOLDER, RunKey, keys_of, studies

Outcome = Literal["holds", "does not hold", "not decided"]
LEVEL, AFTER_A_LOOK, FIRST_SEEDS = 0.05, 0.022, 3
"""Level of a claim, level of one with more seeds than the first look had, and their number."""
NEGLIGIBLE = 0.01
"""Difference of accuracies that is too small to matter; fixed before the runs."""
Protocol = Literal["received", "trained"]


@dataclass(frozen=True)
class Verdict:
    """How a claim stands: the outcome, our numbers with their interval, and the p of a directed claim at level 5 %."""

    outcome: Outcome
    ours: str
    p: float = math.nan


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
    """The finished runs: those in `kept`, and those below `out` (None: no others), each read once.

    Parameters
    ----------
    after_a_look : level of claims with more than the first seeds.
    """

    def __init__(
        self, out: Path | None, kept: Mapping[RunKey, RunResult] | None = None, after_a_look: float = AFTER_A_LOOK
    ) -> None:
        self._out = out
        self._after_a_look = after_a_look
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

    def level(self, seeds: int) -> float:
        """Return the level at which a claim with so many seeds is decided."""
        return self._after_a_look if seeds > FIRST_SEEDS else LEVEL

    def resolution(self, pairs: Sequence[Pair]) -> float:
        """Return the smallest step of a mean over clients."""
        return max(run.resolution() for runs in self.common(pairs) for run in runs)

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


def over_seeds(
    differences: Floats, resolution: float, text: str, level: float = LEVEL, negligible: float = NEGLIGIBLE
) -> Verdict:
    """Decide whether a number that was measured once per seed is positive.

    Parameters
    ----------
    resolution : smallest step of the number.   text : our numbers.
    negligible : smallest difference that matters; 0 for a number other than an accuracy.
    """
    mean = float(differences.mean())
    found = differences_of({"": differences}, resolution)[""]
    half, inner = found.half_width(level / 2), found.half_width(level)
    shown = points if negligible else "{:+.1f}".format
    text = f"{text}, difference {shown(mean)} ({shown(mean - half)} to {shown(mean + half)})"
    p = min(1.0, found.p * LEVEL / level)
    if abs(mean) > half:
        return Verdict("holds" if mean > 0 else "does not hold", text, p)
    if abs(mean) + inner < negligible:
        return Verdict("does not hold", f"{text}, equal within one point", p)
    return Verdict("not decided", text, p)


def every(*parts: Verdict) -> Verdict:
    """All parts must hold; one that does not decides against the whole."""
    outcomes = {p.outcome for p in parts}
    total: Outcome = "holds" if outcomes == {"holds"} else "not decided"
    outcome: Outcome = "does not hold" if "does not hold" in outcomes else total
    deciding = [part.p for part in parts if part.outcome == outcome] or [part.p for part in parts]
    return Verdict(outcome, "; ".join(p.ours for p in parts), max(deciding))


def surviving(verdicts: Sequence[Verdict]) -> list[str]:
    """Return whether each claim's decision survives Holm's correction over all directed claims; a dash for others."""
    corrected = holm([v.p for v in verdicts])
    return [
        "–" if math.isnan(p) or v.outcome == "not decided" else "yes" if p < LEVEL else "no"
        for v, p in zip(verdicts, corrected)
    ]


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
    """One variant is more accurate than another in the mean over clients."""

    rule: Literal["better over clients"]
    better: PairText
    worse: PairText
    protocol: Protocol

    def decide(self, e: Evidence) -> Verdict:
        """Decide it."""
        x, y = e.seeds(self.runs(), [MEASURES[self.protocol]] * 2)
        d = x - y
        text = f"{spread(x)} against {spread(y)} ({self.protocol})"
        return over_seeds(d, e.resolution(self.runs()), text, e.level(len(d)))


class EqualOverClients(Rule):
    """Two variants differ by less than `margin` in the mean over clients."""

    rule: Literal["equal over clients"]
    first: PairText
    second: PairText
    protocol: Protocol
    margin: float = Field(gt=0)

    def decide(self, e: Evidence) -> Verdict:
        """Decide it; an interval that lies outside the margin decides against it."""
        x, y = e.seeds(self.runs(), [MEASURES[self.protocol]] * 2)
        d = x - y
        level = e.level(len(d))
        half = differences_of({"": d}, e.resolution(self.runs()))[""].half_width(level)
        low, high = float(d.mean()) - half, float(d.mean()) + half
        text = f"{spread(x)} against {spread(y)} ({self.protocol}), "
        text += f"{100 - 200 * level:g} % interval {points(low)} to {points(high)}"
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
        d = values[0] - values[1]
        text = self.ours.format(larger=texts[0], smaller=texts[1])
        return over_seeds(d, e.resolution(self.runs()), text, e.level(len(d)))


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
        return over_seeds(y - x, 1.0, text, e.level(len(x)), negligible=0.0)


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
    before : outcome by the rules of version 0.2, where it differs.
    uneven : what its runs differ in besides the claim, which leaves it undecided.
    """

    id: str
    text: str
    paper: str
    tests: tuple[AnyRule, ...] = Field(min_length=1)
    before: Outcome | None = None
    uneven: str = ""

    @property
    def runs(self) -> tuple[Pair, ...]:
        """The (study, variant) pairs it needs."""
        return tuple(dict.fromkeys(pair for test in self.tests for pair in test.runs()))

    def decide(self, evidence: Evidence) -> Verdict:
        """Decide the claim; missing runs leave it undecided."""
        try:
            found = every(*(test.decide(evidence) for test in self.tests))
            return Verdict("not decided", f"{found.ours}; {self.uneven}", found.p) if self.uneven else found
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
