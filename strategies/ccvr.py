"""CCVR. Luo, Chen, Hu, Zhang, Liang, Feng, No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data, NeurIPS 2021.

| symbol (paper)        | here                                                                     |
|-----------------------|--------------------------------------------------------------------------|
| w = (theta, phi)      | `self.trained(state)`, the base method's model after the last round      |
| N_c, mu_c, Sigma_c    | `pooled.counts`, `pooled.means`, `pooled.cov(c)`                         |
| M_c, G_c              | `draws(...)[c]`, the rows of `z` with label c                            |
| phi~                  | `state["ccvr"]["head"]`                                                  |

1. Any base method with one global model trains as it always does.
2. One question to all clients: N_ck, mu_ck, Sigma_ck of every class (Eq. 2; `clients/ccvr.py`).
3. Eq. 3 and 4, exactly and in float64, as centred sums of positive semidefinite terms:
       mu_c = sum_k N_ck/N_c mu_ck
       (N_c - 1) Sigma_c = sum_k (N_ck - 1) Sigma_ck + sum_k N_ck (mu_ck - mu_c)(mu_ck - mu_c)^T.
4. Algorithm 1: G_c = M_c draws from N(mu_c, Sigma_c).
5. phi~ = argmin over phi of the mean cross-entropy on the union of the G_c, by SGD from the trained phi; theta stays.

The state keeps the base's model as it was trained, and the calibrated head beside it: calibrating twice, or training on
after a calibration, starts from the trained model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from clients.ccvr import FEATURES, STATISTICS, CCVRClient, CCVRHParams, logits
from fedapp.core import gaussian
from fedapp.core.gaussian import ClassMoments, MomentsPool
from fedapp.errors import BadRequest
from fedapp.federation import Federation
from fedapp.method import ALL, Array, Arrays, Ask, BaseHParams, Method, Payload, Reply, ServerState
from fedapp.training import batch_slices
from strategies._composition import base_hparams, leaves_one_linear_head, on
from strategies.base import Exchange, FedStrategy

BASES = ("base=fedavg", "base=fedprox", "base=fedavgm", "base=moon")
W, B = "head.weight", "head.bias"


class CCVR(FedStrategy):
    """The base method's strategy, with a calibration after its last round.

    `settings` and `base_hparams` are set where this class is added to the base's.
    """

    settings: ClassVar[CCVRHParams] = CCVRHParams()
    base_hparams: ClassVar[BaseHParams] = BaseHParams()

    def __init__(self, method: Method, hparams: Any) -> None:
        super().__init__(method, self.base_hparams)
        self.asking = ""
        self.received: float | None = None

    # ---- while the base trains -----------------------------------------------------------------------------------

    def trained(self, state: ServerState) -> Arrays:
        """Return w = (theta, phi) as the base method left it."""
        arrays = super().global_arrays(state)
        assert arrays is not None, "resolve admits only bases with one global model"
        return arrays

    def send(self, state: ServerState, round: int, client: int) -> Payload:
        """Return the base's payload; once calibrated, with phi~ in place of phi."""
        payload, entry = super().send(state, round, client), state.get("ccvr")
        if entry is None:
            return payload
        own = {n: a for n, a in payload.arrays.items() if n not in entry["head"]}
        return Payload(own, {**payload.common, **entry["head"]}, {**payload.scalars, "tukey": entry["tukey"]})

    def aggregate(self, state: ServerState, round: int, replies: Iterable[Reply]) -> ServerState:
        """Do what the base does; training goes on from the trained head, not from a calibrated one."""
        return super().aggregate(_uncalibrated(state), round, replies)

    def global_arrays(self, state: ServerState) -> Arrays:
        """Return the global model, calibrated where it is. With clsnorm its head holds phi_i / ||phi_i||, so that it is
        right for a plain linear layer too.
        """
        arrays = {**self.trained(state), **state.get("ccvr", {}).get("head", {})}
        if self.settings.clsnorm:
            norms = np.linalg.norm(arrays[W], axis=1, keepdims=True)
            arrays[W] = (arrays[W] / np.maximum(norms, 1e-12)).astype(arrays[W].dtype)
        return arrays

    # ---- after the last round ------------------------------------------------------------------------------------

    def finalize(self, state: ServerState, ask: Ask) -> ServerState:
        """Ask for statistics, draw virtual representations, re-train the head, and score before and after."""
        state = super().finalize(_uncalibrated(state), ask)
        s, seed, w = self.settings, self.context.seed, self.trained(state)
        replies, pooled = self.statistics(w, ask)
        counts = pooled.counts
        z, y, jitter = gaussian.virtual_features(pooled, draws(counts, s), seed, s.shrink)
        z = gaussian.tukey(z) if s.transform in ("sample", "sample-only") else z
        head = retrain(w, z, y, s, lambda epoch: self.context.rng("ccvr-order", epoch))
        entry: ServerState = {"head": head, "tukey": s.transforms_input}
        calibrated = {**state, "ccvr": entry}
        entry["calibration"] = {
            "before": self.score(state),
            "after": self.score(calibrated),
            "score": "global",
            "received_before": _mean_accuracy(r.metrics for r in replies),
            "deployable": True,
            "clients": len(replies),
            "samples": int(counts.sum()),
            "samples_left_out": sum(r.num_samples for r in replies) - int(counts.sum()),
            "virtual_samples": len(y),
            "classes_unseen": np.flatnonzero(counts == 0).tolist(),
            "classes_single": np.flatnonzero(counts == 1).tolist(),
            "jitter": {int(c): float(j) for c, j in jitter.items()},
            "head_norm_ratio": [_norm_ratio(h[W][counts > 0]) for h in (w, head)],
        }
        if s.oracle:
            z, y = self.real(w, ask)
            best = retrain(w, z, y, s, lambda epoch: self.context.rng("ccvr-oracle-order", epoch))
            entry["calibration"] |= {
                "oracle": self.score({**state, "ccvr": {**entry, "head": best}}),
                "oracle_samples": len(y),
                "oracle_deployable": False,
            }
        return calibrated

    def statistics(self, w: Arrays, ask: Ask) -> tuple[list[Reply], ClassMoments]:
        """Ask for N_ck, mu_ck, Sigma_ck and pool them (Eq. 3 and 4).

        Where cov is sums, two questions: N and S1 give mu_c; then sums around mu_c, in which nothing is left to cancel.
        The server needs only their totals over clients; whoever answers the second question decides the result alone.
        """
        c, d, mode = self.context.num_classes, self.context.width, self.settings.cov
        if mode != "sums":
            pool = MomentsPool(c, d, mode)
            replies = self.ask(ask, "statistics", Payload(common=w))
            for reply in replies:
                pool.add(_answered(reply, STATISTICS))
            return replies, pool.moments()
        first = _total(self.ask(ask, "totals", Payload(common=w)))
        centres = first["sum"] / np.maximum(first["count"], 1)[:, None]
        replies = self.ask(ask, "statistics", Payload(common={**w, STATISTICS + "centres": centres}))
        total = _total(replies)
        return replies, gaussian.from_sums(total["count"], total["sum"], total["square"], centres)

    def real(self, w: Arrays, ask: Ask) -> tuple[Array, Array]:
        """Ask for the clients' real features: all, or `oracle_samples` per class drawn uniformly over their union."""
        parts = [_answered(r, FEATURES) for r in self.ask(ask, "features", Payload(common=w))]
        z, y = (np.concatenate([p[name] for p in parts]) for name in ("z", "label"))
        if most := self.settings.oracle_samples:
            rng = self.context.rng("ccvr-oracle")
            rows = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:most] for c in np.unique(y)])
            z, y = z[rows], y[rows]
        return z, y

    def ask(self, ask: Ask, kind: str, payload: Payload) -> list[Reply]:
        """Ask all clients; `check` knows what the answers must be."""
        self.asking = kind
        try:
            return ask(kind, payload)
        finally:
            self.asking = ""

    def check(self, reply: Reply) -> str | None:
        """Say what is wrong with an answer; everything else is checked by the base method."""
        c, d, kind = self.context.num_classes, self.context.width, self.asking
        prefix = {"statistics": STATISTICS, "totals": STATISTICS, "features": FEATURES}.get(kind, "")
        bad = () if prefix else (STATISTICS, FEATURES)
        foreign = [n for n in reply.arrays if not n.startswith(prefix) or n.startswith(bad)]
        if foreign:
            return f"'{foreign[0]}' was not asked for"
        arrays = _answered(reply, prefix)
        if not prefix:
            return super().check(reply)
        if kind == "features":
            return _check_features(arrays, c, d)
        if kind == "totals":
            arrays["square"] = np.zeros((c, d * (d + 1) // 2))
        try:
            MomentsPool(c, d, self.settings.cov).check(arrays)
        except ValueError as e:
            return str(e)
        if arrays["count"].sum() > reply.num_samples:
            return f"statistics of {arrays['count'].sum()} samples from a client of {reply.num_samples}"
        return None

    def score(self, state: ServerState) -> float | None:
        """Return the accuracy of the global model on the central test set, or None where there is none."""
        return self.context.score(self.global_arrays(state), {"tukey": bool(state.get("ccvr", {}).get("tukey"))})

    def _evaluate(
        self, federation: Federation, state: ServerState, round: int, kind: str, control: Mapping[str, Any]
    ) -> Exchange:
        """Keep the final `received` score: it stands for `global` where there is no central test set."""
        exchange = super()._evaluate(federation, state, round, kind, control)
        if kind == "final":
            self.received = _mean_accuracy(exchange.metrics.values())
        return exchange

    def report(self, state: ServerState) -> dict[str, Any]:
        """Return `calibration` with the accuracy before and after, and the score that says so."""
        found = dict(state.get("ccvr", {}).get("calibration", {}))
        before = found.pop("received_before", None)
        if found and found["after"] is None:
            found |= {"before": before, "after": self.received, "score": "received, mean over clients"}
        return {**super().report(state), "calibration": found}


def retrain(
    head: Mapping[str, Array], z: Array, y: Array, settings: CCVRHParams, rng: Callable[[int], np.random.Generator]
) -> Arrays:
    """Re-train the head by SGD on the mean cross-entropy of (z, y), from its present values.

    Parameters
    ----------
    head : `head.weight` (C, d) and `head.bias` (C,), float32.
    z : (n, d) representations.   y : (n,) labels.
    rng : generator of the order of epoch e.

    Returns
    -------
    New float32 arrays. Rows of classes without a sample are left as they were, bit for bit: their logits are no part of
    the loss, so that nothing pushes them down.
    """
    seen = np.unique(y)
    weight, bias = (torch.tensor(head[n][seen], dtype=torch.float32, requires_grad=True) for n in (W, B))
    inputs = torch.from_numpy(np.asarray(z, dtype=np.float32))
    labels = torch.from_numpy(np.searchsorted(seen, y).astype(np.int64))
    trained = [weight] if settings.clsnorm else [weight, bias]
    optimizer = torch.optim.SGD(trained, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    slices = batch_slices(len(y), settings.batch)
    for epoch in range(settings.epochs):
        order = torch.from_numpy(rng(epoch).permutation(len(y)))
        for part in slices:
            rows = order[part]
            loss = F.cross_entropy(logits(inputs[rows], weight, bias, settings.clsnorm), labels[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    new = {n: np.array(head[n], dtype=np.float32) for n in (W, B)}
    new[W][seen], new[B][seen] = weight.detach().numpy(), bias.detach().numpy()
    return new


def draws(counts: Array, settings: CCVRHParams) -> Array:
    """Return M_c, (C,) int64: equal for all classes seen, or as N_c / |D| with the same sum (and at least 1)."""
    seen = counts > 0
    if settings.mc_mode == "fixed":
        return np.where(seen, settings.samples, 0)
    share = counts / max(1, counts.sum())
    return np.where(seen, np.maximum(1, np.rint(settings.samples * seen.sum() * share)), 0).astype(np.int64)


def _uncalibrated(state: ServerState) -> ServerState:
    return {name: value for name, value in state.items() if name != "ccvr"}


def _answered(reply: Reply, prefix: str) -> Arrays:
    return {n.removeprefix(prefix): a for n, a in reply.arrays.items() if n.startswith(prefix)}


def _total(replies: Iterable[Reply]) -> Arrays:
    """Add the answers up, name by name, in the order of the client ids."""
    total: Arrays = {}
    for reply in replies:
        for name, array in _answered(reply, STATISTICS).items():
            total[name] = total[name] + array if name in total else array
    return total


def _check_features(arrays: Arrays, num_classes: int, width: int) -> str | None:
    z, y = arrays.get("z"), arrays.get("label")
    if z is None or y is None or z.shape != (len(y), width) or not np.issubdtype(y.dtype, np.integer):
        return f"features must be z (n, {width}) and integer labels (n,)"
    if len(y) and not 0 <= y.min() <= y.max() < num_classes:
        return f"labels must lie in 0..{num_classes - 1}"
    return None


def _mean_accuracy(metrics: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over clients of the accuracy of what they received, on their own test splits; None where nobody has any."""
    shares = [m["received-correct"] / m["received-total"] for m in metrics if m.get("received-total")]
    return float(np.mean(shares)) if shares else None


def _norm_ratio(weight: Array) -> float | None:
    """Largest over smallest norm of the rows of a head: 1 where no class is favoured by its norm."""
    norms = np.linalg.norm(weight, axis=1)
    return float(norms.max() / norms.min()) if norms.size and norms.min() > 0 else None


# ---- composition -----------------------------------------------------------------------------------------------------


def resolve(hparams: CCVRHParams, lookup: Callable[[str], Method]) -> Method:
    """Return the base method with statistics and calibration added; the same classes for the same arguments.

    Raises
    ------
    BadRequest : the base is unknown, cannot be calibrated, or does not take its arguments.
    """
    base = lookup(hparams.base)
    inner = base_hparams(base, hparams.base_args)
    if not leaves_one_linear_head(base, inner):
        raise BadRequest(
            f"ccvr calibrates the linear head of one global model, and {base.id} does not leave one: "
            f"take {', '.join(BASES[:-1])} or {BASES[-1]}"
        )
    return dataclasses.replace(
        METHOD,
        title=f"CCVR after {base.title}",
        strategy=on(CCVR, base.strategy, hparams, inner),
        client=on(CCVRClient, base.client, hparams, inner),
        shared=base.shared_prefixes(inner),
        up=base.up,
        extra_up=(*base.extra_up, STATISTICS, *((FEATURES,) if hparams.oracle else ())),
        same_width=base.same_width,
        defaults=base.defaults,
        queries=(*base.queries, *METHOD.queries),
        resolve=None,
        warn=functools.partial(_warn, base, inner),
    )


def _warn(base: Method, inner: BaseHParams, hparams: CCVRHParams, optimizer: str) -> str | None:
    found = [base.warn(inner, optimizer) if base.warn else None]
    found.append("oracle=true collects the clients' real features: for comparison only" if hparams.oracle else None)
    return "; ".join(text for text in found if text) or None


METHOD = Method(
    id="ccvr",
    title="CCVR",
    paper="Luo et al., NeurIPS 2021",
    strategy=CCVR,
    client=CCVRClient,
    hparams=CCVRHParams,
    shared=ALL,
    extra_up=(STATISTICS, FEATURES),
    global_model=True,
    travels="what the base method shares; once, count, mean and covariance of every class",
    queries=("statistics", "totals", "features"),
    resolve=resolve,
)
