"""FedGH. Yi, Wang, Liu, Shi, Yu, FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM MM 2023.

| symbol (paper)   | here                                                                   |
|------------------|------------------------------------------------------------------------|
| theta = (W, b)   | state["model"]["head.weight"] (C, d), state["model"]["head.bias"] (C,) |
| R_k^s, s         | rows of reply.arrays["lar"], entries of reply.arrays["labels"]         |
| S^t              | the clients that replied                                               |
| eta_theta        | hparams.header_lr                                                      |

Algorithm 1, server ("train the global header"), for each client k in S^t and each of its classes s:
Eq. 4:  theta <- theta - eta_theta * grad CE(W R_k^s + b, s),  with p = softmax(W R + b):
        W <- W - eta_theta (p - e_s) R^T,   b <- b - eta_theta (p - e_s).
All LARs have the same weight: the server does not know from how many samples each was computed.

In the released code the head has no optimizer and never changes; `mode=frozen` does the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clients.fedgh import FedGHClient, FedGHHParams
from fedapp.learning.metrics import tidy
from fedapp.method import HEAD, NONE, Method, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Reduced, Rows
from strategies.base import Strategy

NOISED = "noised/"
"""Prefix of sums and counts with noise."""
LEAST = "min_class_count"
"""The hyperparameter that leaves out classes with fewer images."""
Float64 = NDArray[np.float64]
Labels = NDArray[np.int64]


class LARs(NamedTuple):
    """One client's class means `r` (S, d) with their labels `s` (S,), classes ascending."""

    r: Float64
    s: Labels


def header_step(w: Float64, b: Float64, r: Float64, s: Labels, lr: float, clip: float = 0.0) -> float:
    """Take one step of Eq. 4 in place, on the mean cross-entropy of B LARs.

    Parameters
    ----------
    w, b : (C, d) and (C,) float64, changed in place.
    r, s : (B, d) LARs and (B,) labels.
    lr : eta_theta.   clip : largest norm of the gradient of W and b together, 0 = none.

    Returns
    -------
    The loss before the step, in nats.
    """
    logits = r @ w.T + b
    logits -= logits.max(axis=1, keepdims=True)  # softmax does not change, and exp cannot overflow
    rows = np.arange(len(s))
    p = np.exp(logits)
    total = p.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) - logits[rows, s]))
    p /= total
    p[rows, s] -= 1.0  # p - e_s, the gradient with respect to the logits
    p /= len(s)
    if clip > 0:  # a smaller learning rate does the same as a shorter gradient
        norm = float(np.sqrt(((p.T @ r) ** 2).sum() + (p.sum(axis=0) ** 2).sum()))
        lr *= min(1.0, clip / max(norm, np.finfo(np.float64).tiny))
    p *= lr
    w -= p.T @ r  # Eq. 4
    b -= p.sum(axis=0)
    return loss


def batches(
    lars: Sequence[LARs], batch: str | int, rng: np.random.Generator | None
) -> Iterator[tuple[Float64, Labels]]:
    """Yield the LARs of one pass over all of them, step by step.

    Parameters
    ----------
    lars : the clients' LARs in their order.
    batch : `sample`, `client`, `all` or a number of pooled LARs.
    rng : shuffles the clients (and, for a number, the pooled LARs); None keeps the order.
    """
    if rng is not None:
        lars = [lars[i] for i in rng.permutation(len(lars))]
    if batch == "client":
        yield from lars
        return
    r, s = np.concatenate([x.r for x in lars]), np.concatenate([x.s for x in lars])
    if isinstance(batch, int) and rng is not None:
        mixed = rng.permutation(len(s))
        r, s = r[mixed], s[mixed]
    size = batch if isinstance(batch, int) else 1 if batch == "sample" else len(s)
    for start in range(0, len(s), size):
        yield r[start : start + size], s[start : start + size]


class FedGH(Strategy):
    """Trains the head on the clients' class means and broadcasts it."""

    records: ClassVar[tuple[str, ...]] = ("covered", "loss", "moved")

    def init(self, context: ServerContext) -> ServerState:
        """Return theta^0, which round 1 broadcasts, and empty records of the rounds."""
        state = super().init(context)
        covered = np.zeros((0, context.num_classes), dtype=np.bool_)
        return {**state, "covered": covered, "loss": np.zeros(0), "moved": np.zeros(0)}

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Train theta on the LARs of the clients that replied (Algorithm 1, server); without LARs it stays."""
        hparams, theta = self.hparams, state["model"]
        given = [of for of in reduced.rows("lar") if len(of.labels)]
        if hparams.order == "arrival":
            given.sort(key=lambda of: of.reply.arrival)
        answers, lars = [of.reply for of in given], [LARs(of.rows, of.labels) for of in given]
        noted = self.noticed(state, answers, lars)
        # float64: a round takes many small steps, and float32 would lose digits at each.
        w, b = (theta[name].astype(np.float64) for name in ("head.weight", "head.bias"))
        lr = 0.0 if hparams.mode == "frozen" else hparams.header_lr
        losses = []
        for epoch, shown in enumerate(self.passes(server_round, answers, lars) if lars else ()):
            rng = self.context.rng("header", server_round, epoch) if hparams.order == "shuffled" else None
            for r, s in batches(shown, hparams.header_batch, rng):
                losses.append(header_step(w, b, r, s, lr, hparams.header_clip))
        moved = np.sqrt(((w - theta["head.weight"]) ** 2).sum() + ((b - theta["head.bias"]) ** 2).sum())
        covered = np.zeros(self.context.num_classes, dtype=np.bool_)
        covered[[c for x in lars for c in x.s]] = True
        return {
            "model": {"head.weight": w.astype(np.float32), "head.bias": b.astype(np.float32)},
            "covered": np.vstack([state["covered"], covered]),
            "loss": np.append(state["loss"], np.mean(losses) if losses else np.nan),
            "moved": np.append(state["moved"], moved),
            **noted,
        }

    def noticed(self, state: ServerState, answers: Sequence[Reply], lars: Sequence[LARs]) -> ServerState:
        """Return further entries of the next state, from what `passes` gets."""
        return {}

    def passes(self, server_round: int, answers: Sequence[Reply], lars: Sequence[LARs]) -> Iterator[Sequence[LARs]]:
        """Yield what the head sees in each pass, client by client: their LARs. `answers` are the same clients'."""
        return itertools.repeat(lars, self.hparams.header_epochs)

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return per round the head's loss on the LARs, how far it moved, and the classes no client sent."""
        absent = {str(t): np.flatnonzero(~row).tolist() for t, row in enumerate(state["covered"], start=1)}
        return {
            "header_loss": [tidy(v) for v in state["loss"].tolist()],
            "header_moved": [tidy(v) for v in state["moved"].tolist()],
            "classes_absent": {t: classes for t, classes in absent.items() if classes},
        }


METHOD = Method(
    id="fedgh",
    title="FedGH",
    paper="Yi et al., ACM MM 2023",
    strategy=FedGH,
    client=FedGHClient,
    hparams=FedGHHParams,
    shared=HEAD,
    up=NONE,
    extra_up=("lar", "labels", NOISED),
    reduces={"train": {"lar": Rows("lar", noised=NOISED, least=LEAST)}},
    heterogeneous=True,
    travels="class means up, the head down",
    columns=("lar-seconds",),
)
