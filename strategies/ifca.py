"""IFCA. Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning, NeurIPS 2020.

Symbols    theta_j -> state["clusters"][j]     hat j of client i -> reply.metrics["ifca-cluster"]
           S_j -> the participants that chose j     n_i -> reply.num_samples
Algorithm 1 (model averaging):  send theta_1 .. theta_k to all;  theta_j <- sum_{i in S_j} (n_i / sum_{S_j} n) theta_i;
a model that no one chose stays as it is.

The k models start from k different seeds. Equal ones would stay equal: all losses tie, every client picks the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clients.ifca import IFCAClient, IFCAHParams, wire_name
from fedapp.core.averages import blended
from fedapp.errors import BadRequest
from fedapp.method import HEAD, Arrays, Blend, Method, Payload, Reply, Scored, ServerContext, ServerState
from fedapp.reduce.spec import Each, Reduced
from strategies.base import Strategy


class IFCA(Strategy):
    """Keeps k models; each is the average of the models of the clients that chose it."""

    def init(self, context: ServerContext) -> ServerState:
        """Draw k different initial models.

        Raises
        ------
        BadRequest : two initial models are equal, so that no client could ever tell their clusters apart.
        """
        self.context = context
        models = [context.initial_from(c) for c in range(self.hparams.clusters)]
        clusters = {c: {n: a for n, a in model.items() if self._clustered(n)} for c, model in enumerate(models)}
        for c in range(1, len(models)):
            if any(all(np.array_equal(clusters[c][n], clusters[b][n]) for n in clusters[c]) for b in range(c)):
                raise BadRequest(
                    "ifca needs different initial models for its clusters, but two are equal: let the server draw them "
                    "from different seeds (fedapp's ServerApp does), or set clusters=1"
                )
        shared = {n: a for n, a in models[0].items() if not self._clustered(n)}
        return {"clusters": clusters, "shared": shared, "chosen": {}}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return all k models, the same for every client."""
        common: Arrays = {**state["shared"], **state["clusters"][0]}
        for c, model in state["clusters"].items():
            common.update({wire_name(c, n): a for n, a in model.items() if c})
        return Payload(common=common)

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse a choice that does not exist."""
        choice = reply.metrics.get("ifca-cluster")
        if not isinstance(choice, int) or not 0 <= choice < self.hparams.clusters:
            return f"ifca-cluster is {choice}, it must be one of 0 .. {self.hparams.clusters - 1}"
        return None

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Average each model over those that chose it, and the shared arrays over all participants."""
        means = {c: reduced.mean(model, c) for c, model in state["clusters"].items()}
        over_all = reduced.mean(state["shared"])
        chosen = dict(state["chosen"])
        for reply in reduced.each():
            choice = int(reply.metrics["ifca-cluster"])
            weight = float(reply.num_samples) if self.hparams.weighting == "samples" else 1.0
            means[choice].add({n: reply.arrays[n] for n in state["clusters"][choice]}, weight)
            if state["shared"]:
                over_all.add({n: reply.arrays[n] for n in state["shared"]}, weight)
            chosen[reply.client] = choice
        clusters = {c: mean.mean() if mean.replies else state["clusters"][c] for c, mean in means.items()}
        return {
            "clusters": clusters,
            "shared": over_all.mean() if over_all.replies else state["shared"],
            "chosen": chosen,
        }

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the weights within the clusters, by the clients' last choices."""
        return blended(state["chosen"], sizes, self.hparams.weighting) if state["chosen"] else None

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the members of each cluster, by their last choice."""
        members: list[list[int]] = [[] for _ in state["clusters"]]
        for client, choice in sorted(state["chosen"].items()):
            members[choice].append(client)
        return {"clusters": members}

    def _clustered(self, name: str) -> bool:
        return self.hparams.trunk == "clustered" or name.startswith(HEAD)


METHOD = Method(
    id="ifca",
    title="IFCA",
    paper="Ghosh et al., NeurIPS 2020",
    strategy=IFCA,
    client=IFCAClient,
    hparams=IFCAHParams,
    head="none",
    reduces={"train": {"models": Each(grouped=True)}},
    deploy_as="received",
    metrics=("ifca-cluster",),
    travels="k whole models down, one up with its number",
)
