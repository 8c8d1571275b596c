"""FedClassAvg. Jang, Ha, Jung, Yoon, FedClassAvg: Local Representation Learning for Personalized Federated Learning on
Heterogeneous Neural Networks, ICPP 2022.

Symbols    C^t -> state["model"]["head.*"]     |D_k| -> reply.num_samples     S_t -> the clients that replied
Eq. 3:  C^{t+1} = sum_{k in S_t} |D_k| / |D_{S_t}| C_k.  The paper divides by the data of all clients, which would
shrink the head under partial participation. We divide by the participants' data, as the released code does.

Without contrastive and proximal terms it is LG-FedAvg (tested). `share=all` averages bodies too (Table 3, "+weight").
`share=none` is the control that separates the gain of the federation from that of the local loss: the same initial
head, the same loss, and each client gets back its own last head instead of an average. With one client both are the
same (tested).
"""

from __future__ import annotations

from clients.fedclassavg import FedClassAvgClient, FedClassAvgHParams
from fedapp.method import ALL, HEAD, Method, Payload, ServerState, TrainDefaults
from fedapp.reduce.spec import Each, Mean, Reduced
from strategies.base import Strategy


class FedClassAvg(Strategy):
    """The average of the participants' heads (or whole models), weighted by |D_k|."""

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Return C^{t+1}; the control without federation keeps each participant's own head instead."""
        if self.hparams.share == "none":
            return {**state, "own": {**state.get("own", {}), **{r.client: r.arrays for r in reduced.each()}}}
        return super().update(state, server_round, reduced)  # Eq. 3

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return C^t; in the control the client's own last head, and the initial head before its first round."""
        own = state.get("own", {}).get(client)
        return super().send(state, server_round, client) if own is None else Payload(arrays=own)


def _shared(hparams: FedClassAvgHParams) -> tuple[str, ...]:
    return ALL if hparams.share == "all" else HEAD


def _warn(hparams: FedClassAvgHParams, optimizer: str, augment: str) -> str | None:
    chosen = hparams.chosen
    if hparams.contrastive > 0 and augment == "none":
        return (
            "augment=none gives the contrastive loss two identical views of each image, so it learns no invariance: "
            "use augment=weak or augment=strong, or contrastive=0"
        )
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
    head="names",
    reduces=lambda hparams: {"train": {"own": Each(cap=False)} if hparams.share == "none" else {"model": Mean()}},
    heterogeneous=True,
    travels="the head, both ways",
    defaults=TrainDefaults(augment="weak"),
    warn=_warn,
)
