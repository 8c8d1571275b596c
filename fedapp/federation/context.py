"""The context of a strategy at the start of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from clients._initial import initial_arrays
from fedapp import sampling
from fedapp.learning.task import ModelSpec
from fedapp.method import Array, Arrays, ClientInfo, Method, Scalar, ServerContext


def server_context(
    method: Method,
    hparams: Any,
    spec: ModelSpec,
    clients: Iterable[ClientInfo],
    *,
    seed: int,
    width: int,
    buffers: str = "global",
    score: Callable[[Mapping[str, Array], Mapping[str, Scalar]], float | None] | None = None,
) -> ServerContext:
    """Return the context of a strategy at the start; the initial values are those of a new model of `spec`.

    Parameters
    ----------
    spec : the server's model. `seed` decides the initial values; the seed of `spec` is not used.
    width : feature width d of the common head.   buffers : as in the run configuration.
    score : scores a model on the central test set, if there is one.
    """

    def initial_from(k: int) -> Arrays:
        drawn = dataclasses.replace(spec, seed=sampling.server_model_seed(seed, k))
        arrays: Arrays = initial_arrays(method.client, drawn, method, hparams, buffers)
        return arrays

    return ServerContext(
        seed=seed,
        clients=tuple(clients),
        num_classes=spec.num_classes,
        width=width,
        initial=initial_from(0),
        initial_from=initial_from,
        rng=lambda purpose, *numbers: sampling.rng(seed, purpose, *numbers),
        score=score or (lambda arrays, scalars: None),
        shape=spec.shape,
        weights=spec.settings.weights,
    )
