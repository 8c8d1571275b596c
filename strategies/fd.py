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

from collections.abc import Iterable

import numpy as np

from clients.fd import FDClient, FDHParams
from fedapp.core.classmeans import problem_of
from fedapp.core.robust import shortened
from fedapp.method import NONE, Method, Payload, Reply, ServerContext, ServerState
from strategies.base import FedStrategy


class FD(FedStrategy):
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
        """Refuse malformed outputs, or rows that are not probabilities where probabilities are averaged."""
        outputs, classes = reply.arrays.get("outputs"), self.context.num_classes
        problem = problem_of(outputs, reply.arrays.get("labels"), classes, classes)
        if problem or outputs is None or self.hparams.output == "logits":
            return problem
        # Half precision on the wire keeps about three digits.
        if (outputs < 0).any() or (np.abs(outputs.sum(axis=1) - 1) > 1e-2).any():
            return "outputs are not probabilities: rows must be non-negative and sum to 1"
        return None

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Sum what was sent per label; labels that nobody sent keep their sums."""
        classes = self.context.num_classes
        sums, owners = np.zeros((classes, classes)), np.zeros(classes, np.int64)
        owned, new = dict(state["owned"]), {}
        replies = list(replies)
        # A squared error to the logits of one client alone, far away, would give NaN to all others.
        bounded = shortened([reply.arrays["outputs"].astype(np.float64) for reply in replies])
        for reply, outputs in zip(replies, bounded, strict=True):
            labels = reply.arrays["labels"].astype(np.int64)
            sums[labels] += outputs
            owners[labels] += 1
            owned[reply.client] = np.sort(labels)
            new[reply.client] = {"labels": labels, "outputs": outputs}
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
    per_class="",
    heterogeneous=True,
    same_width=False,
    travels="mean outputs per class, both ways",
    guards=(),
)
