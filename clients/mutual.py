"""A client with two models: its own, private one, and a small one that all clients share (FML, FedKD).

Both are trained on every batch by one optimizer. Targets taken from the other model are constants, so this amounts to
one step on each model, both from the predictions before the step. The small model's arrays travel under `small/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import Field, field_validator

from clients.base import FedClient
from fedapp.core import names
from fedapp.errors import suggest_choice
from fedapp.lazy import Tensor, nn
from fedapp.learning.training import Phase
from fedapp.method import ALL, Arrays, BaseHParams, Payload
from fedapp.method import SECOND as SMALL
from fedapp.models import MODEL_NAMES, build_model, check_form, default_small, is_own, own, selection

if TYPE_CHECKING:
    from fedapp.models import SplitModel

prefixed, stripped = functools.partial(names.prefixed, SMALL), functools.partial(names.under, SMALL)
"""Put the prefix before names of arrays, and take the arrays with it without it."""
Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""A mean loss of logits (B, C) and labels (B,)."""


class MutualHParams(BaseHParams):
    """What both methods need: which small model."""

    small: str = Field(
        "auto",
        description="architecture of the shared small model, the same for all clients (FedGH's comparison: fedgh-5); "
        "auto = digits-c for 8x8 images, cnn-d for others, mlp for other data; your own: package.module:function",
    )

    @field_validator("small")
    @classmethod
    def _known(cls, name: str) -> str:
        if is_own(name):
            check_form(name, own.PLAIN)
        elif name != "auto" and name not in MODEL_NAMES:
            raise ValueError(
                f"unknown model '{name}'{suggest_choice(name, ('auto', *MODEL_NAMES), ' or package.module:function')}"
            )
        return name


def build_small(hparams: Any, *, num_classes: int, shape: tuple[int, ...], seed: int) -> SplitModel:
    """Build the small model; server and clients call the same function."""
    name = hparams.small if hparams.small != "auto" else default_small(shape)
    return build_model(name, num_classes=num_classes, shape=shape, seed=seed)


def small_arrays(small: nn.Module) -> Arrays:
    """Copy the arrays of a small model that travel: parameters and floating-point buffers, by wire name."""
    return selection.extract(small, selection.shared_names(small, ALL))


class MutualClient(FedClient):
    """Trains the private model and the small one together; the losses are the method's."""

    @functools.cached_property
    def small(self) -> SplitModel:
        """The small model, built as the server does; `receive` gives it the server's arrays."""
        spec = self.task.spec(0)
        return build_small(self.hparams, num_classes=spec.num_classes, shape=spec.shape, seed=0)

    def receive(self, payload: Payload) -> None:
        """Give the small model the server's arrays; the private model stays as it is."""
        arrays = self.received_small(payload)
        missing = [name for name in selection.shared_names(self.small, ALL) if name not in arrays]
        if missing:
            raise ValueError(
                f"the server sent no '{SMALL}{missing[0]}' ({len(missing)} arrays of the small model are missing)"
            )
        selection.merge(self.small, arrays)
        self.small.to(self.device)

    def received_small(self, payload: Payload) -> Arrays:
        """Return the small model's arrays by wire name; FedKD rebuilds them from an update."""
        return stripped(payload.all())

    def phases(self) -> Sequence[Phase]:
        """Train both models at once."""
        both = nn.ModuleList([self.model, self.small])
        return [Phase(self.step_loss, self.training, model=both, parameters=self.groups)]

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameters of both models, in groups of their own: `clip` bounds each as if trained alone."""
        return [{"params": list(model.parameters())} for model in (self.model, self.small)]
