"""FedFomo. Zhang, Sapra, Fidler, Yeung, Alvarez, Personalized Federated Learning with First Order Model Optimization,
ICLR 2021.

Symbols    theta_n -> state["models"][n]     P -> state["P"], rows and columns in the order of state["ids"]
           w_{i,n} -> reply.metrics["fomo-weights"], by slot     M -> hparams.models     epsilon -> hparams.epsilon
Algorithm, server:  P_i += w_i;  send client i the models of the M clients n with the largest P_{i,n}; with probability
epsilon a slot goes to a random one of the others instead.

With baseline=before (released code) P starts as the identity, and a client's own trained model competes for a slot; it
is on the client's disk, so only its place is sent. With baseline=after P starts at zero and its diagonal is not used.
Which model is in which slot is a function of (state, round, client), so `aggregate` computes it again and nothing
besides the state must be remembered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from clients.fedfomo import OWN_SLOT, FedFomoClient, FedFomoHParams, number_held_out, wire_name
from fedapp.method import LARGEST, Arrays, Blend, Method, Payload, Reply, ServerContext, ServerState
from fedapp.reduce.spec import Each, Reduced
from strategies.base import Strategy


class FedFomo(Strategy):
    """Keeps every client's last model and sends each client those that have helped it most."""

    def init(self, context: ServerContext) -> ServerState:
        """Return the common initial model, no client's model, and the first P."""
        self.context = context
        ids = np.array(context.ids(), dtype=np.int64)
        return {"initial": dict(context.initial), "models": {}, "ids": ids, "P": self._itself() * np.eye(len(ids))}

    def _itself(self) -> float:
        """Return P_ii at the start."""
        return 1.0 if self.hparams.baseline == "before" else 0.0

    def slots(self, state: ServerState, server_round: int, client: int) -> list[int]:
        """Return whose models `client` compares, by slot: at most M different clients, itself with baseline=before."""
        itself = self.hparams.baseline == "before"
        candidates = [n for n in sorted(state["models"]) if itself or n != client]
        rng = self.context.rng("fomo", server_round, client)
        rng.shuffle(candidates)  # sorting is stable, so equal values come in random order
        row = {int(n): float(p) for n, p in zip(state["ids"], self._row(state, client))}
        ranked = sorted(candidates, key=lambda n: -row[n])
        epsilon = self.hparams.epsilon * self.hparams.decay ** (server_round - 1)
        chosen: list[int] = []
        while ranked and len(chosen) < self.hparams.models:
            explore = rng.random() < epsilon
            chosen.append(ranked.pop(int(rng.integers(len(ranked))) if explore else 0))
        return chosen

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the models of the chosen clients, and to a client that never took part the initial model."""
        common: Arrays = {} if client in state["models"] else dict(state["initial"])
        chosen = self.slots(state, server_round, client)
        for slot, other in enumerate(n for n in chosen if n != client):
            common.update({wire_name(slot, n): a for n, a in state["models"][other].items()})
        return Payload(common=common, scalars={OWN_SLOT: chosen.index(client)} if client in chosen else {})

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse weights that are not M finite numbers, or so large that sums of them need not be."""
        values = reply.metrics.get("fomo-weights", [])
        if not isinstance(values, list) or len(values) != self.hparams.models:
            return f"fomo-weights must be a list of {self.hparams.models} numbers, got {values!r}"
        if not all(math.isfinite(v) for v in values):
            return "fomo-weights contains NaN or infinity"
        if any(abs(v) > LARGEST for v in values):
            return f"fomo-weights holds values of more than {LARGEST:g}"
        return None

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Keep the participants' models and add their weights, negative ones too, to P."""
        models, ids, table = dict(state["models"]), state["ids"], state["P"].copy()
        for reply in reduced.each():
            if reply.client not in ids:
                place = int(np.searchsorted(ids, reply.client))
                ids = np.insert(ids, place, reply.client)
                table = np.insert(np.insert(table, place, 0.0, axis=0), place, 0.0, axis=1)
                table[place, place] = self._itself()
            row = int(np.searchsorted(ids, reply.client))
            for other, weight in zip(
                self.slots(state, server_round, reply.client), reply.metrics.get("fomo-weights", [])
            ):
                table[row, np.searchsorted(ids, other)] += weight
            models[reply.client] = {n: reply.arrays[n] for n in state["initial"]}
        return {**state, "models": models, "ids": ids, "P": table}

    def blend(self, state: ServerState, sizes: Mapping[int, float]) -> Blend | None:
        """Return the positive part of P by rows; a client without any has its own model."""
        kept = np.maximum(np.asarray(state["P"], dtype=np.float64), 0)
        total = kept.sum(axis=1, keepdims=True)
        matrix = np.where(total > 0, kept / np.where(total > 0, total, 1), np.eye(len(kept)))
        how = "positive weights that clients gave to models so far; a client without any has its own"
        return [int(c) for c in state["ids"]], matrix, how

    @staticmethod
    def _row(state: ServerState, client: int) -> list[float]:
        """Return P_i, zeros for a client that is not in the table yet."""
        found = np.flatnonzero(state["ids"] == client)
        return list(state["P"][found[0]]) if len(found) else [0.0] * len(state["ids"])


METHOD = Method(
    id="fedfomo",
    title="FedFomo",
    paper="Zhang et al., ICLR 2021",
    strategy=FedFomo,
    client=FedFomoClient,
    hparams=FedFomoHParams,
    head="none",
    travels="up to M other clients' whole models down, the whole model and M numbers up",
    held_out=lambda hparams, rows: number_held_out(rows, hparams.validation),
    metrics=("fomo-weights",),
    reduces={"train": {"models": Each(cap=False)}},
)
