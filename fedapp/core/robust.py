"""Averages that a few malicious clients cannot control: bounded, trimmed and voted updates.

All rules work on updates, reply minus payload, as the rows of one matrix (K, D) in float64. With K clients, at most f
of them malicious:

===============  ====================================================================================  ==========
``norm``         ``u_k <- u_k min(1, median_i ||u_i|| / ||u_k||)``; bounds outliers, removes none       K >= 2f + 1
``median``       median of each coordinate (Yin et al., ICML 2018)                                      K >= 2f + 1
``trimmed``      mean of each coordinate without its f smallest and f largest values (Yin et al.)       K >= 2f + 1
``krum``         the update with the least sum of its K - f - 2 smallest squared distances to others    K >= 2f + 3
                 (Blanchard et al., NeurIPS 2017)
``multikrum``    plain mean of the K - f updates with the least sums                                    K >= 2f + 3
``geomedian``    point with the least weighted sum of distances, by Weiszfeld's steps (Pillutla et      K >= 2f + 1
                 al., 2022)
===============  ====================================================================================  ==========

Every limit is a multiple of a `lower_median`.

Rules are composed from left to right: ``norm+trimmed`` bounds all updates, then trims. `norm` and
`geomedian` weigh clients by their sample counts. A client states its own count, so `capped` goes with them.
The other rules count every client once.

Where a class or a cluster has its own senders, K is their number. If it is too small for the rule, `fitting` says what
takes its place.

cwFedAvg, FedGH and CCVR do not average whole replies; `fedapp/reduce/rules_<id>.py` bounds their clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import RunningMean, lower_median
from fedapp.settings import RobustnessSettings

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Float64 = npt.NDArray[np.float64]

BOUNDS = ("norm",)
"""Rules that change updates and leave their number."""
CHOICES = ("multikrum",)
"""Rules that leave some of the updates, which then count alike."""
ENDS = ("median", "trimmed", "krum", "geomedian")
"""Rules that make one update of all, so nothing can follow."""
RULES = (*BOUNDS, *CHOICES, *ENDS)
OWN_RULE = "own"
"""Stands for the rule of a method that does not average whole replies."""

FEW = 4
"""Senders below which no vote is taken: among three, a malicious and an unusual client look alike."""
STEPS, NEAREST, FARTHEST = 100, 1e-8, 1e150
"""Weiszfeld's steps, the distance below which two points are one, and the largest distance that is told apart."""
FAR = 3.0
"""Largest distance of a class mean to the median, as a multiple of the median distance."""


# Counts and single updates ------------------------------------------------------------------------


def capped(counts: Array | Sequence[float], factor: float) -> Float64:
    """Return sample counts (K,), none larger than `factor` times their `lower_median`; a factor of 0 changes none."""
    n = np.asarray(counts, dtype=np.float64)
    return np.minimum(n, factor * lower_median(n)) if factor and n.size else n


def believed(totals: Sequence[float], factor: float) -> Float64:
    """Return totals of samples (K,), `capped` among the clients that have any."""
    n = np.array(totals, dtype=np.float64)
    n[n > 0] = capped(n[n > 0], factor)
    return n


def norms_of(updates: Float64) -> Float64:
    """Return the lengths (K,) of the rows; of one that is too long for float64, infinity."""
    with np.errstate(over="ignore"):
        norms: Float64 = np.linalg.norm(updates, axis=1)
    return norms


def bounded(updates: Float64, limit: float | None = None) -> Float64:
    """Return updates (K, D), none longer than `limit`: by default the `lower_median` of their norms."""
    norms = norms_of(updates)
    limit = lower_median(norms) if limit is None else limit
    return updates * np.minimum(1.0, limit / np.where(norms > 0, norms, 1.0))[:, None]


# Rules --------------------------------------------------------------------------------------------


def coordinate_median(updates: Float64) -> Float64:
    """Return the median of each coordinate of (K, D)."""
    found: Float64 = np.median(updates, axis=0)
    return found


def trimmed_mean(updates: Float64, f: int) -> Float64:
    """Return the mean of each coordinate of (K, D) without its f smallest and f largest values; K > 2f."""
    mean: Float64 = np.sort(updates, axis=0)[f : len(updates) - f].mean(axis=0)
    return mean


