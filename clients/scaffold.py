"""SCAFFOLD, local step. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning, ICML 2020.

| symbol (paper)  | here                                                                        |
|-----------------|-----------------------------------------------------------------------------|
| x, c            | the model as received, arrays `control/<name>` of the payload               |
| c_i             | `self.own["control/<name>"]`, 0 at first                                    |
| g_i(y)          | `p.grad` of a step                                                          |
| K               | `self.report.steps`                                                         |
| Delta c_i       | `control/<name>` of the reply                                               |

Algorithm 1:  K times  y <- y - eta (g_i(y) - c_i + c);  then option II  c_i+ = c_i - c + (x - y) / (K eta).
For the paper's plain SGD  x - y = eta sum (g_i - c_i + c),  so that c_i+ is the mean of the K gradients g_i. Here it is
that mean, taken step by step: it needs no step size. With momentum beta the division by K eta would give c_i+ up to
1 / (1 - beta) times too long. The default is plain SGD, as in the paper, with 1 / (1 - 0.9) = 10 times the common
learning rate 0.01: the length that momentum 0.9 gives the steps of the other methods.

A training for a score alone (`scoring`) is not corrected. c - c_i turns a client's steps towards the mean of all
clients, and such a training has to fit the client's own data: nothing is averaged after it.

The server has c_i as the sum of the Delta c_i that it got. So a client whose last reply did not count goes on from the
c_i before it, `self.own["counted/<name>"]`; else c would be off by that change for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from clients.base import FedClient
from fedapp.core import names
from fedapp.lazy import Tensor, torch
from fedapp.learning.training import Phase
from fedapp.method import Array, Arrays, BaseHParams, Payload

CONTROL = "control/"
COUNTED = "counted/"
"""Private arrays: the c_i that the server has, until it gets that of the round."""


class ScaffoldHParams(BaseHParams):
    """Hyperparameters of SCAFFOLD."""

    server_lr: float = Field(1.0, gt=0, description="eta_g, global step (paper: 1, which is the mean of the models)")
    weights: Literal["uniform", "samples"] = Field(
        "uniform", description="weight of a client in the means of models and control variates: 1 (paper), or n_k"
    )
    correct: bool = Field(
        True, description="whether steps are corrected; false is a control: FedAvg, where weights are samples"
    )


class ScaffoldClient(FedClient):
    """Local training with corrected gradients; of the control variate c_i the changes are sent."""

    def receive(self, payload: Payload) -> None:
        """Take x, and set c and c_i aside, the latter as the server has it: 0 in a new run, whose c is 0.

        `clip-update` bounds the change of x alone.
        """
        kept = CONTROL if self.stored is None or self.stored.counted else COUNTED
        found = {} if self.stored is not None and self.stored.round == 0 else names.under(kept, self.own)
        self.own = {prefix + name: a for prefix in (CONTROL, COUNTED) for name, a in found.items()}
        rest, self.c = names.split(payload, CONTROL)
        super().receive(rest)

    def own_control(self, name: str) -> Array:
        """Return c_i of one array."""
        return self.own.get(CONTROL + name, np.zeros_like(self.c[name]))

    def before_training(self, payload: Payload) -> None:
        """Prepare c - c_i of every trained array, and the sum of its gradients."""
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.correction = [torch.from_numpy(self.c[n] - self.own_control(n)).to(self.device) for n in self.names]
        self.gradients = [torch.zeros_like(correction) for correction in self.correction]

    def phases(self) -> Sequence[Phase]:
        """Train everything with corrected gradients."""
        return [Phase(self.step_loss, self.training, on_gradients=self.correct)]

    def correct(self, parameters: list[Tensor]) -> None:
        """Add g_i to its sum, then c - c_i to the gradient; a tensor that the loss does not depend on has g_i = 0."""
        for p, gradient, correction in zip(parameters, self.gradients, self.correction, strict=True):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradient += p.grad
            if self.hparams.correct and not self.scoring:
                p.grad += correction

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Keep c_i+, and return Delta c_i = c_i+ - c_i: 0 for untrained arrays, and without steps."""
        change = {name: np.zeros_like(c) for name, c in self.c.items()}
        if self.report.steps:
            for name, total in zip(self.names, self.gradients, strict=True):
                new = (total / self.report.steps).cpu().numpy()
                change[name] = new - self.own_control(name)
                self.own[CONTROL + name] = new
        return names.prefixed(CONTROL, change), {}
