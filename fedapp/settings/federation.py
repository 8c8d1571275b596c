"""The method, its rounds, and the exchange with the clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedapp.settings._group import AUTO, Group, OrAuto


class FederationSettings(Group):
    """The method, its rounds, and the exchange with the clients."""

    method: str = Field("fedclassavg", description="id of the method; see fedapp methods")
    method_args: str = Field("", description='hyperparameters of the method, "name=value name=value"')
    num_server_rounds: int = Field(20, ge=0, description="total number of rounds; 0 where nothing is trained")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of clients per round")
    server_threads: int = Field(1, ge=1, le=1024, description="threads of the server's mathematics")
    min_replies: Annotated[float, Field(gt=0, le=1), OrAuto] = Field(
        AUTO, description="smallest share of valid replies; auto = 1.0 in simulation, 0.5 in deployment"
    )
    min_clients: Annotated[int, Field(ge=1), OrAuto] = Field(
        AUTO,
        description="smallest number of clients that a run begins and goes on with, without those that are left out or "
        "blocked; auto = the share min-replies of them",
    )
    round_timeout: float = Field(3600.0, ge=0, description="seconds a round waits for replies; 0 = no limit")
    wait_timeout: float = Field(600.0, ge=0, description="seconds to wait for clients at the start; 0 = no limit")
    patience: int = Field(0, ge=0, description="stop after this many rounds without a lower training loss; 0 = never")
    wire_dtype: Literal["fp32", "fp16"] = Field("fp32", description="fp16 = float32 arrays are sent in half precision")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of every random draw")