def krum_scores(updates: Float64, f: int) -> tuple[Float64, Float64]:
    """Return for each of K updates the sum of its K - f - 2 smallest squared distances to others, and of all of them.

    Distances are summed over differences. From a matrix of products they would lose their digits where all updates are
    long and close together.
    """
    from scipy.spatial.distance import pdist, squareform  # slow to import, and every client imports this module

    with np.errstate(over="ignore"):
        distances = squareform(pdist(updates, "sqeuclidean"))
    nearest = np.sort(distances, axis=1)[:, 1 : len(updates) - f - 1]  # the first is the distance 0 to itself
    return nearest.sum(axis=1), distances.sum(axis=1)


def _by_score(updates: Float64, f: int) -> npt.NDArray[np.intp]:
    """Return the rows, best first. Two that are nearest to each other can tie: then all distances together decide."""
    scores, all_distances = krum_scores(updates, f)
    return np.lexsort((all_distances, scores))


def krum(updates: Float64, f: int) -> Float64:
    """Return the one update with the least score; K >= 2f + 3."""
    best: Float64 = updates[_by_score(updates, f)[0]]
    return best


def multikrum(updates: Float64, f: int) -> npt.NDArray[np.intp]:
    """Return which K - f updates have the least scores, in ascending order; K >= 2f + 3."""
    return np.sort(_by_score(updates, f)[: len(updates) - f])


def geometric_median(updates: Float64, weights: Array) -> Float64:
    """Return the point with the least sum of weighted distances to (K, D), by Weiszfeld's steps.

    They begin at the update with the least sum. A step from an update follows Vardi and Zhang (2000, "The multivariate
    L1-median and associated data depth"): the weight that lies there opposes the pull of all others, and the centre
    stays if it is not less than their pull.

    Parameters
    ----------
    weights : (K,), not negative, not all zero.
    """
    from scipy.spatial.distance import pdist, squareform  # slow to import, and every client imports this module

    with np.errstate(over="ignore"):
        apart = np.minimum(squareform(pdist(updates)), FARTHEST)
    centre: Float64 = updates[np.argmin(apart @ weights)]
    for _ in range(STEPS):
        distances = norms_of(updates - centre)
        here = distances < NEAREST
        pull = np.where(here, 0.0, weights / np.maximum(distances, NEAREST))
        held = weights[here].sum()
        if not pull.any():
            break
        mean = pull @ updates / pull.sum()
        force = pull.sum() * float(np.linalg.norm(mean - centre))
        if force <= held:
            break
        new = held / force * centre + (1 - held / force) * mean
        if np.array_equal(new, centre):
            break
        centre = new
    return centre


# Composition --------------------------------------------------------------------------------------


def parsed(text: str) -> tuple[str, ...]:
    """Return the rules in "norm+trimmed"; none for "none".

    Raises
    ------
    ValueError
        Unknown or repeated rules, or one that leaves nothing for the next; the message names them.
    """
    if text == "none":
        return ()
    rules = tuple(part.strip() for part in text.split("+"))
    if rules == (OWN_RULE,):
        return rules
    for rule in rules:
        if rule == OWN_RULE:
            raise ValueError(f"'{OWN_RULE}' stands alone")
        if rule not in RULES:
            raise ValueError(f"unknown rule '{rule}': choose from none, {', '.join(RULES)}, {OWN_RULE}")
        if rules.count(rule) > 1:
            raise ValueError(f"'{rule}' is given twice")
    for rule in rules[:-1]:
        if rule in ENDS:
            raise ValueError(f"'{rule}' makes one update of all, so it must come last")
    return rules


def needed(rules: Sequence[str], f: int) -> int:
    """Return the least number of updates for which the rules hold against f malicious clients."""
    least, gone = 1, 0
    for rule in rules:
        least = max(least, gone + (2 * f + 3 if rule in ("krum", "multikrum") else 2 * f + 1))
        gone += f if rule == "multikrum" else 0
    return least


def fitting(rules: tuple[str, ...], f: int, senders: int) -> tuple[str, ...]:
    """Return the rules for a class or cluster of that many senders.

    These are the rules themselves where they hold. Else it is the median, which needs no f. Below `FEW` senders there
    is not a vote, and updates are only bounded.
    """
    if not rules or senders >= needed(rules, f):
        return rules
    return ("median",) if senders >= FEW and rules != BOUNDS else BOUNDS


