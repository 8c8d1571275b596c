"""The rule of CCVR: statistics that are out of line are bounded or left out, and each client's effect is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import lower_median
from fedapp.core.gaussian import ClassMoments
from fedapp.core.names import under
from fedapp.core.robust import FAR, FEW, capped, change, norms_of, places_of, screened
from fedapp.method import Arrays, Reply, ServerContext, ServerState
from fedapp.reduce.plain import PlainMoments
from fedapp.reduce.spec import Gaussians

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
COUNT, TRACE = 4.0, 4.0
"""Largest count and trace as multiples of the class's median."""


class ScreenedMoments(PlainMoments):
    """Gaussians of all clients, screened class by class and then pooled."""

    def __init__(self, spec: Gaussians, context: ServerContext, state: ServerState) -> None:
        super().__init__(spec, context, state)
        self._answers: dict[int, Arrays] = {}
        self._screened: dict[str, int] = {}

    def add(self, reply: Reply) -> None:
        """Keep the statistics of a reply."""
        self._answers[reply.client] = under(self.spec.prefix, reply.arrays)

    def result(self) -> ClassMoments:
        """Return the pooled Gaussians that are left."""
        kept, self._screened = screened_statistics(list(self._answers.values()))
        self._answers = dict(zip(self._answers, kept, strict=True))
        return self._pooled(kept)

    def audit(self, fit: Callable[[ClassMoments], Arrays], whole: Arrays) -> dict[str, Any]:
        """Repeat the fit of the head without each client; name a move longer than `FAR` times the median one."""
        clients = list(self._answers) if len(self._answers) >= FEW else []
        without = [fit(self._pooled(a for c, a in self._answers.items() if c != client)) for client in clients]
        far = {c: round(float(p), 2) for c, p in zip(clients, pulls(without, whole), strict=True) if p > FAR}
        for client, pull in far.items():
            self.context.warn(
                f"without the statistics of client {client} the calibrated head moves {pull:g} times as far as without "
                "those of the median client: it is malicious, or holds classes that few other clients have"
            )
        return {"screened": {**self._screened, "pulls": far}}

    def _pooled(self, answers: Iterable[Arrays]) -> ClassMoments:
        pool = self._empty()
        for arrays in answers:
            pool.add(arrays)
        return pool.moments()


def pulls(without: Sequence[Mapping[str, Array]], model: Mapping[str, Array]) -> Float64:
    """Return how far a model moves without each of K clients, as multiples of the median move, (K,).

    All zero for fewer than `FEW` clients, and where most of them move nothing.

    Parameters
    ----------
    without : the model as it is without client k, by name of its arrays.   model : with all of them.
    """
    moves = norms_of(np.stack([change(model, m) for m in without])) if without else np.zeros(0)
    typical = float(np.median(moves)) if len(moves) >= FEW else 0.0
    return moves / typical if typical > 0 else np.zeros(len(moves))


def _traces(arrays: Mapping[str, Array]) -> Float64:
    """Return the trace of every covariance of a CCVR answer, (S,), or (1,) where there is one for all classes."""
    width = arrays["mean"].shape[1]
    if "factor" in arrays:
        factor = np.square(arrays["factor"].astype(np.float64)).sum(axis=(1, 2))
        return np.asarray(factor + arrays["rest"].astype(np.float64).sum(axis=1))
    cov = np.atleast_2d(arrays["cov"].astype(np.float64))
    if cov.shape[1] == width:
        return np.asarray(cov.sum(axis=1))
    steps = np.arange(width)
    return np.asarray(cov[:, steps * width - steps * (steps - 1) // 2].sum(axis=1))  # the diagonal of packed triangles


def screened_statistics(answers: Sequence[Mapping[str, Array]]) -> tuple[list[Arrays], dict[str, int]]:
    """Return CCVR's statistics of all clients, with outliers bounded or left out.

    Class by class over its senders: a count is at most `COUNT` times the median count, a mean farther from the
    coordinate median than `FAR` times the median distance is left out with its class, and a covariance is scaled down
    to `TRACE` times the median trace.

    Parameters
    ----------
    answers : of each client, as from `fedapp.core.gaussian.to_arrays` in any mode but ``sums``.

    Returns
    -------
    The statistics, and how many counts were `capped`, class statistics `left_out` and covariances `scaled`.
    """
    found = [dict(arrays) for arrays in answers]
    for arrays in found:
        arrays["count"] = arrays["count"].astype(np.int64)
    kept = [np.ones(len(arrays["ids"]), dtype=np.bool_) for arrays in found]
    capped_counts = 0
    for of in places_of(arrays["ids"] for arrays in found).values():
        counts = np.array([found[k]["count"][i] for k, i in of])
        short = np.maximum(capped(counts, COUNT).astype(np.int64), 1)
        capped_counts += int((short < counts).sum())
        near = screened(np.stack([found[k]["mean"][i].astype(np.float64) for k, i in of]))
        for (k, i), count, good in zip(of, short, near):
            found[k]["count"][i], kept[k][i] = count, good
    for arrays, rows in zip(found, kept):
        of_classes = ("cov",) if np.ndim(arrays.get("cov", 0)) == 2 else ()
        for name in ("ids", "count", "mean", "factor", "rest", *of_classes):
            if name in arrays:
                arrays[name] = arrays[name][rows]
    return found, {
        "capped": capped_counts,
        "left_out": int(sum((~rows).sum() for rows in kept)),
        "scaled": scale_covariances(found),
    }


def scale_covariances(found: Sequence[Arrays]) -> int:
    """Scale covariances down, in the dicts themselves; return how many. One sample has none, so it has no vote."""
    traces: dict[int, list[tuple[int, int, float]]] = {}
    for k, arrays in enumerate(found):
        common = "factor" not in arrays and arrays["cov"].ndim == 1
        several = arrays["count"].sum() > len(arrays["ids"]) if common else arrays["count"] > 1
        for i, (trace, votes) in enumerate(zip(_traces(arrays), np.atleast_1d(several))):
            if votes:
                traces.setdefault(-1 if common else int(arrays["ids"][i]), []).append((k, i, float(trace)))
    scaled = 0
    for of in traces.values():
        limit = TRACE * lower_median([trace for _, _, trace in of])
        for k, i, trace in of:
            if trace <= limit:
                continue
            scaled += 1
            for name, share in (("cov", limit / trace), ("factor", (limit / trace) ** 0.5), ("rest", limit / trace)):
                if name in found[k]:
                    wide = found[k][name].astype(np.float64)
                    if wide.ndim == 1:
                        wide *= share
                    else:
                        wide[i] *= share
                    found[k][name] = wide.astype(found[k][name].dtype)
    return scaled
