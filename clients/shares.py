"""The bias of a head that arrives, fitted to the class shares of each client: Personal CCVR, heads from sums.

| symbol        | here                                                          |
|---------------|---------------------------------------------------------------|
| b             | bias of the head that arrives                                 |
| n_kc, n_k     | the client's own training labels: `class_counts`, their sum   |
| p_kc          | `shares(n_k, s)`: (n_kc + s) / (n_k + s C)                    |
| b_k           | b + `adjustment`, at the client alone                         |

The adjustment is made where a model is scored and kept, and nowhere else: a client never trains for a reply from b_k.
So b_k - b, which would reveal its shares, cannot leave it, whatever a server requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clients.posthoc import PostHocClient
from fedapp.core import names
from fedapp.lazy import Tensor, nn, torch
from fedapp.learning.evaluation import Scores
from fedapp.method import Arrays, Payload, Scalar

if TYPE_CHECKING:
    from fedapp.models import SplitModel

Float64 = npt.NDArray[np.float64]
PRIOR = "prior/"
"""Prefix of the payload's further arrays, on the class shares of all clients."""
PERSONAL = "personal"
"""Scalar that says that the head may be adjusted."""
PLAIN = "unadjusted"
"""Name of the score of the head before its adjustment."""
NUMBERS = tuple(f"{PLAIN}-{part}" for part in ("correct", "total", "loss-sum", "balanced"))


def shares(counts: npt.NDArray[Any], smooth: float) -> Float64:
    """Return (n_c + s) / (n + s C) of class counts (C,)."""
    found: Float64 = (counts + smooth) / (counts.sum() + smooth * len(counts))
    return found


class SharesClient(PostHocClient):
    """Adjusts the bias of a repaired head before it is scored."""

    alone = True  # `score` adds a second score to that of the stored model
    plain: dict[str, Tensor] | None = None
    """The head that arrived, where the model has another one."""
    adjusted: SplitModel | None = None
    """The model with b_k; a copy of it that is fine-tuned is another one."""

    def adjustment(self, prior: Arrays, scalars: Mapping[str, Scalar]) -> Float64:
        """Return b_k - b, (C,), from what the server sent under `PRIOR` and from its scalars."""
        raise NotImplementedError

    def receive(self, payload: Payload) -> None:
        """Take over the model, and adjust its bias if nothing of it leaves the client again."""
        model, prior = names.split(payload, PRIOR)
        super().receive(model)
        if self.scoring and payload.scalars.get(PERSONAL):
            bias = self.model.head.bias
            self.plain, self.adjusted = _copied(self.model.head), self.model
            with torch.no_grad():
                bias.add_(torch.from_numpy(self.adjustment(prior, payload.scalars)).to(bias))

    def before_training(self, payload: Payload) -> None:
        """Forget that head: once the model is trained it is not the one that arrived."""
        super().before_training(payload)
        self.plain = None

    def score(self, x: Tensor, y: Tensor, probabilities: bool = False) -> Scores:
        """Score the adjusted model and, in an evaluation, the one that arrived."""
        scores = super().score(x, y, probabilities)
        if self.plain is None or self.newcomer or self.model is not self.adjusted:
            return scores
        adjusted = _copied(self.model.head)
        self.model.head.load_state_dict(self.plain)
        plain = super().score(x, y)
        self.model.head.load_state_dict(adjusted)
        return replace(scores, further={PLAIN: plain})


def _copied(head: nn.Module) -> dict[str, Tensor]:
    return {name: array.clone() for name, array in head.state_dict().items()}
