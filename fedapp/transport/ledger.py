"""The ledger of clients' states: the last stored state of each client, and the noised releases that it has stated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedapp.transport.request import RoundRequest

MOST_EPSILON, MOST_RELEASES = 101.0, 10**6
"""Largest numbers that a client may state: no budget is above 100, and a sum of releases may pass it by rounding."""
_DIGEST = re.compile(r"\A([0-9a-f]{32})?\Z")


class StateLedger:
    """The server's knowledge of what its clients store. It goes with the next message and is compared with the reply.

    Parameters
    ----------
    restart : clients whose stored state is lost may start again.

    Attributes
    ----------
    states : by client, the digest of its stored state in its last round that counted, and whether its next training
        starts from that. A client detects with it that its state is lost or another's.
    released : by client, the noised releases that it has stated. A client detects with it an older copy of its ledger.
    """

    def __init__(self, restart: bool = False) -> None:
        self.restart = restart
        self.states: dict[int, tuple[str, bool]] = {}
        self.released: dict[int, int] = {}

    def request(self, client: int, request: RoundRequest) -> RoundRequest:
        """Return a request to one client, with the server's record of its state."""
        digest, binds = self.states.get(client, ("", True))
        released = self.released.get(client, 0)
        return replace(request, client=client, state=digest, state_binds=binds or not digest, releases=released)

    def problem(self, client: int, info: Mapping[str, Any], metrics: Mapping[str, Any]) -> str | None:
        """Return the fault of a reply's facts about the stored state and releases; an older version reports none."""
        spent, count = metrics.get("dp-epsilon", 0.0), metrics.get("dp-releases", 0)
        if not isinstance(count, int) or not 0 <= count <= MOST_RELEASES:
            return f"it states {count!r:.40} releases"
        if not isinstance(spent, (int, float)) or not 0 <= spent <= MOST_EPSILON:
            return f"it states that epsilon = {spent!r:.40} is spent"
        if "state" not in info:
            return None
        if not all(isinstance(v, str) and _DIGEST.match(v) for v in (info["state"], info.get("state-from", ""))):
            return "the digest of its state is invalid"
        lost = info.get("state-lost", "")
        if lost and not self.restart:
            return f"its state is lost and it started again, which lost-state = 'refuse' does not allow: {lost}"
        known = self.states.get(client, ("", False))[0]
        if not lost and info.get("state-from", "") != known:
            return f"it went on from the state '{info.get('state-from', '')}', the server's record is '{known}'"
        return None

    def note(self, client: int, info: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Note the facts of a reply that counts."""
        if "state" in info:
            self.states[client] = str(info["state"]), bool(info.get("state-binds", True))
        released = metrics.get("dp-releases", 0)
        if released > self.released.get(client, 0):
            self.released[client] = released

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds. The digests are arrays: there may be very many."""
        known = {c: found for c, found in sorted(self.states.items()) if found[0]}
        digests = np.frombuffer(bytes.fromhex("".join(digest for digest, _ in known.values())), np.uint8)
        return {
            "clients": np.array(list(known), np.int64),
            "digests": digests.reshape(len(known), 16),
            "binds": np.array([binds for _, binds in known.values()], np.uint8),
            "released": dict(sorted(self.released.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.states, self.released = digests_of(state), state["released"]


def digests_of(state: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Return `StateLedger.states` of what its `state_dict` returned."""
    rows = zip(state["clients"].tolist(), state["digests"], state["binds"].tolist(), strict=True)
    return {client: (digest.tobytes().hex(), bool(binds)) for client, digest, binds in rows}
