"""The files of a run: clients' states, run directory, trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedapp.settings._group import Group


class StorageSettings(Group):
    """The files of a run: clients' states, run directory, trackers."""

    state_dir: str = Field("", description="folder of the clients' private state; empty = OUT/state")
    federation: str = Field("", description="name under which clients store their state; empty = run")
    lost_state: Literal["refuse", "restart"] = Field(
        "refuse",
        description="treatment of a client whose stored state is lost, damaged, older than its last reply or another "
        "client's: refuse = it is left out and named; restart = it starts again, marked in the tables",
    )
    warm_start: bool = Field(False, description="clients start from their state after an earlier run")
    track: str = Field(
        "",
        description="trackers of the run, comma-separated: tensorboard, mlflow, "
        "wandb, or those of installed packages; empty = none",
    )
    out: str = Field("", description="absolute path of the run directory")
    resume: bool = Field(False, description="continue the run in OUT from its last checkpoint")
