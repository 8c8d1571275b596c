"""Personal CCVR: calibration for equal classes at the server, and for each client's own class shares at the client. No
paper has it; the base is Luo et al., NeurIPS 2021 (`strategies/ccvr.py`).

| symbol      | here                                                              |
|-------------|-------------------------------------------------------------------|
| W, b        | CCVR's head                                                       |
| q           | class shares that it was calibrated for: equal, or N_c / N        |
| p_k         | class shares of client k, which stay there                        |

1. The base method trains, and CCVR calibrates its head once: argmax_c log p(x | c) + log q_c.
2. Every client gets that head and adds tau (log p_kc - log q_c) to its bias: argmax_c log p(x | c) + log p_kc, the best
   decision for its own mix of classes (`clients/pccvr.py`). W stays. Nothing more is sent up than by CCVR.
3. The scores are those of the adjusted heads; `unadjusted` in the summary are CCVR's, by the same clients.

Controls: `tau=0` is CCVR; `shares=pooled` and `shares=shifted` adjust as much with shares that say nothing of the
client. Where they help as much as the client's own, the adjustment is useless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from clients.pccvr import NUMBERS, PERSONAL, PLAIN, PRIOR, PersonalCCVRClient, PersonalHParams
from fedapp.method import Array, Method, Payload, Reply, Scored, ServerState
from strategies import ccvr
from strategies._composition import mean_accuracy
from strategies.ccvr import CCVR


class PersonalCCVR(CCVR):
    """CCVR's strategy, which says to clients that a head is calibrated, and for which shares."""

    settings: ClassVar[PersonalHParams] = PersonalHParams()

    def calibrated(
        self, state: ServerState, entry: ServerState, replies: Sequence[Reply], counts: Array, **found: Any
    ) -> ServerState:
        """Keep N_c, and whether a step was taken: the bias of a head without one was calibrated for nothing."""
        taken = self.settings.epochs > 0 and found["virtual_samples"] > 0
        return super().calibrated(state, {**entry, "counts": counts, PERSONAL: taken}, replies, counts, **found)

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return CCVR's payload; with a calibrated head also that it is one, and N_c where clients need them."""
        payload = super().send(state, server_round, client)
        entry = state.get(self.method.id, {})
        if not entry.get(PERSONAL):
            return payload
        needed = self.settings.mc_mode == "proportional" or self.settings.shares == "pooled"
        prior = {f"{PRIOR}counts": entry["counts"]} if needed else {}
        return Payload(payload.arrays, {**payload.common, **prior}, {**payload.scalars, PERSONAL: True})

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return CCVR's entries, and the clients' scores with the adjusted head and with CCVR's."""
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


def resolve(hparams: PersonalHParams, lookup: Callable[[str], Method]) -> Method:
    """Return the base method with CCVR and the adjustment added."""
    return ccvr.composed(METHOD, hparams, lookup)


METHOD = dataclasses.replace(
    ccvr.METHOD,
    id="pccvr",
    title="Personal CCVR",
    paper="ours, after Luo et al., NeurIPS 2021",
    strategy=PersonalCCVR,
    client=PersonalCCVRClient,
    hparams=PersonalHParams,
    metrics=NUMBERS,
    travels="as CCVR; the class shares stay at the client",
    resolve=resolve,
)
