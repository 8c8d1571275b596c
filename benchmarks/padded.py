"""A method with almost no training and a payload of any size: FedAvg of the head and of a block of zeros.

The block is never trained. The overhead benchmark adds this file to `strategies/` of a copy of the app.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import nn

from clients.base import FedClient
from fedapp.learning.task import ModelSpec
from fedapp.method import BaseHParams, Method
from fedapp.models import SplitModel
from strategies.fedavg import FedAvg


class PaddedHParams(BaseHParams):
    """Size of the block."""

    numbers: int = Field(5000, ge=1, description="float32 numbers that travel beside the head")


class PaddedClient(FedClient):
    """Trains the model and sends the block with it."""

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the model with the block registered as a parameter of the extractor."""
        model = super().build_model(spec, hparams)
        model.features.register_parameter("padding", nn.Parameter(torch.zeros(hparams.numbers)))
        return model


METHOD = Method(
    id="padded",
    title="FedAvg of the head and a block",
    paper="-",
    strategy=FedAvg,
    client=PaddedClient,
    hparams=PaddedHParams,
    shared=("features.padding", "head."),
)
