"""The server's request with a payload: the round, and the work of the client in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedapp.errors import BadRequest
from fedapp.method import Scalar

WITHOUT_DATA = ("query.keys", "query.shares", "query.agree", "query.unmask")
"""Messages of secure sums that a client answers without its data; it states no samples."""


@dataclass(frozen=True)
class RoundRequest:
    """The request to one client, the same form in every message.

    Attributes
    ----------
    run : token of the run; empty: the client stores nothing.   round : number of the round; 0 = registration.
    client : id of the client, -1 = its node knows it; real nodes use only their own configuration.
    clients : number of clients of a simulation.
    state_dir, models_dir : folders of the clients' states and final models in a simulation.
    state : digest of the state that the client stored in its last round that counted.
    state_binds : whether the next training starts from that state.
    releases : noised releases that the client has stated.
    back : n > 0: the client restores its state before round n.
    keep : n > 0: the client keeps its state of round n.
    balanced, balanced_images : whether the balanced score is measured, and on how many images at most (0: on all).
    train : an evaluation trains one more round and scores the result.
    received_only : an evaluation scores the received model alone.
    final : this is the last evaluation of the run.   tune : the client fine-tunes in it, if its method does.
    unseen : the client took no part in the training.
    scaling : mean and standard deviation of the features of all clients, as JSON; empty = features stay as they are.
    secure_sum : name of the secure sum that the message belongs to.   sum_bits : see `Payload.sum_bits`.
    """

    run: str = ""
    round: int = 0
    client: int = -1
    clients: int = 0
    state_dir: str = ""
    models_dir: str = ""
    state: str = ""
    state_binds: bool = True
    releases: int = 0
    back: int = 0
    keep: int = 0
    balanced: bool = False
    balanced_images: int = 0
    train: bool = False
    received_only: bool = False
    final: bool = False
    tune: bool = True
    unseen: bool = False
    scaling: str = ""
    secure_sum: str = ""
    sum_bits: int = 0

    def record(self) -> dict[str, Scalar]:
        """Return the values of a message's record; those at their defaults are left out."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RoundRequest:
        """Return the request of a message's record.

        Raises
        ------
        BadRequest : the record holds an unknown value, or one of another type.
        """
        types = {f.name: type(f.default) for f in fields(cls)}
        for name, value in record.items():
            if type(value) is not types.get(name):
                raise BadRequest(f"the server's request has {name} = {value!r}: use one version of fedapp everywhere")
        return cls(**record)
