"""The score of the global model on the central test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clients._initial import shared_names
from clients.base import FedClient
from fedapp.data.transforms import InputSpec
from fedapp.lazy import torch
from fedapp.learning.evaluation import Scores, evaluate
from fedapp.learning.task import ModelSpec
from fedapp.method import Array, Scalar, ServerState
from fedapp.models import selection
from strategies._maths import Maths


def has_global_model(strategy: Maths, spec: ModelSpec, buffers: str, warn: Callable[[str], None]) -> bool:
    """Return whether the server has the whole global model; warn where BatchNorm's statistics stay at the clients."""
    method = strategy.method
    kind: Any = method.client
    if buffers == "global" or not method.global_model:
        return method.global_model
    sent, others = (shared_names(kind, spec, strategy.hparams, ("",), of) for of in (buffers, "global"))
    if sent != others:
        warn(f"no score global: with buffers = {buffers} BatchNorm's statistics stay at the clients; global sends them")
    return sent == others


class CentralTest:
    """Scores models with the server's architecture on the central test set.

    Parameters
    ----------
    spec : the server's model.   client : id of a client for which the model is made.
    wanted : whether the run scores its global model.
    data : images and labels of the test set, None where the server lacks them.

    Attributes
    ----------
    last : the scores of the last state with a global model.
    """

    def __init__(
        self,
        strategy: Maths,
        spec: ModelSpec,
        client: int,
        wanted: bool,
        data: tuple[torch.Tensor, torch.Tensor] | None,
        inputs: InputSpec | None,
        device: torch.device,
    ) -> None:
        self.strategy, self.spec, self.client = strategy, spec, client
        self.wanted, self.data, self.inputs, self.device = wanted, data, inputs, device
        self.last: Scores | None = None

    def scores(
        self, arrays: Mapping[str, Array], scalars: Mapping[str, Scalar], probabilities: bool = False
    ) -> Scores | None:
        """Return the scores of the model with these arrays, or None without a test set."""
        if self.data is None or self.inputs is None:
            return None
        kind: type[FedClient] = self.strategy.method.client
        model = kind.build_model(self.spec, self.strategy.hparams)
        kind.configure_model(model, scalars)
        selection.merge(model, arrays)
        return evaluate(
            model.to(self.device), *self.data, self.inputs, self.spec.num_classes, probabilities=probabilities
        )

    def accuracy(self, arrays: Mapping[str, Array], scalars: Mapping[str, Scalar]) -> float | None:
        """Return the accuracy alone."""
        scores = self.scores(arrays, scalars)
        return None if scores is None else scores.accuracy

    def score(self, state: ServerState, probabilities: bool = False) -> Scores | None:
        """Score the global model in a state; without one the scores before stay."""
        arrays = self.strategy.global_arrays(state)
        if arrays is not None:
            scalars = self.strategy.send(state, 0, self.client).scalars
            self.last = self.scores(arrays, scalars, probabilities)
        return self.last
