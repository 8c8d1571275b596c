"""Models and heads that methods put into the place of the plain ones: classes that inherit from PyTorch's.

They stand here because reading a method's tables must not load PyTorch (`fedapp.lazy`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp import sampling
from fedapp.core.heads import logits, tukey
from fedapp.core.sums import UNSEEN
from fedapp.errors import BadRequest
from fedapp.models.split import SplitModel


class ModelWrapper(SplitModel):
    """A model with the body, the activation and the head of a plain one, `base`.

    Raises
    ------
    BadRequest : the base has functions of its own, which this model would not call.
    """

    def __init__(self, base: SplitModel) -> None:
        if type(base) is not SplitModel:
            raise BadRequest(
                f"model '{base.name}' is a {type(base).__name__}, and this method changes what SplitModel computes: "
                "return a SplitModel itself, or take another method"
            )
        super().__init__(name=base.name, features=base.features, activation=base.activation, head=base.head)


class BiasModel(ModelWrapper):
    """A model that adds a vector of its own to every representation before the head."""

    def __init__(self, base: SplitModel, *, trained: bool) -> None:
        super().__init__(base)
        self.bias_memory = nn.Parameter(torch.zeros(self.width), requires_grad=trained)

    def head_input(self, z: Tensor) -> Tensor:
        """Return z + z-bar_i^p, (B, d)."""
        return z + self.bias_memory


class ETFModel(ModelWrapper):
    """A body, a trained projection, and a simplex that stays: logits s * cos(u, M_c).

    Parameters
    ----------
    base : model whose body and head are taken over; the head is the projection.   scale : s.
    """

    def __init__(self, base: SplitModel, *, scale: float, train_scale: bool) -> None:
        super().__init__(base)
        from clients.fedetf import simplex  # a module that names this one

        self.scale = nn.Parameter(torch.full((1,), scale), requires_grad=train_scale)
        self.etf = nn.Parameter(simplex(self.num_classes), requires_grad=False)

    def classify(self, z: Tensor) -> Tensor:
        """Return s f^T M, (B, C), of representations (B, d)."""
        logits: Tensor = self.scale * (F.normalize(self.head(z), dim=1) @ self.etf)
        return logits


class RoDModel(ModelWrapper):
    """A model whose logits are those of its head and of a personal one, added.

    Parameters
    ----------
    base : model whose body and head are taken over; the personal head begins with zeros.
    """

    def __init__(self, base: SplitModel) -> None:
        super().__init__(base)
        self.personal = nn.Linear(self.width, self.num_classes)
        nn.init.zeros_(self.personal.weight)
        nn.init.zeros_(self.personal.bias)

    def generic(self, z: Tensor) -> Tensor:
        """Return z_g (B, C) of representations z (B, d)."""
        return super().classify(z)

    def classify(self, z: Tensor) -> Tensor:
        """Return z_p (B, C) of representations z (B, d)."""
        logits: Tensor = self.generic(z) + self.personal(z)
        return logits


class PrototypeModel(ModelWrapper):
    """A body whose head compares directions: logits s * cos(represent(x), W_c).

    Parameters
    ----------
    base : model whose body and head are taken over; the head gets orthonormal rows and no bias, and is frozen.
    scale : s.   train_scale : whether s is trained.   seed : seed of the rows.
    """

    def __init__(self, base: SplitModel, *, scale: float, train_scale: bool, seed: int) -> None:
        super().__init__(base)
        if self.num_classes > self.width:
            raise BadRequest(
                f"fednh needs at least as many features as classes, but {base.name} has {self.width} features for "
                f"{self.num_classes} classes: take a wider model"
            )
        self.scale = nn.Parameter(torch.full((1,), scale), requires_grad=train_scale)
        self.head.requires_grad_(False)
        nn.init.zeros_(self.head.bias)
        nn.init.orthogonal_(self.head.weight, generator=sampling.torch_generator(seed, "prototypes"))

    def head_input(self, z: Tensor) -> Tensor:
        """Return s * z / ||z||, (B, d), so that the head, whose bias is 0, gives s * cos(z, W_c)."""
        return self.scale * F.normalize(z, dim=1)


class NearestPrototype(nn.Module):
    """A classifier whose logits are the negative mean squared distances to the prototypes.

    A class without prototype is farther away than any other, so it is never predicted.
    """

    def __init__(self, model: SplitModel, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.model, self.prototypes, self.known = model, prototypes, known

    def forward(self, x: Tensor) -> Tensor:
        """Map images (n, channels, H, W) to (n, C)."""
        return self.logits(self.model.represent(x))

    def logits(self, z: Tensor) -> Tensor:
        """Map representations (n, r) to (n, C)."""
        distances = torch.cdist(z, self.prototypes, compute_mode="donot_use_mm_for_euclid_dist").square() / z.shape[1]
        # 100 is the distance that the released code gives to classes the client does not own.
        farthest = distances.amax(dim=1, keepdim=True) + 100.0
        return -torch.where(self.known[None, :], distances, farthest)


class LikeLinear(nn.Linear):
    """A linear layer with the values of another one, `plain`, and as trainable as it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.load_state_dict(plain.state_dict())
        for own, given in zip(self.parameters(), plain.parameters()):
            own.requires_grad_(given.requires_grad)


