"""Differences between methods over seeds: one interval for a table, and the words and numbers that follow from it.

The unit is the seed. The clients of one seed share a partition, an initial model and a federation, so their differences
are not independent evidence; balanced scores of a global model are one number, however many clients there are. Each
seed gives one number, its mean difference, and every interval here is a t interval over seeds.

Differences are shares in [-1, 1].
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.errors import counted
from fedapp.lazy import stats
from fedapp.results.statistics import DASH, Floats, duration, measured

PRIOR_FREEDOM = 2.0
"""Degrees of freedom that the variance common to a table's rows counts for."""
FEW_SEEDS = 6
"""From this number of seeds on each row keeps its own variance."""
FEW_ROWS = 3
"""Fewer rows have no common variance."""
MOST_DIGITS = 4
"""Most digits of a number of points."""
FEWEST_PARTITIONS = 4
"""Fewer partitions say nothing of their variance: with two, its interval spans a factor of 5,000."""


@dataclass(frozen=True)
class Difference:
    """A method's mean difference to the reference of its table, with its intervals.

    Attributes
    ----------
    values : one for each seed (n,).   mean : of the values.
    error : standard error of the mean; freedom : its degrees of freedom; both NaN with one seed.
    rows : of the table, which share the probability of an error.
    """

    values: Floats
    mean: float
    error: float
    freedom: float
    rows: int

    def half_width(self, tail: float) -> float:
        """Return half the width of this row's own t interval with so much probability beyond either end."""
        return float(stats.t.ppf(1 - tail, self.freedom)) * self.error

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval that holds for all rows together; NaN with one seed."""
        return self.mean - self.half_width(0.025 / self.rows)

    @property
    def high(self) -> float:
        """Upper end of the same interval."""
        return self.mean + self.half_width(0.025 / self.rows)

    @property
    def inner(self) -> float:
        """Half the width of this row's own 90 % interval, for two one-sided tests at 5 %."""
        return self.half_width(0.05)

    def equals(self, margin: float) -> bool:
        """Return whether two one-sided t-tests at 5 % exclude a difference of `margin` in either direction."""
        return -margin < self.mean - self.inner and self.mean + self.inner < margin

    @property
    def p(self) -> float:
        """Two-sided p of the t-test of this row alone; NaN with one seed."""
        if not self.error:  # no step is known, and the seeds agree
            return 0.0 if self.mean else 1.0
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def word(self, margin: float) -> str:
        """Return the decision in words; empty with one seed or two.

        Parameters
        ----------
        margin : smallest difference that matters, see :func:`margin_of`.
        """
        if len(self.values) < 3:
            return ""
        equal = self.equals(margin)
        if not self.low > 0 and not self.high < 0:
            return "equal" if equal else "open"
        side = "better" if self.low > 0 else "worse"
        if self.low > margin or self.high < -margin:
            return f"{side} by more than the margin"
        return f"{side}, by less than the margin" if equal else side

    def probabilities(self, margin: float) -> tuple[float, float, float]:
        """Return the posterior probabilities of worse, equal and better, from this row's values alone; NaN for one.

        The posterior of the mean under a flat prior is a t distribution with n - 1 degrees of freedom (Benavoli et al.,
        2017, "Time for a change", without their correction for overlapping training sets).
        """
        n, spread = len(self.values), float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan
        if math.isnan(spread) or not spread:
            return (math.nan,) * 3
        below = float(stats.t.cdf((-margin - self.mean) * math.sqrt(n) / spread, n - 1))
        above = float(stats.t.sf((margin - self.mean) * math.sqrt(n) / spread, n - 1))
        return below, 1 - below - above, above


def differences_of(table: Mapping[str, Iterable[float]], resolution: float) -> dict[str, Difference]:
    """Return every row's difference with intervals that hold together (Bonferroni over the k rows), at 95 %.

    With few seeds a variance is hardly known. Where a table has at least three rows and a row fewer than six seeds, its
    variance is moderated by the one common to the rows: (d0 s0 + (n - 1) s2) / (d0 + n - 1) with n - 1 + d0 degrees of
    freedom (Smyth, 2004), s0 = median over rows of s2 / (median of chi-squared(n - 1) / (n - 1)). d0 = 2 is fixed:
    all rows share the reference's luck, so their variances are more alike than Smyth's estimate of d0 assumes.

    Parameters
    ----------
    table : row -> one difference for each seed, at least one.   The reference has no row.
    resolution : smallest step of such a difference, > 0, or NaN. A variance is at least that of rounding, its square
        / 12.
    """
    rows = {name: measured(values) for name, values in table.items()}
    variance = {n: max(float(v.var(ddof=1)), resolution**2 / 12) for n, v in rows.items() if len(v) > 1}
    scaled = [s2 / (stats.chi2.median(len(rows[n]) - 1) / (len(rows[n]) - 1)) for n, s2 in variance.items()]
    common = float(np.median(scaled)) if scaled else math.nan
    found = {}
    for name, values in rows.items():
        n, mean = len(values), float(values.mean())
        error = freedom = math.nan
        if name in variance:
            prior = prior_freedom(n, len(rows))
            freedom = n - 1 + prior
            error = math.sqrt((prior * common + (n - 1) * variance[name]) / freedom / n)
        found[name] = Difference(values, mean, error, freedom, len(rows))
    return found