def combined(updates: Float64, weights: Array, rules: Sequence[str], f: int) -> Float64:
    """Return one update (D,) made of K.

    Parameters
    ----------
    updates : (K, D).
    weights : (K,) of the clients in a mean and in the geometric median.
    rules, f : see `parsed` and `needed`; K must be large enough.
    """
    u, w = updates, np.asarray(weights, dtype=np.float64)
    for rule in rules:
        if rule == "norm":
            u = bounded(u)
        elif rule == "multikrum":
            u = u[multikrum(u, f)]
            w = np.ones(len(u))
        elif rule == "median":
            return coordinate_median(u)
        elif rule == "trimmed":
            return trimmed_mean(u, f)
        elif rule == "krum":
            return krum(u, f)
        elif rule == "geomedian":
            return geometric_median(u, w)
        else:
            raise ValueError(f"'{rule}' is not a rule for averages")
    mean: Float64 = w @ u / w.sum()
    return mean


UNGUARDED = RobustnessSettings(robust_f=0, count_cap=0, max_growth=0)
"""Plain averages of replies without limits."""


def count_limit(counts: Sequence[float], cap: float) -> int | None:
    """Return the cap on reported sample counts; None without one."""
    return max(1, int(cap * lower_median(counts))) if cap and len(counts) else None


def mean_of(previous: Mapping[str, Array], guard: RobustnessSettings) -> RunningMean | RobustMean:
    """Return an empty mean of replies to `previous`; without rules it takes them one by one and keeps none."""
    return RobustMean(previous, guard.averages, guard.robust_f) if guard.averages else RunningMean()


class RobustMean:
    """A `RunningMean` that a few malicious clients cannot control: it keeps all models and combines them in the end.

    Memory: K models as they came, and their updates in float64.

    Parameters
    ----------
    previous : what was sent, by name.
    rules, f : as in `combined`. For too few models `fitting` decides, and `used` says what was done.
    """

    def __init__(self, previous: Mapping[str, Array], rules: tuple[str, ...], f: int) -> None:
        self.previous, self.rules, self.f = previous, rules, f
        self.used = rules
        self._models: list[dict[str, Array]] = []
        self._weights: list[float] = []

    @property
    def replies(self) -> int:
        """Number of models added so far."""
        return len(self._models)

    def add(self, arrays: Mapping[str, Array], weight: float) -> None:
        """Add one model with its weight, as in `RunningMean`; other arrays than those sent are refused."""
        missing = sorted(set(self.previous) ^ set(arrays))
        if missing:
            raise ValueError(f"a model has other arrays than were sent: {', '.join(missing[:5])}")
        self._models.append(dict(arrays))
        self._weights.append(float(weight))

    def add_many(self, replies: Iterable[tuple[Mapping[str, Array], float]]) -> None:
        """Add several models."""
        for arrays, weight in replies:
            self.add(arrays, weight)

    def mean(self) -> dict[str, Array]:
        """Return what was sent plus the combined update, float32 (float64 where that was sent)."""
        if not self._models:
            raise ValueError("no model was added: there is no mean")
        sizes = [np.size(a) for a in self.previous.values()]
        updates = np.empty((len(self._models), sum(sizes)))
        for row, model in zip(updates, self._models):
            start = 0
            for (name, sent), size in zip(self.previous.items(), sizes):
                np.subtract(model[name], sent, out=row[start : start + size].reshape(np.shape(sent)), dtype=np.float64)
                start += size
        self.used = fitting(self.rules, self.f, len(updates))
        step = combined(updates, np.array(self._weights), self.used, self.f)
        ends = np.cumsum(sizes)
        result = {}
        for (name, sent), size, end in zip(self.previous.items(), sizes, ends):
            new = np.asarray(sent, dtype=np.float64) + step[end - size : end].reshape(np.shape(sent))
            result[name] = new.astype(np.result_type(sent, np.float32))
        return result


def weaker(means: Mapping[int, RunningMean | RobustMean]) -> dict[int, str]:
    """Return what took the place of the rules where a cluster had too few senders, after its mean was read."""
    robust = {c: m for c, m in means.items() if isinstance(m, RobustMean) and m.replies}
    return {c: "+".join(m.used) for c, m in robust.items() if m.used != m.rules}


# Vectors of single classes ------------------------------------------------------------------------


