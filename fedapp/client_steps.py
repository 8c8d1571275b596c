"""Steps around the handler of one client: the claim of its folder, secure sums, and noise, clipping and booking.

A step is a function `(request, payload, call_next) -> Outcome`, like a mod of Flower, but for one client and before
the reply is encoded: clipping and sums act on numbers before `wire-dtype`, and a message may hold several clients.
:func:`around` puts steps around a handler, the first one outermost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from clients.base import FedClient
from fedapp import process
from fedapp.core import masks, names
from fedapp.errors import BadRequest
from fedapp.method import Arrays, Payload, Scalar
from fedapp.tasks import claim
from fedapp.transport import secure
from fedapp.transport.clipping import clip_update, private_update
from fedapp.transport.request import RoundRequest
from fedapp.transport.secure import SecureClient


@dataclass(frozen=True)
class Outcome:
    """The reply of a client: arrays, measured numbers, and facts."""

    arrays: Arrays = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Scalar] = field(default_factory=dict)


Handler: TypeAlias = Callable[[RoundRequest, Payload], Outcome]
Step: TypeAlias = Callable[..., Outcome]
"""Called with a request, a payload and `call_next`, the handler within."""


def around(handler: Handler, steps: Sequence[Step]) -> Handler:
    """Return a handler with steps around it; the first step is the outermost."""
    for step in reversed(steps):
        handler = functools.partial(step, call_next=handler)
    return handler


def claimed(client: FedClient, stage: str, flower: int) -> Step:
    """Let one run at a time write to the folder of a client of a real node; a second one is refused when it asks.

    `flower` is the run's id in Flower.
    """

    def step(request: RoundRequest, payload: Payload, call_next: Handler) -> Outcome:
        if client.store is None or request.unseen:
            return call_next(request, payload)
        if stage == "register":
            claim.check(client.store.folder, client.store.run)
            return call_next(request, payload)
        with claim.held(client.store.folder, client.store.run, last=request.final, flower=flower):
            return call_next(request, payload)

    return step


def bounded_update(client: FedClient, bound: float) -> Step:
    """Clip the change of the arrays that are sent (`clip-update`); with `dp = client` noise it and book it."""

    def step(request: RoundRequest, payload: Payload, call_next: Handler) -> Outcome:
        outcome = call_next(request, payload)
        if client.releaser is not None and client.releaser.privacy.unit == "client":
            return replace(outcome, arrays=private_update(outcome.arrays, client.reference, client.releaser))
        arrays, norm = clip_update(outcome.arrays, client.reference, bound)
        return replace(outcome, arrays=arrays, numbers={**outcome.numbers, "update-clipped": int(norm > bound)})

    return step


def released_numbers(client: FedClient) -> Step:
    """Keep the numbers that may leave in a run with `dp`: those of the ledger, and in a simulation also exact scores.

    Raises
    ------
    RuntimeError : arrays would leave without noise.
    """

    def step(request: RoundRequest, payload: Payload, call_next: Handler) -> Outcome:
        outcome = call_next(request, payload)
        return replace(outcome, numbers=_shown(client, outcome.arrays, outcome.numbers))

    return step


def _shown(client: FedClient, arrays: Arrays, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    releaser = client.releaser
    if releaser is None:
        if arrays:
            raise RuntimeError("dp is enabled but no noise mechanism exists; reply withheld")
        return {} if process.real_node() else numbers
    if releaser.privacy.sgd and not set(arrays) <= set(client.up_names()):
        raise RuntimeError(f"{client.method.id} would send more than the trained model; reply withheld")
    if arrays and not releaser.done and not client.released:
        raise RuntimeError(f"{client.method.id} would send {next(iter(arrays))!r} without noise; reply withheld")
    if not arrays:
        return {} if process.real_node() else numbers
    spent = releaser.spent()
    told = {"dp-epsilon": spent.epsilon, "dp-releases": spent.releases}
    return told if process.real_node() else {**numbers, **told}


def secure_sum(client: FedClient, secrets_of: Callable[[int], AbstractContextManager[SecureClient]]) -> Step:
    """Replace the arrays of a reply by the client's hidden part of a sum, for a server that may see only sums."""

    def step(request: RoundRequest, payload: Payload, call_next: Handler) -> Outcome:
        payload, given = names.split(payload, secure.PREFIX)
        outcome = call_next(request, payload)
        if not outcome.arrays:
            return outcome
        sums = client.method.sums(client.hparams)
        if sums is None:
            raise BadRequest(f"secure-sum: {client.method.id} needs the reply of each client")
        bits = request.sum_bits or masks.BITS
        if client.releaser is None:
            found = secure.additive(outcome.arrays, sums, client.task.num_samples, client.task.num_classes)
        elif client.releaser.steps is None:
            raise RuntimeError("dp is enabled but no noise was drawn for this sum; reply withheld")
        else:
            found, bits = {secure.NOISED: client.releaser.steps}, 0
        with secrets_of(client.task.client) as secrets:
            return replace(outcome, arrays=secrets.hide(request, given, found, bits))

    return step
