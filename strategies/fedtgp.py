"""FedTGP. Zhang, Liu, Hua, Cao, FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning
for Data and Model Heterogeneity in Federated Learning, AAAI 2024.

| symbol (paper)   | here                                                                          |
|------------------|-------------------------------------------------------------------------------|
| P_i^c            | rows of reply.arrays["protos"], classes in reply.arrays["labels"]             |
| Q^c              | row c of `centres`: plain mean over the clients of the round that own c       |
| F, theta_F; P^c  | state["net"]: a vector per class, two linear layers with a ReLU between them  |
| hat P^c          | state["protos"][c] = F(P^c), where state["known"][c]                          |
| delta(t), tau    | `margin`, hparams.tau                                                         |
| phi              | Euclidean distance, not squared                                               |
| S                | hparams.server_epochs                                                         |

Server, on all class means of the round, for S epochs of shuffled mini-batches, over all classes c' ever sent:
    L = mean of -log [ exp(-(phi(P_i^c, hat P^c) + delta)) / (the same + sum_{c' != c} exp(-phi(P_i^c, hat P^c'))) ]
    delta(t) = min(max_c min_{c' != c} phi(Q^c, Q^c'), tau)
The margin is the released code's: the largest distance to the *nearest* other class. With the paper's formula, as it is
often read, it would be the largest of all distances. The released code broadcasts the net's outputs for classes that
no one has too, untrained; here such a class is neither a candidate nor sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.fedtgp import FedTGPClient, FedTGPHParams
from fedapp.core.prototypes import contrastive, margin, outputs
from fedapp.lazy import Tensor, torch
from fedapp.learning.metrics import tidy
from fedapp.learning.training import batch_slices
from fedapp.method import NONE, Method, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Reduced, Rows
from strategies.fedproto import FedProto, nearest_of, with_inference

Float64 = NDArray[np.float64]
Labels = NDArray[np.int64]


class FedTGP(FedProto):
    """Trains one prototype per class on the clients' class means and sends them."""

    records = ("margin", "loss")

    def init(self, context: ServerContext) -> ServerState:
        """Return no prototype yet, and the net as PyTorch would draw its layers."""
        state = super().init(context)
        rng, d = self.context.rng("prototypes"), context.width
        shapes = {"w1": (d, d), "b1": (d,), "w2": (d, d), "b2": (d,)} if self.hparams.network else {}
        layers = {n: rng.uniform(-1, 1, shape) / np.sqrt(d) for n, shape in shapes.items()}
        net = {"vectors": rng.standard_normal((context.num_classes, d)), **layers}
        return {**state, "net": net, "margin": np.zeros(0), "loss": np.zeros(0)}

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Train the prototypes on the class means of the round; without any they stay."""
        given = reduced.rows("protos")
        none = np.zeros((0, self.context.width))
        y = np.concatenate([np.zeros(0, np.int64), *(of.labels for of in given)])
        z = np.concatenate([none, *(of.rows for of in given)])
        present = np.unique(y)
        centres = np.stack([z[y == c].mean(axis=0) for c in present]) if len(present) else none
        known = state["known"].copy()
        known[present] = True
        net = {name: torch.from_numpy(a.copy()) for name, a in state["net"].items()}
        if not self.hparams.network:
            net["vectors"][present] = torch.from_numpy(centres)
        delta = margin(centres, self.hparams.tau)
        losses = self.descend(list(net.values()), z, y, np.flatnonzero(known), delta, server_round)
        protos = np.where(known[:, None], outputs(list(net.values())).numpy(), 0.0)
        return {
            "protos": protos.astype(np.float32),
            "known": known,
            "owned": {},
            "nearest": {**state["nearest"], **nearest_of(reduced.clients)},
            "net": {name: w.numpy() for name, w in net.items()},
            "margin": np.append(state["margin"], delta if len(present) else np.nan),
            "loss": np.append(state["loss"], np.mean(losses) if losses else np.nan),
        }

    def descend(
        self, net: list[Tensor], z: Float64, y: Labels, candidates: Labels, delta: float, server_round: int
    ) -> list[float]:
        """Take S epochs of SGD on the class means z (n, d) of classes y, in place; return the loss before each step."""
        s, losses = self.hparams, []
        means, classes, rows = (torch.from_numpy(a) for a in (z, candidates, np.searchsorted(candidates, y)))
        for w in net:
            w.requires_grad_()
        for epoch in range(s.server_epochs):
            order = torch.from_numpy(self.context.rng("prototypes", server_round, epoch).permutation(len(y)))
            for part in (order[i] for i in batch_slices(len(y), s.server_batch)):
                loss = contrastive(means[part], rows[part], outputs(net)[classes], delta)
                losses.append(float(loss.detach()))
                for w, gradient in zip(net, torch.autograd.grad(loss, net)):
                    w.data.sub_(gradient, alpha=s.server_lr)
        for w in net:
            w.requires_grad_(False)
        return losses

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the accuracy of nearest-prototype prediction, and per round the margin and the server's loss."""
        rounds = {f"prototype_{name}": [tidy(v) for v in state[name].tolist()] for name in self.records}
        return {**super().report(state, final), **rounds}


def _resolve(hparams: FedTGPHParams, lookup: Callable[[str], Method]) -> Method:
    return with_inference(METHOD, hparams)


METHOD = Method(
    id="fedtgp",
    title="FedTGP",
    paper="Zhang et al., AAAI 2024",
    strategy=FedTGP,
    client=FedTGPClient,
    hparams=FedTGPHParams,
    shared=NONE,
    extra_up=("protos", "labels"),
    reduces={"train": {"protos": Rows("protos")}},
    heterogeneous=True,
    metrics=("prototype-correct", "prototype-total"),
    travels="class means up, trained prototypes down",
    resolve=_resolve,
)