def class_means(
    replies: Iterable[tuple[Array, Array, Array]], previous: Array, robust: RobustnessSettings
) -> tuple[Float64, npt.NDArray[np.bool_], dict[int, str]]:
    """Return a robust mean of the vectors that clients sent for single classes.

    Parameters
    ----------
    replies : of each client the classes (S,), one vector each (S, d), and their weights (S,).
    previous : (C, d), from which changes are measured.
    robust : its `count_cap` bounds weights by the class's median.

    Returns
    -------
    Means (C, d) float64, as before where no client sent the class; which classes somebody sent, (C,); and what took the
    rule's place, by class, where it has too few senders.
    """
    rows: dict[int, list[tuple[Float64, float]]] = {}
    for labels, vectors, weights in replies:
        for c, vector, weight in zip(labels.tolist(), vectors.astype(np.float64), np.asarray(weights).tolist()):
            rows.setdefault(c, []).append((vector, float(weight)))
    base = np.asarray(previous, dtype=np.float64)
    values, sent, weaker = base.copy(), np.zeros(len(base), dtype=np.bool_), dict[int, str]()
    for c, given in sorted(rows.items()):
        rules = fitting(robust.averages, robust.robust_f, len(given))
        if rules != robust.averages:
            weaker[c] = "+".join(rules)
        weights = capped([w for _, w in given], robust.count_cap)
        values[c] += combined(np.stack([v for v, _ in given]) - base[c], weights, rules, robust.robust_f)
        sent[c] = True
    return values, sent, weaker


# Bounds that rules share ---------------------------------------------------------------------------


def screened(rows: Float64, factor: float = FAR) -> npt.NDArray[np.bool_]:
    """Return which of (S, d) lie no farther from their coordinate median than `factor` times the median distance.

    All of them for fewer than `FEW` rows.
    """
    if len(rows) < FEW:
        return np.ones(len(rows), dtype=np.bool_)
    distances = norms_of(rows - coordinate_median(rows))
    near: npt.NDArray[np.bool_] = distances <= factor * lower_median(distances)
    return near


def places_of(labels: Iterable[Array]) -> dict[int, list[tuple[int, int]]]:
    """Return for each class its places (k, i) in the labels (S,) of all clients: row i of client k."""
    found: dict[int, list[tuple[int, int]]] = {}
    for k, of in enumerate(labels):
        for i, c in enumerate(of.tolist()):
            found.setdefault(c, []).append((k, i))
    return found


def change(new: Mapping[str, Array], old: Mapping[str, Array]) -> Float64:
    """Return the difference of two models as one vector (D,), in the order of the arrays of `new`."""
    return np.concatenate([np.subtract(a, old[n], dtype=np.float64).ravel() for n, a in new.items()])


def changes_bounded(new: Sequence[Mapping[str, Array]], sent: Sequence[Mapping[str, Array]]) -> list[Arrays]:
    """Return models, K of them, whose changes from what was sent are no longer than the median change."""
    result: list[Arrays] = []
    for model, start, moved in zip(new, sent, bounded(np.stack(list(map(change, new, sent))))):
        parts = np.split(moved, np.cumsum([np.size(a) for a in model.values()])[:-1])
        result.append({n: (start[n] + part.reshape(np.shape(a))).astype(np.asarray(a).dtype)
                       for (n, a), part in zip(model.items(), parts)})  # fmt: skip
    return result


def capped_statistics(answers: Sequence[Mapping[str, Array]], factor: float) -> list[Arrays]:
    """Return CCVR's statistics of all clients, none of more samples than `factor` times their `lower_median`.

    Counts of a client with more are scaled down, and sums with them; each class keeps one sample. A factor of 0 changes
    none.

    Parameters
    ----------
    answers : of each client, as from `fedapp.core.gaussian.to_arrays`; of the mode ``sums`` some arrays are enough.
    """
    found = [dict(arrays) for arrays in answers]
    totals = [float(arrays["count"].astype(np.float64).sum()) for arrays in found]
    for arrays, total, most in zip(found, totals, believed(totals, factor).tolist(), strict=True):
        counts = arrays["count"].astype(np.float64)
        classes = np.count_nonzero(counts)
        if max(most, classes) < total:
            share = max(0.0, most - classes) / (total - classes)
            arrays["count"] = np.where(counts > 0, 1 + np.floor((counts - 1) * share), 0).astype(np.int64)
            for name in {"sum", "square"} & set(arrays):
                arrays[name] = arrays[name] * (arrays["count"] / np.maximum(counts, 1))[:, None]
    return found
