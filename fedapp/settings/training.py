"""The local training of a client."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedapp.settings._group import AUTO, Group, NonNegative, OrAuto


class TrainingSettings(Group):
    """The local training of a client."""

    local_epochs: int = Field(2, ge=1, description="epochs of local training per round")
    batch_size: int = Field(16, ge=1, description="samples per step")
    lr: Annotated[float, Field(gt=0), OrAuto] = Field(AUTO, description="learning rate")
    optimizer: str = Field(
        "auto", description="local optimizer, new in every round: a class of torch.optim in lower case, such as adamw"
    )
    optimizer_args: str = Field("", description='further arguments of the optimizer, "name=value name=value"')
    lr_schedule: str = Field(
        "",
        description="learning rate by round: a class of torch.optim.lr_scheduler and its arguments, such as "
        '"CosineAnnealingLR eta_min=0.001"; its length is by default the number of rounds; empty = lr in all rounds',
    )
    warmup_rounds: int = Field(
        0, ge=0, description="rounds in which the learning rate rises linearly, before lr-schedule begins"
    )
    lr_schedule_steps: str = Field(
        "", description="the same over the steps of a round: its rates divided by lr are factors of the round's rate"
    )
    momentum: Annotated[float, Field(ge=0, lt=1), OrAuto] = Field(AUTO, description="momentum of SGD and RMSprop")
    weight_decay: Annotated[NonNegative, OrAuto] = Field(AUTO, description="L2 weight decay")
    clip: Annotated[NonNegative, OrAuto] = Field(AUTO, description="largest gradient norm; 0 = no limit")
    class_weights: str = Field(
        "none",
        description="weights of the classes in the supervised loss: none, balanced (n / (C n_c) of each client's "
        "training split), or a number for each class, comma-separated",
    )
    augment: Literal["auto", "none", "weak", "strong"] = Field("auto", description="augmentation of training rows")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 = autocast in training and scores of clients")
    buffers: Literal["global", "local", "drop"] = Field(
        "global", description="treatment of BatchNorm statistics; local and drop leave out the score global"
    )
    threads: int = Field(1, ge=1, le=1024, description="threads of each client; they affect the last bits")
