"""FD, federated distillation. Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data, 2018.

| symbol (paper)   | here                                                                                 |
|------------------|--------------------------------------------------------------------------------------|
| bar F_{k,l}      | rows of reply.arrays["outputs"], labels in reply.arrays["labels"]                    |
| sum_k bar F_{k,l}| state["sums"][l], over state["owners"][l] clients                                    |
| hat F_{k,l}      | row of `send(...).arrays["outputs"]`                                                 |

Algorithm 1, server, for client k and label l, over the clients j that own l:
    hat F_{k,l} = (sum_j bar F_{j,l} - bar F_{k,l}) / (M_l - 1)
the mean over the *others*, since a client learns nothing from its own output. A label that only client k owns has no
target.

A label keeps its sum until a round in which somebody sends it; then the senders of that round make up the new one.
state["parts"][k] are the rows of client k that are in the sums, so that its share can be taken out again.
"""

from __future__ import annotations

import numpy as np

from clients.fd import FDClient, FDHParams
from fedapp.core.classmeans import shortened
from fedapp.core.distillation import problem_of
from fedapp.method import NONE, Method, Payload, Reply, ServerContext, ServerState
from fedapp.reduce.spec import Reduced, Rows
from strategies.base import Strategy


class FD(Strategy):
    """Sums mean outputs per label and sends each client the mean over the others."""

    def init(self, context: ServerContext) -> ServerState:
        """Return no outputs yet; what round 1 sends has no rows."""
        self.context = context
        classes = context.num_classes
        return {"sums": np.zeros((classes, classes)), "owners": np.zeros(classes, np.int64), "owned": {}, "parts": {}}

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the targets for the client's labels, or for all labels if it has not answered yet."""
        sums, owners = state["sums"], state["owners"]
        if client in state["parts"] and not self.hparams.include_self:
            part = state["parts"][client]
            sums, owners = sums.copy(), owners.copy()
            # hat F_{k,l}: the sum without the client's own share. float64, so that nothing is left of it.
            sums[part["labels"]] -= part["outputs"]
            owners[part["labels"]] -= 1
        known = owners > 0
        if self.hparams.down == "own" and client in state["owned"]:
            known = known & np.isin(np.arange(len(known)), state["owned"][client])
        labels = np.flatnonzero(known).astype(np.int32)
        outputs = (sums[labels] / owners[labels, None]).astype(np.float32)
        return Payload(arrays={"outputs": outputs, "labels": labels})

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Refuse rows that are not probabilities where probabilities are averaged."""
        problem = problem_of(reply.arrays["outputs"]) if self.hparams.output == "softmax" else None
        return problem and f"outputs {problem}"

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Sum what was sent per label; labels that no client sent keep their sums."""
        classes = self.context.num_classes
        sums, owners = np.zeros((classes, classes)), np.zeros(classes, np.int64)
        owned, new = dict(state["owned"]), {}
        given = reduced.rows("outputs")
        # A squared error to the logits of one client alone, far away, would give NaN to all others.
        bounded = shortened([of.rows for of in given])
        for of, outputs in zip(given, bounded, strict=True):
            labels, client = of.labels, of.reply.client
            sums[labels] += outputs
            owners[labels] += 1
            owned[client] = labels
            new[client] = {"labels": labels, "outputs": outputs}
        sent = owners > 0
        # A label that was sent has new contributors; of the others the old rows still stand in the sums.
        parts = {}
        for client, old in state["parts"].items():
            kept = ~sent[old["labels"]]
            parts[client] = {name: rows[kept] for name, rows in old.items()}
        for client, part in new.items():
            old = parts.get(client)
            parts[client] = part if old is None else {n: np.concatenate([old[n], part[n]]) for n in part}
        return {
            "sums": np.where(sent[:, None], sums, state["sums"]),
            "owners": np.where(sent, owners, state["owners"]),
            "owned": owned,
            "parts": parts,
        }


METHOD = Method(
    id="fd",
    title="FD",
    paper="Jeong et al., 2018",
    strategy=FD,
    client=FDClient,
    hparams=FDHParams,
    shared=NONE,
    extra_up=("outputs", "labels"),
    heterogeneous=True,
    same_width=False,
    travels="mean outputs per class, both ways",
    reduces={"train": {"outputs": Rows("outputs", outputs=True)}},
)
