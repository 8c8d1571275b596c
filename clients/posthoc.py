"""Client side of a method that repairs the head of another method's model (`strategies._composition.PostHoc`).

While training runs, the client is the base method's, with this class added. Afterwards it answers questions about its
features, with the final model in evaluation mode, without augmentation, on its own training split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field

from clients.base import FedClient
from fedapp.lazy import Tensor, torch
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Phase
from fedapp.method import BaseHParams

if TYPE_CHECKING:
    from fedapp.models import SplitModel


class PostHocHParams(BaseHParams):
    """What all methods that repair a head have: the method that trains."""

    base: str = Field(
        "auto",
        description="the method that trains: any that ends with one global model; none = no training; auto = none with "
        "model = identity, else fedavg",
    )
    base_args: str = Field("", description="the base method's hyperparameters; written base.NAME=value")

    def settled(self, given: bool = False) -> Self:
        """Return them with the base that `auto` stands for."""
        base = ("none" if given else "fedavg") if self.base == "auto" else self.base
        return self.model_copy(update={"base": base})


class PostHocClient(FedClient):
    """Trains as the base method's client does, and reads features in blocks.

    `settings`, with its `min_count`, and `base_hparams` are set where this class is added to the base's.
    """

    block = 1024
    settings: ClassVar[Any] = None
    base_hparams: ClassVar[BaseHParams] = BaseHParams()

    def __init__(self, task: Any, method: Any, hparams: Any, store: Any = None) -> None:
        super().__init__(task, method, self.base_hparams, store)

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the base's model."""
        return super().build_model(spec, cls.base_hparams)

    def feature_batches(self, exchange: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (z, label) of the training split: z (n, d) float32, what the last linear layer sees."""
        for z, label in super().feature_batches(exchange):
            with torch.no_grad():
                seen = self.model.head_input(z).float()
            yield seen, label

    def described(self, exchange: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `feature_batches` without the rows of classes that have fewer than `min_count` samples here."""
        many = torch.from_numpy(self.task.class_counts() >= self.settings.min_count).to(self.device)
        for z, label in self.feature_batches(exchange):
            rows = many[label]
            yield z[rows], label[rows]


class Untrained(FedClient):
    """Leaves the model as it is: the client of `base=none`."""

    def phases(self) -> Sequence[Phase]:
        """Take no step."""
        return []
