"""Heads in closed form from sums of features, server side: FedNCM, Fed3R, LDA, FedCOF.

1. Any base method with one global model trains as it always does; with `base=none` the model stays as it is given.
2. One query to all clients for b_k (C, d + 1) and, where the head needs it, A_k (`clients/sums.py`).
3. A = sum_k A_k, b = sum_k b_k, in float64; a method makes a head of them (`rows`).
   Where all clients have stated the largest absolute value of a feature, the query names k, and both sums are exact.
4. One factor for all logits (`scale`), which changes no prediction. With `scale=fit` a second query gives the sums over
   clients of the head's losses for a list of factors.
5. With `choose` steps 2 to 4 come twice: first for a head by which clients choose (`clients/choice.py`).
6. With `personal` the class shares q of all clients go out with the head, and each client fits its bias to its own.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from clients.choice import CHOSEN, FIRST, FIRST_STRENGTH, KEPT, OWN_DEFAULT, Choosing
from clients.shares import NUMBERS, PRIOR
from clients.sums import STRENGTH, SUMS, OwnShares, SumsClient, SumsHParams, shares_of
from fedapp.core import sums
from fedapp.core.gaussian import unpack
from fedapp.core.names import under
from fedapp.core.sums import Float64, Real
from fedapp.errors import BadRequest, Impossible, counted
from fedapp.method import (
    Array,
    Arrays,
    BaseHParams,
    Method,
    Payload,
    Reductions,
    Reply,
    Scored,
    ServerContext,
    ServerState,
)
from fedapp.reduce.spec import Query, Reduced, Total, Totals
from strategies._composition import built_on, on
from strategies._shares import WithShares

W, B = "head.weight", "head.bias"
FEWEST_STEPS = 16
"""Steps 2^-k of the largest feature, below which features are not rounded."""
ROUGH = 1e-3
"""Rounding of features, as a multiple of their root mean square, from which on a run warns of it."""
Solution: TypeAlias = tuple[ServerState, list[Reply], Array, dict[str, Any]]
"""The repair, the replies to the query of statistics, class counts (C,), and the summary's entries."""


