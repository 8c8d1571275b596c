"""Initial models of clients: built once in a process, and copied or drawn again for each client."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapp import process, sampling
from fedapp.errors import BadRequest
from fedapp.lazy import nn, torch
from fedapp.learning.task import ModelSpec
from fedapp.method import Arrays, Method
from fedapp.models import is_own, selection
from fedapp.models.copies import copied, redrawn

if TYPE_CHECKING:
    from fedapp.models import SplitModel


def initial_model(client: Any) -> SplitModel:
    """Return this client's own initial model; only the arrays that the server does not send are used."""
    seed, spec = sampling.derived_seed(client.task.seed, "model", client.task.client), client.task.spec(0)
    # To find that out takes longer than one model, and the process of a real node makes no other.
    kind: Any = type(client)
    seeded = "" if process.real_node() else _seeded(kind, spec, client.hparams)
    made = skeleton(kind, spec, client.hparams)
    drawn: SplitModel
    if seeded == "common":
        drawn = copied(made)
    elif seeded == "own":
        drawn = redrawn(made, seed)
    else:
        drawn = client.build_model(replace(spec, seed=seed), client.hparams)
    return drawn if client.device.type == "cpu" else drawn.to(client.device)


def initial_arrays(kind: Any, spec: ModelSpec, method: Method, hparams: Any, buffers: str) -> Arrays:
    """Return the shared arrays of a new model, which the server starts from.

    Raises
    ------
    BadRequest : one of them is not finite, so that no reply with it would count.
    """
    model = kind.build_model(spec, hparams)
    arrays = selection.extract(model, selection.shared_names(model, method.shared_prefixes(hparams), buffers))
    if odd := next((n for n, a in arrays.items() if not np.isfinite(a).all()), None):
        raise BadRequest(
            f"'{odd}' of the model '{spec.name}' has numbers that are not finite, and {method.id} sends it: change "
            "its initial values, or register a constant buffer with persistent=False, which is not sent"
        )
    return arrays


@functools.lru_cache(maxsize=16)
def skeleton(client: Any, spec: ModelSpec, hparams: Any) -> SplitModel:
    """Build a model once per process; clients work on copies, so nothing is carried over from one to the next."""
    built: SplitModel = client.build_model(spec, hparams)
    return built


@functools.lru_cache(maxsize=16)
def _seeded(client: Any, spec: ModelSpec, hparams: Any) -> str:
    """Return how the values of an initial model follow from the client's seed, tried with two seeds.

    Returns
    -------
    `own` : new random values make another client's initial model of a skeleton.   `common` : they are those of the
    skeleton, whatever the seed is.   Empty : in another way. A user's own function may do anything with its random
    numbers, so its models are always made by it.
    """
    if is_own(spec.name):
        return ""
    made = skeleton(client, spec, hparams)
    pairs = [(client.build_model(replace(spec, seed=k), hparams), redrawn(made, k)) for k in (1, 2)]
    if all(_same(built, drawn) for built, drawn in pairs):
        return "own"
    return "common" if all(_same(built, made) for built, _ in pairs) else ""


def _same(a: nn.Module, b: nn.Module) -> bool:
    values = (x.state_dict().values() for x in (a, b))
    return all(torch.equal(u, v) and u.stride() == v.stride() for u, v in zip(*values, strict=True))


@functools.lru_cache(maxsize=16)
def all_names(client: Any, spec: ModelSpec, hparams: Any) -> frozenset[str]:
    """Return the names of all that a model's state consists of and that may be sent."""
    return frozenset(selection.shared_names(skeleton(client, spec, hparams), ("",)))


@functools.lru_cache(maxsize=64)
def shared_names(client: Any, spec: ModelSpec, hparams: Any, prefixes: tuple[str, ...], buffers: str) -> list[str]:
    """Return the names of the arrays under some prefixes once for all clients of an architecture."""
    return selection.shared_names(skeleton(client, spec, hparams), prefixes, buffers)
