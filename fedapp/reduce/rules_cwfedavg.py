"""The rule of cwFedAvg: changes of the class-wise layers, and the weights of clients in classes, are bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedapp.core.robust import bounded, capped, changes_bounded
from fedapp.method import Arrays, Payload, Reply
from fedapp.reduce.spec import Share

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Sent: TypeAlias = Callable[[Sequence[int]], Iterable[tuple[int, Payload]]]
"""Gives clients with the payloads of the round."""
MASS = 2.0
"""Largest class mass as a multiple of the class's median."""


def bounded_shares(
    replies: Iterable[Reply], share: Callable[[Arrays], Float64], names: Collection[str], sent: Sent
) -> Iterator[Share]:
    """Yield the replies with bounded changes and weights; all must have arrived.

    Parameters
    ----------
    names : of the class-wise arrays.
    """
    given = list(replies)
    if not given:
        return
    given = _bounded(given, names, {c: payload.all() for c, payload in sent([reply.client for reply in given])})
    counts = np.array([reply.num_samples for reply in given])
    masses = capped_masses(counts, np.stack([share(reply.arrays) for reply in given]))
    yield from map(Share, given, *masses)


def _bounded(replies: Sequence[Reply], names: Collection[str], sent: dict[int, Arrays]) -> list[Reply]:
    """Return replies whose class-wise layers changed no more than the median client's.

    In the head that holds for the row of each class by itself, with its bias. No vote is possible there: a class may be
    held by one client.
    """
    new = [dict(reply.arrays) for reply in replies]
    head = [n for n in names if n.startswith("head.")]
    if trunk := [n for n in names if n not in head]:
        parts = changes_bounded(
            [{n: r.arrays[n] for n in trunk} for r in replies], [{n: sent[r.client][n] for n in trunk} for r in replies]
        )
        new = [{**arrays, **part} for arrays, part in zip(new, parts)]
    if head:
        rows = row_bounded(
            np.stack([_rows({n: r.arrays[n] for n in head}) for r in replies]),
            np.stack([_rows({n: sent[r.client][n] for n in head}) for r in replies]),
        )
        for arrays, values in zip(new, rows):
            ends = np.cumsum([arrays[n].reshape(len(values), -1).shape[1] for n in head])[:-1]
            for n, part in zip(head, np.split(values, ends, axis=1)):
                arrays[n] = part.reshape(arrays[n].shape).astype(arrays[n].dtype)
    return [dataclasses.replace(reply, arrays=arrays) for reply, arrays in zip(replies, new)]


def _rows(head: Arrays) -> Float64:
    """Return the head's arrays side by side, (K, d + 1): one row for each class."""
    return np.concatenate([a.reshape(len(a), -1).astype(np.float64) for a in head.values()], axis=1)


def capped_masses(n: Array, p: Array) -> tuple[Float64, Float64]:
    """Return sample counts (K,) and class shares (K, C); n_k p_kj is at most `MASS` times the `lower_median`.

    That of a class is over the clients that have a share of it, so a class of one client stays as it is.
    """
    mass = np.asarray(n, dtype=np.float64)[:, None] * np.asarray(p, dtype=np.float64)
    for column in mass.T:
        held = column > 0
        column[held] = capped(column[held], MASS)
    counts = mass.sum(axis=1)
    return counts, mass / counts[:, None]


def row_bounded(new: Float64, sent: Float64) -> Float64:
    """Return cwFedAvg's heads with bounded changes: for each class, none longer than the class's median change.

    Parameters
    ----------
    new, sent : (K, C, d), row j of every client's head as it came back, and as the client had received it.
    """
    changes = new - sent
    return sent + np.stack([bounded(changes[:, j]) for j in range(changes.shape[1])], axis=1)