class ClosedForm(WithShares):
    """The base method's strategy, with a head in closed form after its last round."""

    settings: ClassVar[Any] = None

    def solve(self, w: Arrays, query: Query) -> Solution:
        """Query statistics and make a head of them.

        Parameters
        ----------
        w : the model as the base trained it.
        """
        raise NotImplementedError

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Finish as the base does, make the head, and score before and after."""
        state = super().finalize(state, query)
        entry, replies, counts, found = self.solve(self.trained(state), query)
        return self.calibrated(state, entry, replies, counts, **found)

    def entry(self, head: Arrays, counts: Array, scale: float) -> ServerState:
        """Return the repair with a head whose logits were multiplied by `scale`; with `personal` also q and w."""
        if not self.settings.personal:
            return {"head": head}
        if self.settings.scale != "fit":
            self.context.warn(
                f"{self.method.id}: personal=true adds log shares to logits that no factor was fitted for, since "
                f"scale = {self.settings.scale}: one of the two may count too much. scale=fit fits it, without dp"
            )
        return {"head": head, "shares": shares_of(counts), "strength": self.settings.strength(scale)}

    def prior(self, entry: ServerState) -> Payload | None:
        """Return q and w, with `personal`."""
        if "shares" not in entry:
            return None
        return Payload(common={f"{PRIOR}shares": entry["shares"]}, scalars={STRENGTH: entry["strength"]})


class HeadFromSums(ClosedForm):
    """A head of rows, weights and bias, from sums of features and of their products."""

    queries = ("sums", "losses", *KEPT, "choice")
    apart: ClassVar[bool] = False
    """Whether the head needs each client's sums, and not only their total."""

    def rows(self, found: Totals) -> tuple[Float64, dict[str, Any]]:
        """Return the head as rows (C, d + 1) and the summary's entries about it, see `SumsHParams.solved`."""
        solved: tuple[Float64, dict[str, Any]] = self.settings.solved(found)
        return solved

    def prior(self, entry: ServerState) -> Payload | None:
        """Return q and w, with `personal`; with `choose` also the first head with its own, and the default."""
        found = super().prior(entry)
        if found is None or "first" not in entry:
            return found
        first = _first(entry["first"])
        scalars = {**found.scalars, **first.scalars, OWN_DEFAULT: entry["gain"] > 0}
        return Payload(common={**found.common, **first.common}, scalars=scalars)

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Check a reply as the base does, and that sums which should be exact are of rounded features."""
        client = next((c for c in self.context.clients if c.client == reply.client), None)
        if client is None or reply.kind not in ("query.sums", "query.kept") or not (bits := self.exact_bits()):
            return super().check(state, reply)
        largest = client.largest or 0.0
        return sums.problem_of_rounding(under(SUMS, reply.arrays), bits, reply.num_samples, largest)

    def solve(self, w: Arrays, query: Query) -> Solution:
        """Query the sums and make a head of them; with `choose` a first head before it."""
        first: ServerState = {}
        if self.settings.choose:
            entry, *_ = self.solve_for(w, query, {kind: again for again, kind in KEPT.items()})
            if "shares" in entry:
                sent = _first(entry)
                gain = query("choice", Payload(common={**w, **sent.common}, scalars=sent.scalars)).totals("choice")
                first = {"first": entry, "gain": round(float(gain.sums["gain"][0]))}
        entry, replies, counts, found = self.solve_for(w, query, {})
        return {**entry, **first}, replies, counts, found

    def solve_for(self, w: Arrays, query: Query, names: Mapping[str, str]) -> Solution:
        """Make one head, see `solve`; `names` are those of the queries where they are for other rows."""
        bits = self.exact_bits()
        reduced = query(names.get("sums", "sums"), Payload(common=w, sum_bits=2 * bits))
        found, kept = (reduced.totals("sums"), {}) if names else self.union(reduced, bits)
        if bits and not names:
            self.warn_of_rounding(found.sums, bits)
        if "a" in found.sums and not names:
            self.warn_of_few_rows(reduced.clients)
        if self.settings.precision() is np.float32:
            sums.check_offset(found.sums["a"])
        counts = found.sums["b"][:, -1]
        if not counts.any():  # no class has `min_count` samples anywhere: the model stays as trained
            return {"head": {n: w[n] for n in (W, B)}}, reduced.clients, counts, {}
        rows, entries = self.rows(found)
        scale = self.scale(w, rows, counts > 0, query, names.get("losses", "losses"))
        head = dict(zip((W, B), sums.as_head(rows, counts > 0, scale)))
        entry = self.entry(head, counts, scale)
        if kept:
            fitted = self.context.totals["fitted"] if self.context.totals else self.settings.fitted()
            entry["totals"] = {**kept, "scale": scale, "fitted": fitted}
        if self.context.totals:
            entries |= {"clients": kept["number"], "samples_left_out": 0}
        return entry, reduced.clients, counts, {"scale": scale, **entries}

    def exact_bits(self) -> int:
        """Return the k with which sums of features are exact; 0 unless all clients state a largest feature.

        It is 0 too where features are so small that rounding to multiples of 2^-k would leave little of them.

        Raises
        ------
        BadRequest : the features are so large that too few bits behind the point are left.
        """
        clients = self.context.clients
        largest = [c.largest for c in clients if c.largest is not None]
        if stored := self.context.totals:
            return int(stored["bits"]) if len(largest) == len(clients) else 0
        if not largest or len(largest) < len(clients):
            return 0
        bits = sums.exact_bits([c.num_samples for c in clients], max(largest))
        if bits is None:
            raise BadRequest(
                f"client {clients[int(np.argmax(largest))].client} has a feature of {max(largest):g}, which leaves "
                f"fewer than {sums.LEAST_BITS} bits behind the point of features in exact sums: scale the features down"
            )
        return bits if max(largest) * 2.0**bits >= FEWEST_STEPS else 0

    def union(self, reduced: Reduced, bits: int) -> tuple[Totals, ServerState]:
        """Return the sums added to stored ones or, with `leave`, taken away from them, and the entry that is stored.

        The entry holds `sums`, k as `bits`, the largest |z|, `lost`, the most by which rounding may have changed a
        number, and of this run's `clients` a digest of the sums of each with its `salt`. It is empty where sums are not
        exact, or leave rows out.

        Raises
        ------
        BadRequest : there are stored sums, and those of this run are such; or a client that leaves had other rows.
        """
        stored = self.context.totals
        salt, told = secrets.token_hex(16), ""
        if stored:
            salt, told = stored["salt"], f"totals = '{self.settings.totals}'"
        digests = self._digests(reduced, bits, salt) if bits else {}  # before the sums, which read all replies
        found, replies = reduced.totals("sums"), reduced.clients
        left_out = sum(r.num_samples for r in replies) != found.sums["b"][:, -1].sum()
        if not bits or left_out or self.apart or self.settings.precision() is np.float32:
            if stored:
                raise BadRequest(
                    f"{told}: sums are added only where they are exact and of all rows: give features of a frozen "
                    "body, model=identity and count-cap=0"
                )
            return found, {}
        largest = max(c.largest or 0.0 for c in self.context.clients)
        entry = {"bits": bits, "salt": salt, "clients": digests}
        if not stored:
            return found, {**entry, "sums": found.sums, "largest": largest, "lost": 0.0}
        for client, (name, digest) in stored["leaving"].items():
            if digests.get(client, digest) != digest:
                raise BadRequest(f"{told}: client {name} has other training rows than those with which it joined")
        sign, largest = -1 if self.settings.leave else 1, max(largest, stored["largest"])
        whole = {name: stored["sums"][name] + sign * array for name, array in found.sums.items()}
        sizes = [max(float(np.abs(array).max()) for array in of.values()) for of in (stored["sums"], whole)]
        rows = max(float(of["b"][:, -1].sum()) for of in (stored["sums"], whole))
        rounded = stored["lost"] or not sums.exact(rows, largest, bits)
        lost = stored["lost"] + 2.0**-52 * rows * max(sizes) if rounded else 0.0
        number = len(stored["sites"]) + sign * len(digests)
        warn, name = self.context.warn, self.method.id
        warn(f"{name}: the head is of {counted(number, 'client')}, scores are of the {len(digests)} of this run alone")
        if lost:
            warn(f"{name}: the totals are not exact: rounding is up to {lost / sizes[1]:.0e} of their largest number")
        return Totals(whole, []), {**entry, "sums": whole, "largest": largest, "lost": lost, "number": number}

    def _digests(self, reduced: Reduced, bits: int, salt: str) -> dict[int, str]:
        """Return a digest of the sums of each client. Of A only where it is exact: else its last bits may vary."""
        found, clients = dict[int, str](), {c.client: c for c in self.context.clients}
        for reply in reduced:
            own, client = under(SUMS, reply.arrays), clients.get(reply.client)
            exact = client is not None and sums.exact(reply.num_samples, client.largest or 0.0, bits)
            found[reply.client] = sums.digest([own["b"], *([own["a"]] if exact and "a" in own else [])], salt)
        return found

    def warn_of_rounding(self, found: Arrays, bits: int) -> None:
        """Warn where the rounding of features to multiples of 2^-k is large, and name the client that causes it.

        A deviation of 2^-k / sqrt(12) is compared with the features' root mean square; without second moments with
        that of the class means.
        """
        b, own = found["b"], found["b"][:, -1] > 0
        square = np.trace(found["a"][:-1, :-1]) if "a" in found else (b[own, :-1] ** 2 / b[own, -1:]).sum()
        if b[own, -1].sum() * (b.shape[1] - 1) * 4.0**-bits / 12 > ROUGH**2 * square:
            most = max(self.context.clients, key=lambda c: c.largest or 0.0)
            self.context.warn(
                f"{self.method.id}: exact sums round features to multiples of {2.0**-bits:g}, which is more than "
                f"{ROUGH:g} of their root mean square, since client {most.client} states a feature of {most.largest:g}"
            )

    def scale(
        self, w: Arrays, rows: Float64, seen: npt.NDArray[np.bool_], query: Query, losses: str = "losses"
    ) -> float:
        """Return the factor for all logits: 1, as large as the trained head's, or what fits the clients' rows best."""
        if self.settings.scale == "none":
            return 1.0
        if self.settings.scale == "trained":
            own, before = np.linalg.norm(rows[seen, :-1]), np.linalg.norm(w[W][seen])
            return float(before / own) if own > 0 and before > 0 else 1.0
        if stored := self.context.totals:  # this run has the rows of few clients, or of those that leave
            own, there = self.settings.fitted(), stored["fitted"]
            if differ := [name for name, value in own.items() if name in there and there[name] != value]:
                self.context.warn(
                    f"{self.method.id}: the factor of the logits in the totals was fitted with other values of "
                    f"{', '.join(differ)}; predictions of the global head do not depend on it, those with class shares "
                    "do: run all clients once to fit it"
                )
            return float(stored["scale"])
        head = dict(zip((W, B), sums.as_head(rows, seen)))
        found = query(losses, Payload(common={**w, **head})).totals("losses")
        return sums.best_scale(found.sums["loss"])

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the entries of the head; with `choose` under `choice` for how many clients each head was better."""
        chosen = [bool(m[CHOSEN]) for m in final.values() if CHOSEN in m]
        if not chosen:
            return super().report(state, final)
        gain = state[self.method.id]["gain"]
        found = {"own": sum(chosen), "federated": len(chosen) - sum(chosen), "own_ahead": gain}
        return {**super().report(state, final), "choice": {**found, "default": "own" if gain > 0 else "federated"}}


