"""A site's choice between its own head and that of all clients with its class shares (`choose`), client side.

1. Each client holds out a fifth of its training rows, whole groups where the data have them. Sums of the other rows
   give a first head of all clients, and the client's own sums give its own head: the same kind, from its rows alone.
2. D_k is the number of held-out rows that the own head gets right, less those that the other gets right. It travels,
   and the sign of the sum over clients decides which of the two is the default of all clients.
3. Sums of all rows give the final heads. A client deviates from the default only if the other is right on more than
   max(1, sqrt(b)) more held-out rows, with b those that exactly one of the two gets right.

A client chooses when it scores and keeps a model. The server then sends the first head again, so the client needs no
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from clients.shares import PERSONAL, PRIOR, Float64
from clients.sums import STRENGTH, SUMS, OwnShares, shares_of
from fedapp import sampling
from fedapp.core import names, sums
from fedapp.core.gaussian import unpack
from fedapp.core.sums import FeatureSums
from fedapp.lazy import F, Tensor, torch
from fedapp.learning.evaluation import Scores
from fedapp.method import Arrays, Payload, Scalar
from fedapp.reduce.spec import Totals

FIRST = "first/"
"""Prefix, after `PRIOR`, of the first head, (C, d) and (C,), and of the shares q that belong to it."""
FIRST_STRENGTH = f"first-{STRENGTH}"
OWN_DEFAULT = "own-default"
"""Scalar that says that the own head is everybody's default."""
CHOSEN = "own-head"
"""Number in a client's scores: 1 if its own head was chosen, else 0."""
FEW = 20
"""A client with fewer rows takes the default: a fifth of them decides nothing."""
LEAST = 4
"""Fewest rows that are held out; a client with fewer than twice as many holds out none."""
KEPT = {"kept": "sums", "kept_losses": "losses"}
"""Queries for the first head -> the query that they repeat without the held-out rows."""


def held_out(rows: int, groups: Any, generator: torch.Generator) -> Tensor:
    """Return which of a client's rows are held out, (rows,) bool: max(4, rows / 5), as near as whole groups allow.

    Parameters
    ----------
    groups : numbers of groups (rows,), or None where each row is one.
    """
    most = max(LEAST, rows // 5)
    if rows < 2 * LEAST:
        return torch.zeros(rows, dtype=torch.bool)
    of = torch.arange(rows) if groups is None else torch.unique(torch.as_tensor(groups), return_inverse=True)[1]
    sizes = torch.bincount(of).tolist()
    taken: list[int] = []
    for group in torch.randperm(len(sizes), generator=generator).tolist():
        if sizes[group] <= most:
            taken.append(group)
            most -= sizes[group]
    return torch.isin(of, torch.tensor(taken))


class Choosing(OwnShares):
    """Answers with D_k, and takes its own head where that serves it better."""

    alone = True
    repeats: ClassVar[Mapping[str, str]] = KEPT
    squares: ClassVar[bool]
    own_chosen: bool | None = None
    """Whether the scored head is the client's own; None before the choice."""

    @functools.cached_property
    def held_out(self) -> Tensor:
        """The held-out rows of the training split, (n_k,) bool: the same in all exchanges of a run."""
        generator = sampling.torch_generator(self.task.seed, "held-out", self.task.client)
        return held_out(self.task.num_samples, self.task.extras.get("groups"), generator).to(self.device)

    def feature_batches(self, exchange: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (z, label) of the training split, without the held-out rows where a query is for the others."""
        start = 0
        for z, label in super().feature_batches(exchange):
            rows = ~self.held_out[start : start + len(label)] if exchange in KEPT else slice(None)
            start += len(label)
            yield z[rows], label[rows]

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer `kept` and `kept_losses` as the queries without held-out rows, and `choice` with D_k."""
        if kind == "choice":
            gain, _ = self.compared(names.split(payload, PRIOR)[1], payload.scalars)
            return {SUMS + "gain": np.array([gain], dtype=np.float64)}, {}
        return super().answer(kind, payload)

    def receive(self, payload: Payload) -> None:
        """Take over the model; where it is scored, put the better of the two heads into it."""
        super().receive(payload)
        self.own_chosen = None
        if not self.scoring or not payload.scalars.get(PERSONAL):
            return
        default = bool(payload.scalars[OWN_DEFAULT])
        gain, apart = self.compared(names.split(payload, PRIOR)[1], payload.scalars)
        ahead = -gain if default else gain
        deviates = self.task.num_samples >= FEW and ahead > max(1.0, apart**0.5)
        self.own_chosen = default != deviates
        if self.own_chosen:
            weight, bias = self.own_head("sums")
            with torch.no_grad():
                self.model.head.weight.copy_(torch.from_numpy(weight))
                self.model.head.bias.copy_(torch.from_numpy(bias))

    def score(self, x: Tensor, y: Tensor, probabilities: bool = False) -> Scores:
        """Score the model; in an evaluation also say which head it has."""
        found = super().score(x, y, probabilities)
        return found if self.own_chosen is None else replace(found, numbers={CHOSEN: int(self.own_chosen)})

    def compared(self, prior: Arrays, scalars: Mapping[str, Scalar]) -> tuple[int, int]:
        """Return D_k of the first heads, and the number of held-out rows that exactly one of the two gets right."""
        rows = self.held_out
        if not bool(rows.any()):
            return 0, 0
        first = {n: prior[FIRST + n] for n in ("weight", "bias", "shares")}
        counts = torch.bincount(self.task.y_train[~rows], minlength=self.task.num_classes).cpu().numpy()
        bias = first["bias"] + self.terms(first["shares"], float(scalars[FIRST_STRENGTH]), counts)
        z, label = (torch.cat(parts) for parts in zip(*self.feature_batches("choice"), strict=True))
        own, other = (
            F.linear(z[rows].double(), *(torch.from_numpy(a).double().to(z.device) for a in head)).argmax(1)
            == label[rows]
            for head in (self.own_head("kept"), (first["weight"], bias))
        )
        return int(own.sum() - other.sum()), int((own != other).sum())

    def own_head(self, exchange: str) -> tuple[Float64, Float64]:
        """Return weight (C, d) and bias (C,) of the head that the method makes of this client's rows alone.

        Parameters
        ----------
        exchange : `kept` leaves out the held-out rows.
        """
        settings, classes = self.settings.alone(), self.task.num_classes
        found = FeatureSums(classes, self.model.width, self.squares, settings.energy())
        batches = list(self.feature_batches(exchange))
        for z, label in batches:
            found.update(z, label)
        arrays = found.arrays()
        if "a" in arrays:
            arrays["a"] = unpack(arrays["a"], self.model.width + 1)
        rows, _ = settings.solved(Totals(arrays, [arrays]))
        counts = arrays["b"][:, -1]
        weight, bias = sums.as_head(rows, counts > 0)
        head = [torch.from_numpy(a).to(self.device) for a in (weight, bias)]
        losses = [sums.scaled_losses(F.linear(z, *head), label) for z, label in batches]
        factor = sums.best_scale(sum(losses[1:], losses[0]))
        weight, bias = sums.as_head(rows, counts > 0, factor)
        q = shares_of(counts)
        return weight, bias + self.terms(q, settings.strength(factor), counts)
