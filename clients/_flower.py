"""A client for other apps' `client_fn`: Flower's NumPyClient, whose parameters are positional, around a `FedClient`."""

from __future__ import annotations

from typing import Any

from flwr.client import NumPyClient

from fedapp.method import Array, Payload
from fedapp.models import selection


class PositionalClient(NumPyClient):
    """The functions that Flower calls; `FedClient` adds those that they call."""

    def get_parameters(self: Any, config: dict[str, Any]) -> list[Array]:
        """Return the shared arrays in the order of `down_names()`."""
        if not hasattr(self, "model"):
            self.restore(1, Payload())
        return list(selection.extract(self.model, self.down_names()).values())

    def fit(self: Any, parameters: list[Array], config: dict[str, Any]) -> tuple[list[Array], int, dict[str, Any]]:
        """Train one round on positional parameters (`config["round"]`, default 1)."""
        payload = Payload(arrays=dict(zip(self.down_names(), parameters, strict=True)))
        arrays, n, metrics = self.train_round(payload, int(config.get("round", 1)))
        return list(arrays.values()), n, metrics

    def evaluate(self: Any, parameters: list[Array], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Score positional parameters on the client's own test split (`config["round"]`, default 1).

        Returns
        -------
        Mean loss in nats, number of test samples (at least 1), and `accuracy`, for any value of the task's `protocols`.
        """
        payload = Payload(arrays=dict(zip(self.down_names(), parameters, strict=True)))
        self.round = int(config.get("round", 1))
        self.restore(self.round, payload, always=True)
        self.receive(payload)
        metrics = self.measure("received")
        total = max(1, int(metrics["received-total"]))
        accuracy = metrics["received-correct"] / total
        return metrics["received-loss-sum"] / total, total, {"accuracy": accuracy}
