"""Heads in closed form from sums of features, server side: FedNCM, Fed3R, LDA, FedCOF.

1. Any base method with one global model trains as it always does; with `base=none` the model stays as it is given.
2. One query to all clients for b_k (C, d + 1) and, where the head needs it, A_k (`clients/sums.py`).
3. A = sum_k A_k, b = sum_k b_k, in float64; a method makes a head of them (`rows`).
4. One factor for all logits (`scale`), which changes no prediction. With `scale=fit` a second query gives the sums over
   clients of the head's losses for a list of factors.
5. With `personal` the class shares q of all clients go out with the head, and each client fits its bias to its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from clients.shares import NUMBERS, PRIOR, shares
from clients.sums import SMOOTH, STRENGTH, SUMS, OwnShares, SumsClient, SumsHParams
from fedapp.core import sums
from fedapp.core.sums import Float64
from fedapp.errors import Impossible
from fedapp.method import Arrays, BaseHParams, Method, Payload, ServerContext, ServerState
from fedapp.reduce.spec import Query, Total, Totals
from strategies._composition import built_on, on
from strategies._shares import WithShares

W, B = "head.weight", "head.bias"


class HeadFromSums(WithShares):
    """The base method's strategy, with a head in closed form after its last round."""

    settings: ClassVar[Any] = None
    queries = ("sums", "losses")
    apart: ClassVar[bool] = False
    """Whether the head needs each client's sums, and not only their total."""

    def rows(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the head as rows (C, d + 1), weights and bias, and the summary's entries about it.

        Parameters
        ----------
        found : `sums` holds b (C, d + 1), and where the head needs them A as `a` (d + 1, d + 1) and the sum of
            |z|^2 / d as `energy` (1,). With `apart`, `parts` holds those of each client.
        """
        raise NotImplementedError

    def strength(self, scale: float) -> float:
        """Return w, the strength of the log shares of all clients in the head's logits, after their factor `scale`."""
        return 0.0

    def prior(self, entry: ServerState) -> Payload | None:
        """Return q and w, with `personal`."""
        if "shares" not in entry:
            return None
        return Payload(common={f"{PRIOR}shares": entry["shares"]}, scalars={STRENGTH: entry["strength"]})

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Query the sums, make the head, scale it, and score before and after."""
        state = super().finalize(state, query)
        w = self.trained(state)
        reduced = query("sums", Payload(common=w))
        found = reduced.totals("sums")
        counts = found.sums["b"][:, -1]
        if not counts.any():  # no class has `min_count` samples anywhere: the model stays as trained
            return self.calibrated(state, {"head": {n: w[n] for n in (W, B)}}, reduced.clients, counts)
        rows, entries = self.rows(found)
        scale = self.scale(w, rows, counts > 0, query)
        entry: ServerState = {"head": dict(zip((W, B), sums.as_head(rows, counts > 0, scale)))}
        if self.settings.personal:
            q = np.where(counts > 0, shares(counts, SMOOTH / len(counts)), 0.0)
            entry |= {"shares": q, "strength": self.strength(scale)}
            if self.settings.scale == "none":
                self.context.warn(
                    f"{self.method.id}: personal=true adds log shares to logits that no factor was fitted for, since "
                    "scale = none: one of the two may count too much. scale=fit fits it, without dp"
                )
        return self.calibrated(state, entry, reduced.clients, counts, scale=scale, **entries)

    def scale(self, w: Arrays, rows: Float64, seen: npt.NDArray[np.bool_], query: Query) -> float:
        """Return the factor for all logits: 1, as large as the trained head's, or what fits the clients' rows best."""
        if self.settings.scale == "none":
            return 1.0
        if self.settings.scale == "trained":
            own, before = np.linalg.norm(rows[seen, :-1]), np.linalg.norm(w[W][seen])
            return float(before / own) if own > 0 and before > 0 else 1.0
        head = dict(zip((W, B), sums.as_head(rows, seen)))
        losses = query("losses", Payload(common={**w, **head})).totals("losses")
        return sums.best_scale(losses.sums["loss"])


def class_sums(squares: bool, apart: bool, energy: bool) -> Total:
    """Return the sum of b_k and, with `squares`, of A_k; with `energy` of sum |z|^2 / d."""

    def arrays(context: ServerContext) -> Arrays:
        d = context.width + 1
        packed = {"a": np.zeros(d * (d + 1) // 2)} if squares else {}
        packed |= {"energy": np.zeros(1)} if energy else {}
        return {"b": np.zeros((context.num_classes, d)), **packed}

    def check(context: ServerContext, arrays: Arrays, lost: float) -> str | None:
        return sums.problem_of(arrays, context.num_classes, context.width, squares, lost, energy)

    def read(context: ServerContext, arrays: Arrays) -> Arrays:
        return {n: sums.second_moments(a, context.width) if n == "a" else a for n, a in arrays.items()}

    return Total(
        SUMS, arrays, check, lambda arrays: float(arrays["b"][:, -1].sum()), read, apart,
        moments=None if apart else "all" if squares else "none", remade=_remade, least="min_count",
    )  # fmt: skip


def _remade(count: Float64, total: Float64, square: Float64 | None) -> Arrays:
    """Return b, and A where there are second moments, of counts (C,), sums (C, d) and moments (d, d)."""
    b = np.column_stack([total, count])
    if square is None:
        return {"b": b}
    edge = b.sum(axis=0)
    return {"b": b, "a": np.vstack([np.column_stack([square, edge[:-1]]), edge])}


def _losses_problem(context: ServerContext, arrays: Arrays, lost: float) -> str | None:
    loss = arrays.get("loss")
    if set(arrays) != {"loss"} or loss is None or loss.shape != sums.SCALES.shape or loss.dtype != np.float64:
        return Impossible(f"losses must be {len(sums.SCALES)} numbers of float64")
    return None if bool((loss >= 0).all()) else "losses must be numbers that are not negative"


LOSSES = Total(SUMS, lambda context: {"loss": np.zeros(len(sums.SCALES))}, _losses_problem)
"""Sum over clients of the losses with each factor."""


def head_method(
    name: str,
    title: str,
    paper: str,
    strategy: type[HeadFromSums],
    client: type[SumsClient],
    hparams: type[SumsHParams],
    travels: str,
) -> Method:
    """Return the description of a method whose head follows from sums."""

    def resolve(hparams: SumsHParams, lookup: Callable[[str], Method]) -> Method:
        return built_on(fitted_to_shares(outer) if hparams.personal else outer, hparams, lookup)

    outer = Method(
        id=name,
        title=title,
        paper=paper,
        strategy=strategy,
        client=client,
        hparams=hparams,
        extra_up=(SUMS,),
        global_model=True,
        deploy_as="received",
        travels=travels,
        queries=HeadFromSums.queries,
        reduces=lambda hparams: {
            "query.sums": {"sums": class_sums(client.squares, strategy.apart, hparams.energy())},
            "query.losses": {"losses": LOSSES},
        },
        resolve=resolve,
    )
    return outer


def fitted_to_shares(method: Method) -> Method:
    """Return the method with clients that fit the bias of its head to their own class shares."""
    client = on(OwnShares, method.client, method.hparams(), BaseHParams())
    return dataclasses.replace(method, client=client, metrics=(*method.metrics, *NUMBERS))
