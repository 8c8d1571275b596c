"""How many images of each class each client gets: the papers' procedures, as functions of label counts alone.

Throughout, K is the number of clients, C the number of classes and N the number of images that are shared out. Which
procedure belongs to which paper stands in `fedapp.data.partitions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import BadRequest
from fedapp.settings import DataSettings

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
_Drawn = npt.NDArray[Any]

MAX_DRAWS = 10_000
_BLOCK_NUMBERS = 2_000_000
"""Upper bound on the numbers held at a time while redrawing (16 MB)."""


def _failure(settings: DataSettings, samples: int, smallest: int) -> BadRequest:
    """Return the error that says that no draw was good enough; `smallest` is the smallest client's best size."""
    key = "alpha" if settings.partition.startswith("dirichlet") else "classes-per-client"
    value = settings.alpha if key == "alpha" else settings.classes_per_client
    return BadRequest(
        f"partition {settings.partition!r}: no draw of {MAX_DRAWS:,} gave each of {settings.clients} clients at least "
        f"{settings.min_samples} of {samples} samples ({key} {value:g}; best draw: smallest client {smallest}): raise "
        f"{key}, or lower clients or min-samples"
    )


def _first_good(
    draw: Callable[[int], _Drawn], sizes: Int64, settings: DataSettings, counts: Callable[[_Drawn], Int64] = np.asarray
) -> _Drawn:
    """Return the first draw in which every client holds min_samples images.

    Parameters
    ----------
    draw : takes a number of draws B and returns them as an array (B, ...).
    sizes : images of each class, int64 (C,).
    counts : turns what `draw` returns into images per draw, client and class, int64 (B, K, C), all zero where a draw is
        void. By default `draw` returns these counts themselves.

    Raises
    ------
    BadRequest : if none of `MAX_DRAWS` draws is good.
    """
    # The first block is one draw, which is nearly always enough. Later ones grow, so that 10,000 draws take seconds.
    per_draw = settings.clients * len(sizes)
    done, block, smallest = 0, 1, 0
    while done < MAX_DRAWS:
        block = min(block, MAX_DRAWS - done, max(1, _BLOCK_NUMBERS // per_draw))
        drawn = draw(block)
        minima = counts(drawn).sum(axis=2).min(axis=1)
        good = np.flatnonzero(minima >= settings.min_samples)
        if good.size:
            return np.asarray(drawn[good[0]])
        smallest = max(smallest, int(minima.max()))
        done += block
        block *= 4
    raise _failure(settings, int(sizes.sum()), smallest)


def dirichlet_counts(shares: Float64, class_sizes: Int64) -> Int64:
    """Turn Dirichlet shares into images per client and class, for many draws at once.

    Classes are cut in index order. The share of a client that already holds at least N/K images is set to zero and the
    others are scaled up; the cuts are floor(cumulative share * class size), so that every image is given away.

    Parameters
    ----------
    shares : float64 (B, C, K): for each of B draws and each class a distribution over K clients.
    class_sizes : int64 (C,).

    Returns
    -------
    int64 (B, K, C). A draw that leaves no client with a positive share for some class is all zero.
    """
    draws, num_classes, clients = shares.shape
    limit = class_sizes.sum() / clients
    held = np.zeros((draws, clients), np.int64)
    counts = np.zeros((draws, clients, num_classes), np.int64)
    complete = np.ones(draws, bool)
    for label in range(num_classes):
        open_shares = np.where(held < limit, shares[:, label], 0.0)
        ends = np.cumsum(open_shares, axis=1)
        total = ends[:, -1:]
        complete &= total[:, 0] > 0
        # Dividing by the last cumulative share makes it exactly 1, so that rounding loses no image.
        ends = np.floor(ends / np.where(total > 0, total, 1.0) * class_sizes[label]).astype(np.int64)
        counts[:, :, label] = np.diff(ends, axis=1, prepend=0)
        held += counts[:, :, label]
    counts[~complete] = 0
    return counts


def dirichlet(sizes: Int64, settings: DataSettings, rng: np.random.Generator) -> Int64:
    """Return images per client and class, int64 (K, C), for class sizes (C,); see the kind `dirichlet`."""

    def draw(block: int) -> Int64:
        shares = rng.dirichlet(np.full(settings.clients, settings.alpha), (block, len(sizes)))
        # A concentration near zero can underflow to 0/0; a class without shares makes the draw void.
        return dirichlet_counts(np.nan_to_num(shares), sizes)

    return _first_good(draw, sizes, settings)


def scale_to_margins(weights: Float64, rows: Float64, columns: Float64) -> Float64:
    """Scale a positive matrix alternately until its row and column sums are the wanted ones (Sinkhorn's iteration).

    Parameters
    ----------
    weights : float64 (K, C), positive.
    rows, columns : wanted sums, float64 (K,) and (C,), of equal total.

    Returns
    -------
    float64 (K, C) with exact column sums; row sums are exact to the degree of convergence.
    """
    scaled = weights.copy()
    for _ in range(200):
        scaled *= (rows / scaled.sum(axis=1))[:, None]
        scaled *= columns / scaled.sum(axis=0)
        if np.abs(scaled.sum(axis=1) - rows).max() < 0.01:
            break
    return scaled


def round_to_total(amounts: Float64, total: int, limits: Int64 | None = None) -> Int64:
    """Round amounts down, then give one more to those with the largest remainders until the total is met.

    Parameters
    ----------
    amounts : float64 (n,), not negative.
    total : wanted sum.
    limits : int64 (n,): upper bounds; None for no bounds. With bounds the sum is as near to the total as they allow.

    Returns
    -------
    int64 (n,).
    """
    bounds = np.full(len(amounts), np.iinfo(np.int64).max) if limits is None else limits
    # An amount just below an integer is that integer: the difference is the error of floating-point arithmetic.
    whole = np.minimum(np.floor(amounts + 1e-9).astype(np.int64), bounds)
    order = np.argsort(-(amounts - np.floor(amounts + 1e-9)), kind="stable")
    missing = total - int(whole.sum())
    while missing > 0:
        room = order[whole[order] < bounds[order]][:missing]
        if not room.size:
            break
        whole[room] += 1
        missing -= room.size
    return whole


def equal_counts(weights: Float64, class_sizes: Int64) -> Int64:
    """Scale each client's shares of the classes so that all clients hold equally many images.

    Parameters
    ----------
    weights : float64 (K, C): for each client a distribution over the classes.
    class_sizes : int64 (C,).

    Returns
    -------
    int64 (K, C), column sums `class_sizes`; all zero if the scaling did not converge.
    """
    wanted = np.full(len(weights), class_sizes.sum() / len(weights))
    present = np.flatnonzero(class_sizes)
    # A share that underflows to zero could not be scaled to any margin.
    positive = np.maximum(np.nan_to_num(weights[:, present]), 1e-30)
    scaled = scale_to_margins(positive, wanted, class_sizes[present].astype(np.float64))
    counts = np.zeros(weights.shape, np.int64)
    for column, label in enumerate(present):
        counts[:, label] = round_to_total(scaled[:, column], int(class_sizes[label]))
    # Rounding each class moves a client by at most half an image per class; more means that scaling did not converge.
    converged = np.abs(counts.sum(axis=1) - wanted).max() <= max(1.0, len(present) / 2)
    return counts if converged else np.zeros_like(counts)


def dirichlet_equal(sizes: Int64, settings: DataSettings, rng: np.random.Generator) -> Int64:
    """Return images per client and class, int64 (K, C), for class sizes (C,); see the kind `dirichlet-equal`."""

    def draw(block: int) -> Int64:
        weights = rng.dirichlet(np.full(len(sizes), settings.alpha), (block, settings.clients))
        return np.stack([equal_counts(one, sizes) for one in weights])

    return _first_good(draw, sizes, settings)


def block_owners(num_classes: int, clients: int, per_client: int) -> list[Int64]:
    """Return the owners of each class in PFLlib's blocks.

    In index order a class goes to the first ceil(clients * per_client / num_classes) clients with free slots. Unless
    that division is exact, the slots are used up before the last classes, whose images then stay unused.

    The result holds for each class the ids of its owners, increasing; empty when all slots are taken.
    """
    width = -(-clients * per_client // num_classes)
    slots = np.full(clients, per_client)
    owners = []
    for _ in range(num_classes):
        chosen = np.flatnonzero(slots > 0)[:width]
        slots[chosen] -= 1
        owners.append(chosen)
    return owners


def pathological(sizes: Int64, settings: DataSettings, rng: np.random.Generator) -> Int64:
    """Return images per client and class, int64 (K, C), for class sizes (C,); see the kind `pathological`."""
    owners = block_owners(len(sizes), settings.clients, settings.classes_per_client)

    def draw(block: int) -> Int64:
        counts = np.zeros((block, settings.clients, len(sizes)), np.int64)
        for label, chosen in enumerate(owners):
            if not chosen.size:
                continue
            even = sizes[label] / len(chosen)
            # PFLlib's bounds. For tiny classes its lower one would exceed the upper one: then all get the even part.
            low = min(int(max(even / 10, settings.min_samples / len(sizes))), int(even))
            parts = rng.integers(low, max(int(even), low + 1), (block, len(chosen) - 1))
            counts[:, chosen[:-1], label] = parts
            counts[:, chosen[-1], label] = sizes[label] - parts.sum(axis=1)
        return counts

    return _first_good(draw, sizes, settings)


def choose_classes(
    num_classes: int, clients: int, per_client: int, rng: Any, *, distinct: bool = True
) -> list[list[int]]:
    """Assign classes to clients so that all classes are used about equally often (FedGH's procedure).

    There are ceil(per_client * clients / num_classes) slots per class. Client by client and slot by slot, one of the
    classes with the most free slots is picked uniformly.

    Parameters
    ----------
    per_client : picks of each client.
    rng : a numpy generator, old or new: only its ``choice`` is used.
    distinct : exclude the classes that the client owns already. With False, as in FedGH's code, a client may pick a
        class twice and then owns fewer classes than asked for.

    Returns
    -------
    Each client's classes, in the order in which they were picked.
    """
    free = np.full(num_classes, -(-per_client * clients // num_classes))
    picks: list[list[int]] = []
    for _ in range(clients):
        own: list[int] = []
        for _ in range(per_client):
            offered = free.copy()
            if distinct:
                offered[own] = -1
            label = int(rng.choice(np.flatnonzero(offered == offered.max())))
            free[label] -= 1
            own.append(label)
        picks.append(own)
    return picks


def class_shares(sizes: Int64, settings: DataSettings, rng: np.random.Generator) -> Float64:
    """Draw the classes of each client and its share of them; see the kind `classes`.

    FedGH draws the shares of all slots, so some images stay unused where slots are left over. Here shares are drawn for
    the slots that were taken. Both are the same when clients * classes_per_client is a multiple of the classes.

    Returns
    -------
    float64 (K, C): column sums 1 for the classes that some client owns, 0 for the others.
    """
    owned = np.zeros((settings.clients, len(sizes)), bool)
    for client, own in enumerate(choose_classes(len(sizes), settings.clients, settings.classes_per_client, rng)):
        owned[client, own] = True

    def draw(block: int) -> Float64:
        shares = np.where(owned, rng.uniform(0.4, 0.6, (block, *owned.shape)), 0.0)
        return np.asarray(shares / np.maximum(shares.sum(axis=1, keepdims=True), 1e-12))

    return _first_good(draw, sizes, settings, lambda shares: cut_by_shares(shares, sizes))


def cut_by_shares(shares: Float64, class_sizes: Int64) -> Int64:
    """Return images per client and class, int64 (..., K, C), as FedGH does: int(class size * share).

    Shares are float64 (..., K, C) with column sums of at most 1, class sizes int64 (C,). Rounding leaves some images
    unused.
    """
    # The tiny addition keeps a product such as 0.29 * 100 = 28.999999999999996 from losing an image.
    return np.floor(shares * class_sizes + 1e-9).astype(np.int64)


def draw_two_classes(rows_of: Sequence[Int64], each: int, rng: Any) -> tuple[list[int], list[Int64]]:
    """Draw one client of FedClassAvg's skewed setting: two distinct classes, then images of each with replacement.

    Parameters
    ----------
    rows_of : for each class the indices of its images; classes without images are never drawn.
    each : images per class.   rng : a numpy generator, old or new: only its ``choice`` is used.

    Returns
    -------
    The two classes, and for each the indices of its images, int64 (each,).
    """
    present = np.flatnonzero([len(rows) > 0 for rows in rows_of])
    classes = [int(label) for label in rng.choice(present, 2, replace=False)]
    return classes, [rng.choice(rows_of[label], each) for label in classes]
