"""Which clients of a large federation get the expensive scores: one more training, and the balanced score.

Every client is scored on its own test images as the server would send it next. One more local training, fine-tuning and
the balanced score cost as much as many rounds where there are many more clients than a round has, so they are taken on
a sample of the clients, which is drawn once for a run by its seed and stated in `summary.json`. Federations of up to
`FEW` clients are scored in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedapp import sampling
from fedapp.config import RunConfig
from fedapp.data.partitions import UNION
from fedapp.transport.request import RoundRequest

FEW = 500
"""Clients up to which all train again for their scores."""
ROUNDS = 5
"""Rounds' worth of clients that train again, where that is more than `FEW`."""
FEW_BALANCED = 100
"""Clients up to which the balanced score is taken on all of them, on all of its images."""
SHARE = 0.1
"""Part of the training that the balanced score may cost where there are more clients."""
FORWARD_AND_BACKWARD = 3
"""A training step on an image costs about as much as that many predictions."""
PER_CLASS, LEAST = 10, 500
"""Images of the balanced score where it is sampled: that many of each class, and at least that many in all."""


@dataclass(frozen=True)
class Scoring:
    """What the clients of a run are scored by.

    Attributes
    ----------
    clients : number of all clients.
    finalists : those that train again and fine-tune.
    balanced : those of the balanced score.   images : largest number of its images.
    retrains : whether evaluations train again.   receives : whether clients are scored before that too.
    """

    clients: int
    finalists: frozenset[int]
    balanced: frozenset[int]
    images: int
    retrains: bool
    receives: bool

    def each(self, client: int, request: RoundRequest) -> RoundRequest | None:
        """Return the request of an evaluation for this client, from that for all; None: the client is not evaluated."""
        images = 0 if self.images == UNION else self.images
        request = replace(request, balanced=request.balanced and client in self.balanced, balanced_images=images)
        if client in self.finalists:
            return request
        if self.retrains:
            request = replace(request, train=False, received_only=True)
        return None if self.retrains and not self.receives else replace(request, tune=False)

    def stated(self) -> dict[str, Any]:
        """Return the summary's entry; nothing where all clients are scored by everything."""
        entry: dict[str, Any] = {}
        if len(self.finalists) < self.clients:
            entry["trained"] = {"clients": len(self.finalists), "of": self.clients}
        if len(self.balanced) < self.clients or self.images < UNION:
            entry["balanced"] = {"clients": len(self.balanced), "of": self.clients, "images": self.images}
        return {"sampled": entry} if entry else {}


def scoring(config: RunConfig, sizes: Mapping[int, int], classes: int, simulation: bool, tunes: bool) -> Scoring:
    """Choose who is scored by what.

    Parameters
    ----------
    sizes : training samples by client, of those that take part.   classes : number of classes.
    simulation : `auto` samples in simulations alone: real nodes work side by side.
    tunes : whether the method's clients fine-tune before their last score.
    """
    ids = sorted(sizes)
    number = len(ids)
    a_round = len(sampling.sample_clients(config.federation.seed, 1, ids, config.federation.fraction_train))
    again = config.evaluation.final_training and "trained" in config.evaluation.measured
    finalists = number if not simulation or not (again or tunes) else min(number, max(FEW, ROUNDS * a_round))
    if config.evaluation.final_clients != "auto":
        finalists = min(number, int(config.evaluation.final_clients))
    final = sampling.some(config.federation.seed, "final-clients", ids, finalists)
    images, balanced = UNION, len(final)
    if config.evaluation.balanced_clients != "auto":
        balanced = min(len(final), int(config.evaluation.balanced_clients))
    elif simulation and number > FEW_BALANCED:
        scores = max(1, len({"received", "trained"} & set(config.evaluation.measured)) + tunes)
        steps = (
            config.federation.num_server_rounds * a_round * config.training.local_epochs * sum(sizes.values()) / number
        )
        budget = SHARE * FORWARD_AND_BACKWARD * steps / scores
        if budget < number * UNION:
            images = min(UNION, max(LEAST, PER_CLASS * classes))
            balanced = min(len(final), max(FEW_BALANCED, int(budget / images)))
    chosen = sampling.some(config.federation.seed, "balanced-clients", final, balanced)
    return Scoring(number, frozenset(final), frozenset(chosen), images, again, "received" in config.evaluation.measured)