class CCVRHead(LikeLinear):
    """A linear head with the options of calibration: Tukey's transform before it, and weight vectors of norm 1.

    It holds ``weight`` (C, d) and ``bias`` (C,) like any linear head. ``transform`` is set from outside once the head
    is calibrated for it, so that re-training and inference see the same inputs. With ``normalise``, as in `logits`, the
    bias stays 0 and is not trained.
    """

    def __init__(self, plain: nn.Linear, normalise: bool) -> None:
        super().__init__(plain)
        self.normalise = normalise
        self.transform = False
        if normalise:
            nn.init.zeros_(self.bias)
            self.bias.requires_grad_(False)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits (B, C) of representations (B, d)."""
        return logits(tukey(z) if self.transform else z, self.weight, self.bias, self.normalise)


class QuadraticHead(LikeLinear):
    """A linear head that becomes one of Gaussian densities: logit_c = -|U_c^T (z - mu_c)|^2 / 2 + b_c.

    A quadratic head has ``weight`` (C, d), the means mu_c, ``bias`` (C,), and ``factor`` (C, d (d + 1) / 2), the upper
    triangles of U_c. A class without samples has the factor 0; its logit is `UNSEEN` plus the mean of the others.
    """

    factor: Tensor | None
    place: Tensor

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain)
        self.register_buffer("factor", None)

    def make_quadratic(self) -> None:
        """Add ``factor``, with zeros, where there is none yet."""
        if self.factor is None:
            d = self.in_features
            self.factor = torch.zeros(self.out_features, d * (d + 1) // 2, device=self.weight.device)
            place = torch.full((d, d), self.factor.shape[1], device=self.weight.device)
            rows, columns = torch.triu_indices(d, d, device=self.weight.device)
            place[rows, columns] = torch.arange(self.factor.shape[1], device=self.weight.device)
            self.register_buffer("place", place, persistent=False)  # of each entry of U_c in its packed form and a zero

    def forward(self, z: Tensor) -> Tensor:
        """Return logits (B, C) of representations (B, d)."""
        if self.factor is None:
            return super().forward(z)
        d, packed = self.in_features, F.pad(self.factor, (0, 1))
        found = torch.stack(
            [
                -0.5 * ((z - self.weight[c]) @ packed[c][self.place.flatten()].reshape(d, d)).square().sum(dim=1)
                for c in range(self.out_features)
            ],
            dim=1,
        )
        found = found + self.bias
        seen = (self.factor[:, 0] > 0).to(found)
        others = (found * seen).sum(dim=1, keepdim=True) / seen.sum()
        return torch.where(seen > 0, found, others + UNSEEN)