def _first(entry: ServerState) -> Payload:
    """Return the first head, its q and its w, as clients compare it with their own."""
    arrays = {name.partition(".")[2]: array for name, array in entry["head"].items()} | {"shares": entry["shares"]}
    common = {f"{PRIOR}{FIRST}{name}": array for name, array in arrays.items()}
    return Payload(common=common, scalars={FIRST_STRENGTH: entry["strength"]})


def class_sums(squares: Real | None, apart: bool, energy: bool) -> Total:
    """Return the sum of b_k, of A_k in numbers of the type `squares` unless it is None, with `energy` of |z|^2 / d."""

    def arrays(context: ServerContext) -> Arrays:
        d = context.width + 1
        packed: Arrays = {"a": np.zeros(d * (d + 1) // 2, squares)} if squares else {}
        packed |= {"energy": np.zeros(1)} if energy else {}
        return {"b": np.zeros((context.num_classes, d)), **packed}

    def check(context: ServerContext, arrays: Arrays, lost: float) -> str | None:
        return sums.problem_of(arrays, context.num_classes, context.width, squares, lost, energy)

    def read(context: ServerContext, arrays: Arrays) -> Arrays:
        return {n: unpack(a, context.width + 1) if n == "a" else a for n, a in arrays.items()}

    return Total(
        SUMS, arrays, check, lambda arrays: float(arrays["b"][:, -1].sum()), read, apart,
        terms={"a": "products", "b": "features", "energy": "products"},
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


def _gain_problem(context: ServerContext, arrays: Arrays, lost: float) -> str | None:
    gain = arrays.get("gain")
    if set(arrays) != {"gain"} or gain is None or gain.shape != (1,) or gain.dtype != np.float64:
        return Impossible("a choice must be one number of float64")
    return None if float(gain[0]).is_integer() else "a choice must be a number of rows"


CHOICE = Total(
    SUMS, lambda context: {"gain": np.zeros(1)}, _gain_problem, lambda arrays: 2 * abs(float(arrays["gain"][0])),
    capped=False,
)  # fmt: skip
"""Sum over clients of D_k (`clients/choice.py`). At most half of a client's rows are held out, so 2 |D_k| <= n_k."""
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
        if not hparams.personal:
            return built_on(outer, hparams, lookup)
        if not hparams.choose:
            return built_on(fitted_to_shares(outer), hparams, lookup)
        queries = (*outer.queries, *KEPT, "choice")
        return built_on(
            fitted_to_shares(dataclasses.replace(outer, queries=queries), Choosing, (CHOSEN,)), hparams, lookup
        )

    def reduces(hparams: SumsHParams) -> Reductions:
        squares = hparams.precision() if client.squares else None
        of_features = class_sums(squares, strategy.apart, hparams.energy())
        found = {"sums": {"sums": of_features}, "losses": {"losses": LOSSES}}
        if hparams.choose:
            found |= {again: found[kind] for again, kind in KEPT.items()} | {"choice": {"choice": CHOICE}}
        return {f"query.{kind}": of for kind, of in found.items()}

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
        queries=("sums", "losses"),
        reduces=reduces,
        resolve=resolve,
    )
    return outer


def fitted_to_shares(method: Method, client: type[OwnShares] = OwnShares, numbers: tuple[str, ...] = ()) -> Method:
    """Return the method with clients that fit the bias of its head to their own class shares.

    Parameters
    ----------
    client : added to the method's own.   numbers : its further numbers in scores.
    """
    found = on(client, method.client, method.hparams(), BaseHParams())
    return dataclasses.replace(method, client=found, metrics=(*method.metrics, *NUMBERS, *numbers))
