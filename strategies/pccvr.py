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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clients.pccvr import PersonalCCVRClient, PersonalHParams
from clients.shares import NUMBERS, PERSONAL, PRIOR
from fedapp.method import Array, Method, Payload, Reply, ServerState
from strategies import ccvr
from strategies._shares import WithShares
from strategies.ccvr import CCVR


class PersonalCCVR(WithShares, CCVR):
    """CCVR's strategy, which says to clients that a head is calibrated, and for which shares."""

    settings: ClassVar[PersonalHParams] = PersonalHParams()

    def calibrated(
        self, state: ServerState, entry: ServerState, replies: Sequence[Reply], counts: Array, **found: Any
    ) -> ServerState:
        """Keep N_c, and whether a step was taken: the bias of a head without one was calibrated for nothing."""
        taken = self.settings.epochs > 0 and found["virtual_samples"] > 0
        return super().calibrated(state, {**entry, "counts": counts, PERSONAL: taken}, replies, counts, **found)

    def prior(self, entry: ServerState) -> Payload | None:
        """Return N_c where clients need them; None for a head that is not calibrated."""
        if not entry.get(PERSONAL):
            return None
        needed = self.settings.mc_mode == "proportional" or self.settings.shares == "pooled"
        return Payload(common={f"{PRIOR}counts": entry["counts"]} if needed else {})


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
    travels="the payload of CCVR; the class shares stay at the client",
    resolve=resolve,
)
