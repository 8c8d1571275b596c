"""FedClassAvg. Jang, Ha, Jung, Yoon, FedClassAvg: Local Representation Learning for Personalized Federated Learning on
Heterogeneous Neural Networks, ICPP 2022.

Symbols    C^t -> state["model"]["head.*"]     |D_k| -> reply.num_samples     S_t -> the clients that replied
Eq. 3:  C^{t+1} = sum_{k in S_t} |D_k| / |D_{S_t}| C_k.  The paper divides by the data of all clients, which would
shrink the head under partial participation. We divide by the participants' data, as the released code does.

Without contrastive and proximal terms it is LG-FedAvg (tested). `share=all` averages trunks too (Table 3, "+weight");
`share=none` averages nothing: this control separates the gain of the federation from that of the local loss.
"""

from __future__ import annotations

from collections.abc import Iterable

from clients.fedclassavg import FedClassAvgClient, FedClassAvgHParams
from fedapp.method import ALL, HEAD, NONE, Method, Reply, ServerState, TrainDefaults
from strategies.base import FedStrategy


class FedClassAvg(FedStrategy):
    """The average of the participants' heads (or whole models), weighted by |D_k|."""

    def aggregate(self, state: ServerState, server_round: int, replies: Iterable[Reply]) -> ServerState:
        """Return C^{t+1}; the control without federation has nothing to average."""
        if self.hparams.share == "none":
            for _ in replies:  # replies must be read to the end
                pass
            return state
        return super().aggregate(state, server_round, replies)  # Eq. 3


def _shared(hparams: FedClassAvgHParams) -> tuple[str, ...]:
    return {"head": HEAD, "all": ALL, "none": NONE}[hparams.share]


def _warn(hparams: FedClassAvgHParams, optimizer: str) -> str | None:
    chosen = hparams.chosen
    if hparams.contrastive > 0 and chosen.temperature / chosen.base_temperature > 100 and optimizer == "sgd":
        return (
            f"T/T_b = {chosen.temperature / chosen.base_temperature:.0f} on raw features diverges under SGD: "
            "use optimizer=adam lr=0.0001, or preset=khosla"
        )
    return None


METHOD = Method(
    id="fedclassavg",
    title="FedClassAvg",
    paper="Jang et al., ICPP 2022",
    strategy=FedClassAvg,
    client=FedClassAvgClient,
    hparams=FedClassAvgHParams,
    shared=_shared,
    heterogeneous=True,
    travels="the head, both ways",
    defaults=TrainDefaults(augment="weak"),
    warn=_warn,
)