def prior_freedom(seeds: int, rows: int) -> float:
    """Return the degrees of freedom that the common variance counts for in a table of `rows` rows."""
    return PRIOR_FREEDOM if rows >= FEW_ROWS and seeds < FEW_SEEDS else 0.0


def margin_of(reference: float, test_rows: float) -> float:
    """Return the smallest difference that matters: one point, or less near 100 %, but one test row of a client.

    Parameters
    ----------
    reference : mean accuracy of the reference, a share.   test_rows : of the median client, > 0.
    """
    return max(min(0.01, 0.1 * (1 - reference)), 1 / test_rows)


def smallest_seen(seeds: int, rows: int) -> float:
    """Return the smallest true difference that is found four times of five, in standard deviations over seeds.

    Parameters
    ----------
    seeds : at least 2.   rows : compared with the reference.
    """
    from scipy import optimize

    freedom = seeds - 1 + prior_freedom(seeds, rows)
    critical = float(stats.t.ppf(1 - 0.025 / rows, freedom))
    # The noncentral distribution loses digits far out: the root lies below twice the critical value and three.
    limit = 2 * critical / math.sqrt(seeds) + 3
    found = optimize.bisect(lambda d: stats.nct.sf(critical, freedom, d * math.sqrt(seeds)) - 0.8, 0, limit)
    return float(found)


def partition_share(scores: Floats) -> tuple[float, float, float]:
    """Return the share of the variance that lies between partitions, and its 95 % interval.

    In the nested model score = mean + partition + training seed, the mean squares between and within partitions give
    the variance of partitions max(0, (MS_P - MS_W) / R), and their ratio has an F distribution with P - 1 and P (R - 1)
    degrees of freedom (Searle, Casella and McCulloch, 1992, Variance Components, 3.6).

    Parameters
    ----------
    scores : (P, R), of R >= 2 training seeds on each of P partitions.

    Returns
    -------
    Share, lower and upper end in [0, 1]; NaN for fewer than four partitions, or where the seeds of each agree exactly.
    """
    partitions, runs = scores.shape
    within = float(scores.var(axis=1, ddof=1).mean())
    if partitions < FEWEST_PARTITIONS or not within:
        return (math.nan,) * 3
    ratio = runs * float(scores.mean(axis=1).var(ddof=1)) / within
    quantiles = stats.f.ppf((0.975, 0.025), partitions - 1, partitions * (runs - 1))
    share, low, high = (max(0.0, float((f - 1) / (f + runs - 1))) for f in (ratio, *(ratio / quantiles)))
    return share, low, high


# ---- as text ---------------------------------------------------------------------------------------------------------


def in_words(row: Mapping[str, Any]) -> str:
    """Write a row of `significance.csv` in points: mean, interval and decision; the two values of two seeds.

    One seed has no interval, so its difference is not written.
    """
    if row["seeds"] < 3:
        return by_seed(row)
    word = str(row["word"]).replace("the margin", f"the margin of {size_of(row['margin'])}")
    return f"{points(row['mean_difference'])} ({interval_text(row)}), {word}"


def points(share: float) -> str:
    """Write a difference of shares in points, `+2.9`."""
    return f"{100 * share:+.1f}"


def interval_of(low: float, high: float) -> str:
    """Write an interval of shares in points, with the digits that its ends need to differ from each other and zero."""
    texts = ([f"{100 * end:+.{digits}f}" for end in (low, high)] for digits in range(1, MOST_DIGITS + 1))
    return " to ".join(next((ends for ends in texts if len({0.0, *map(float, ends)}) == 3), map(points, (low, high))))


def interval_text(row: Mapping[str, Any]) -> str:
    """Write the interval of a row of `significance.csv` in points."""
    return interval_of(row["low"], row["high"])


def size_of(share: float) -> str:
    """Write a distance in points, with as many digits as it needs to be above zero."""
    texts = (f"{100 * share:.{digits}f}" for digits in range(1, MOST_DIGITS + 1))
    return next((text for text in texts if float(text)), "0.0")


def by_seed(row: Mapping[str, Any]) -> str:
    """Write the values of two seeds in points; a dash for one."""
    return " and ".join(map(points, json.loads(row["by_seed"]))) if row["seeds"] > 1 else DASH


def power_text(seeds: int, rows: int, reference: str, spread: float, seconds: float, again: float) -> str:
    """State the differences that so few seeds can show, and the seeds that smaller ones take.

    Parameters
    ----------
    rows : compared with the reference.   spread : standard deviation of a difference over seeds, a share; NaN for one.
    seconds : that the runs of one seed take.   again : and, from three seeds on, its second run of training alone.
    """
    if seeds < 3:
        what = "One seed: no differences are shown" if seeds == 1 else "Two seeds: differences are shown, not judged"
        return f"{what}. --seeds 3 adds {duration(seconds * (3 - seeds) + 3 * again)} of runs."
    more = [n for n in (5, 10) if n > seeds]
    seen = {n: size_of(spread * smallest_seen(n, rows)) for n in (seeds, *more)}
    shown = f"only differences above about {seen[seeds]} points would show"
    text = f"{seeds} seeds, {counted(rows, 'method')} against {reference}: "
    text += ", ".join([shown, *(f"with {n} seeds {seen[n]}" for n in more)])
    adds = f"; --seeds {more[0]} adds {duration((seconds + again) * (more[0] - seeds))} of runs" if more else ""
    return f"{text}{adds}."
