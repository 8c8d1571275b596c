"""Heads in closed form from sums of features, server side: FedNCM, Fed3R, LDA, FedCOF.

1. Any base method with one global model trains as it always does; with `base=none` the model stays as it is given.
2. One query to all clients for b_k (C, d + 1) and, where the head needs it, A_k (`clients/sums.py`).
3. A = sum_k A_k, b = sum_k b_k, in float64; a method makes a head of them (`rows`).
4. One factor for all logits (`scale`), which changes no prediction. With `scale=fit` a second query gives the sums over
   clients of the head's losses for a list of factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from clients.sums import SUMS, SumsClient, SumsHParams
from fedapp.core import privacy, sums
from fedapp.core.gaussian import unpack
from fedapp.core.masks import rounding
from fedapp.core.sums import Float64
from fedapp.errors import Impossible
from fedapp.method import ALL, Arrays, Method, Payload, Query, Reply, ServerState, Sums
from fedapp.transport.secure import Released
from strategies._composition import PostHoc, built_on, of_joint

W, B = "head.weight", "head.bias"


@dataclass
class Found:
    """Sums over the clients that answered.

    Attributes
    ----------
    a : A, (d + 1, d + 1); zeros where it was not asked for.   b : (C, d + 1).
    parts : each client's b, only where the head needs them apart.
    """

    a: Float64
    b: Float64
    parts: list[Float64] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


class HeadFromSums(PostHoc):
    """The base method's strategy, with a head in closed form after its last round."""

    settings: ClassVar[Any] = None
    answers: ClassVar[Mapping[str, str]] = {"sums": SUMS, "losses": SUMS}
    apart: ClassVar[bool] = False
    """Whether the head needs each client's sums, and not only their total."""

    def rows(self, found: Found) -> tuple[Float64, dict[str, Any]]:
        """Return the head as rows (C, d + 1), weights and bias, and what the summary says of it."""
        raise NotImplementedError

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Query the sums, make the head, scale it, and score before and after."""
        state = super().finalize(state, query)
        w = self.trained(state)
        found = self.asked(w, query)
        counts = found.b[:, -1]
        if not counts.any():  # no class has `min_count` samples anywhere: the model stays as trained
            return self.calibrated(state, {"head": {n: w[n] for n in (W, B)}}, found.replies, counts)
        rows, entries = self.rows(found)
        scale = self.scale(w, rows, counts > 0, query)
        head = dict(zip((W, B), sums.as_head(rows, counts > 0, scale)))
        return self.calibrated(state, {"head": head}, found.replies, counts, scale=scale, **entries)

    def further(self, state: ServerState, kind: str) -> Arrays:
        """Return sums as one client sends them."""
        if kind == "query.losses":
            return {SUMS + "loss": np.zeros(len(sums.SCALES))}
        if kind != "query.sums":
            return super().further(state, kind)
        assert issubclass(self.method.client, SumsClient)
        d = self.context.width + 1
        squares = {SUMS + "a": np.zeros(d * (d + 1) // 2)} if self.method.client.squares else {}
        return {SUMS + "b": np.zeros((self.context.num_classes, d)), **squares}

    def asked(self, w: Arrays, query: Query) -> Found:
        """Query A_k and b_k and add them up, as they arrive if `count-cap` is off; the replies come without arrays."""
        c, d = self.context.num_classes, self.context.width
        if self.privacy is not None:
            return self.asked_noised(w, query)
        found = Found(np.zeros((d + 1, d + 1)), np.zeros((c, d + 1)))
        answers = self.answers_to(query, "sums", Payload(common=w))
        for reply, arrays in self.believed(answers, lambda of: float(of["b"][:, -1].sum())):
            found.b += arrays["b"]
            if "a" in arrays:
                found.a += sums.second_moments(arrays["a"], d)
            if self.apart:
                found.parts.append(arrays["b"])
            found.replies.append(reply)
        return found

    def asked_noised(self, w: Arrays, query: Query) -> Found:
        """Query sums with noise, add them up, and take the nearest that are possible.

        A scatter has no direction with less than the size of the noise on it: where there is only noise, less would be
        taken for knowledge.
        """
        joint = self._joint()
        totals: dict[str, Any] = {}
        replies = []
        answers = self.answers_to(query, "sums", Payload(common=w))
        for reply, arrays in self.believed(answers, joint.length):
            totals = {n: totals.get(n, 0.0) + a for n, a in arrays.items()}
            replies.append(reply)
        d = joint.width
        found = Found(np.zeros((d + 1, d + 1)), np.zeros((joint.classes, d + 1)), replies=replies)
        if not replies:
            return found
        square, floor = None, 0.0
        if "square" in totals:
            assert self.privacy is not None
            square = unpack(totals["square"], d)
            noise = self.privacy.noise * (np.sqrt(self.secure.share) if self.secure else 1.0)
            floor = joint.deviations(noise)["square"] * float(np.sqrt(sum(len(r.singles) for r in replies) * d))
        count, total, square = privacy.projected(totals["count"], totals["sum"], square, floor=floor)
        found.b[:, :-1], found.b[:, -1] = total, count
        if square is not None:
            found.a[:-1, :-1] = square
            found.a[-1] = found.a[:, -1] = found.b.sum(axis=0)
        return found

    def released(self, kind: str, template: Arrays) -> Released | None:
        """Return the joint vector of counts, sums and second moments."""
        if self.privacy is None or kind != "query.sums":
            return super().released(kind, template)
        return of_joint(self.privacy, self._joint(), SUMS)

    def _joint(self) -> privacy.Joint:
        assert issubclass(self.method.client, SumsClient)
        squares: privacy.Squares = "all" if self.method.client.squares else "none"
        return privacy.Joint(self.context.num_classes, self.context.width, squares)

    def scale(self, w: Arrays, rows: Float64, seen: npt.NDArray[np.bool_], query: Query) -> float:
        """Return the factor for all logits: 1, as large as the trained head's, or what fits the clients' rows best."""
        if self.settings.scale == "none":
            return 1.0
        if self.settings.scale == "trained":
            own, before = np.linalg.norm(rows[seen, :-1]), np.linalg.norm(w[W][seen])
            return float(before / own) if own > 0 and before > 0 else 1.0
        head = dict(zip((W, B), sums.as_head(rows, seen)))
        losses = [arrays["loss"] for _, arrays in self.answers_to(query, "losses", Payload(common={**w, **head}))]
        if self.robust.count_cap:  # a loss has no bound of its own: one client's could exclude any factor
            losses = sums.capped_losses(losses, self.robust.count_cap)
        return sums.best_scale(sum(losses, np.zeros(len(sums.SCALES))))

    def check_answer(self, kind: str, arrays: Arrays, reply: Reply) -> str | None:
        """Refuse arrays that are no sums of features, sums of more samples than the client has, and other losses."""
        if kind == "losses":
            loss = arrays.get("loss")
            if set(arrays) != {"loss"} or loss is None or loss.shape != sums.SCALES.shape or loss.dtype != np.float64:
                return Impossible(f"losses must be {len(sums.SCALES)} numbers of float64")
            return None if bool((loss >= 0).all()) else "losses must be numbers that are not negative"
        if self.privacy is not None:
            return self._joint().problem_of(arrays)
        assert issubclass(self.method.client, SumsClient)
        lost = rounding(len(reply.members))
        squares = self.method.client.squares
        problem = sums.problem_of(arrays, self.context.num_classes, self.context.width, squares, lost)
        if problem is None and arrays["b"][:, -1].sum() > reply.num_samples:
            return Impossible(f"sums of {arrays['b'][:, -1].sum():g} samples from a client of {reply.num_samples}")
        return problem


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
        return built_on(outer, hparams, lookup)

    outer = Method(
        id=name,
        title=title,
        paper=paper,
        strategy=strategy,
        client=client,
        hparams=hparams,
        shared=ALL,
        extra_up=(SUMS,),
        per_class="min_count",
        global_model=True,
        deploy_as="received",
        travels=travels,
        queries=("sums", "losses"),
        sum_only=None if strategy.apart else Sums(totals=(SUMS,)),
        guards=("count-cap",),
        private=() if strategy.apart else ("example",),
        resolve=resolve,
    )
    return outer
