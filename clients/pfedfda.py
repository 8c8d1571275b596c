"""pFedFDA, local step. McLaughlin, Su, Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS
2024.

| symbol (paper)       | here                                                                                     |
|----------------------|------------------------------------------------------------------------------------------|
| phi(x) = z           | `model.represent(x)`, (d,)                                                               |
| mu^g, Sigma^g        | `self.shared`: the Gaussians as received, one mean a class and one covariance for all    |
| hat mu_i, hat Sigma  | `estimate`: from the client's own representations, in one evaluation pass, Sigma + I     |
| beta                 | `choose`: share of the own mean and of the own covariance, two numbers in [0, 1]         |
| p_i(y)               | `log_prior`: the client's class shares, all positive                                    |

The head is never trained. It is the Bayes rule of Gaussians of one covariance with the client's own class shares,
    W_c = Sigma^-1 mu_c,   b_c = -mu_c^T Sigma^-1 mu_c / 2 + log p_c,   Sigma shrunk by eps towards tr(Sigma)/d I.
A round: take the received body; head := rule of (mu^g, Sigma^g), held fixed while the body is trained on the
cross-entropy; then mu = beta_1 hat mu + (1 - beta_1) mu^g, Sigma = beta_2 hat Sigma + (1 - beta_2) Sigma^g. These are
sent, and their rule predicts. beta minimises the cross-entropy over two stratified folds, each scored with what the
other says. As in the released code the identity is added to every estimated Sigma. That code also adds eps to every
entry, takes statistics while weights move, and searches beta with L-BFGS; here beta is the best of a grid of 11 x 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from clients.base import FedClient
from fedapp import sampling
from fedapp.core import names
from fedapp.core.adaptation import Gaussians, choose, estimate, log_prior, rule
from fedapp.core.gaussian import pack, unpack
from fedapp.lazy import torch
from fedapp.learning.training import Phase
from fedapp.method import Arrays, BaseHParams, Payload

Float64 = NDArray[np.float64]
GAUSSIANS = "gaussians/"
"""Prefix of the arrays `mean` (C, d) and `cov` (d (d + 1) / 2,), packed, both float32."""


class PFedFDAHParams(BaseHParams):
    """Hyperparameters of pFedFDA."""

    beta: Literal["cv"] | Annotated[float, Field(ge=0, le=1)] = Field(
        "cv",
        description="share of the own statistics: by two-fold cross-validation (paper), or a number for both",
    )
    eps: float = Field(
        1e-4,
        gt=0,
        le=1,
        description="share of tr(Sigma)/d I in Sigma, and added to each class share (paper: 1e-4)",
    )
    min_count: int = Field(
        2, ge=1, description="classes with fewer samples at a client take the global mean (paper: not known)"
    )


class PFedFDAClient(FedClient):
    """Trains the body under the rule of the global Gaussians and predicts with the rule of adapted ones."""

    shared: Gaussians
    beta: Float64

    def receive(self, payload: Payload) -> None:
        """Take body and Gaussians, and adapt the latter to this client: `received` is the score of their rule."""
        model, sent = names.split(payload, GAUSSIANS)
        super().receive(model)
        cov = unpack(sent["cov"].astype(np.float64), self.model.width)
        self.shared = Gaussians(sent["mean"].astype(np.float64), cov)
        self.adapt()

    def before_training(self, payload: Payload) -> None:
        """Put the rule of the global Gaussians behind the body."""
        super().before_training(payload)
        self.put(self.shared)

    def phases(self) -> Sequence[Phase]:
        """Train the body; the head stays as it is."""
        return [Phase(self.step_loss, self.training, ("features.",))]

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return the adapted Gaussians, `mean` (C, d) and `cov` (d (d + 1) / 2,), and beta of both."""
        own = self.adapt()
        arrays = {"mean": own.mean, "cov": pack(own.cov)}
        numbers = {"beta-mean": float(self.beta[0]), "beta-cov": float(self.beta[1])}
        return {GAUSSIANS + name: array.astype(np.float32) for name, array in arrays.items()}, numbers

    def adapt(self) -> Gaussians:
        """Return the adapted Gaussians of the present body, and put their rule behind it."""
        s, y = self.hparams, self.task.y_train.cpu().numpy()
        z = self.representations().double().cpu().numpy()
        if s.beta == "cv":
            rng = sampling.rng(self.task.seed, "folds", self.round, self.task.client)
            prior = log_prior(y, self.task.num_classes, s.eps)
            self.beta = choose(z, y, self.shared, prior, s.eps, s.min_count, rng)
        else:
            self.beta = np.full(2, s.beta)
        own = estimate(z, y, self.shared, s.min_count).mixed(self.shared, self.beta.tolist())
        self.put(own)
        return own

    def put(self, of: Gaussians) -> None:
        """Make the head the rule of these Gaussians with the client's own class shares."""
        y, head = self.task.y_train.cpu().numpy(), self.model.head
        found = torch.from_numpy(rule(of, log_prior(y, self.task.num_classes, self.hparams.eps), self.hparams.eps))
        with torch.no_grad():
            head.weight.copy_(found[:, :-1])
            head.bias.copy_(found[:, -1])
