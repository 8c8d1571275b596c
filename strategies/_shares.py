"""Server side of heads whose bias each client fits to its own class shares (`clients/shares.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients.shares import PERSONAL, PLAIN
from fedapp.method import Payload, Scored, ServerState
from strategies._composition import PostHoc, mean_accuracy


class WithShares(PostHoc):
    """Sends with a repaired head what clients adjust it by, and reports the scores with and without the adjustment."""

    def prior(self, entry: ServerState) -> Payload | None:
        """Return arrays under `PRIOR` and scalars for the clients, or None where the head must stay as it is.

        Parameters
        ----------
        entry : the repair, with `head`; empty before it.
        """
        raise NotImplementedError

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the repaired payload, with `prior` and the scalar that says so."""
        payload, prior = super().send(state, server_round, client), self.prior(state.get(self.method.id, {}))
        if prior is None:
            return payload
        scalars = {**payload.scalars, **prior.scalars, PERSONAL: True}
        return Payload(payload.arrays, {**payload.common, **prior.common}, scalars)

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return the entries of the repair, and under `personal` the clients' scores with and without adjustment."""
        scores = {name: _scores(final, name) for name in ("received", PLAIN)}
        if not scores[PLAIN]:
            return super().report(state, final)
        return {**super().report(state, final), "personal": {"adjusted": scores["received"], PLAIN: scores[PLAIN]}}


def _scores(final: Scored, name: str) -> dict[str, float | None]:
    """Return the means over clients of a score: on their own test splits, and balanced over all classes."""
    found = [m for m in final.values() if f"{name}-total" in m]
    renamed: list[Mapping[str, Any]] = [
        {n.replace(name, "received", 1): v for n, v in m.items() if n.startswith(f"{name}-")} for m in found
    ]
    shares = [float(m["received-balanced"]) for m in renamed if "received-balanced" in m]
    if not renamed:
        return {}
    return {"local": mean_accuracy(renamed), "balanced": sum(shares) / len(shares) if shares else None}
