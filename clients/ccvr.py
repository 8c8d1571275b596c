"""CCVR, client side. Luo, Chen, Hu, Zhang, Liang, Feng, No Fear of Heterogeneity: Classifier Calibration for Federated
Learning with Non-IID Data, NeurIPS 2021.

| symbol (paper)     | here                                                                              |
|--------------------|-----------------------------------------------------------------------------------|
| f(x) = z           | `head_input(represent(x))` of the model, (d,): what the last linear layer sees    |
| g, phi = (W, b)    | `model.head`                                                                      |
| N_ck               | `count`                                                                           |
| mu_ck, Sigma_ck    | `mean`, `cov` (Eq. 2, divisor N_ck - 1; zero where N_ck is 1)                     |
| phi^{t-1}          | `received_head`                                                                   |
| mu (Sec. 3.3)      | `settings.clsprox`                                                                |

While training runs, the client is the base method's, with this class added. After the last round it answers one query
(Algorithm 1, lines 3 to 10): Eq. 2 on its own training split, with the final model in evaluation mode, without
augmentation, in one pass and in float64. N_ck travels too, since Eq. 3 and 4 need it. Classes that the client does not
have are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from clients.posthoc import PostHocClient, PostHocHParams
from fedapp.core import gaussian, heads
from fedapp.core.contrastive import squared_distance
from fedapp.core.gaussian import ClassMoments
from fedapp.core.names import prefixed
from fedapp.lazy import Tensor, torch
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Batch
from fedapp.method import Arrays, Payload, Scalar

if TYPE_CHECKING:
    from fedapp.models import SplitModel

STATISTICS, FEATURES = "statistics/", "features/"
"""Prefixes of the arrays of an answer."""
CENTRES = STATISTICS + "centres"
"""Name of mu_c in a query: the answer's sums are centred on it."""


class CCVRHParams(PostHocHParams):
    """Hyperparameters of CCVR; those of the base method are given as `base.NAME=value`."""

    samples: int = Field(
        100, ge=1, description="M_c, virtual samples per class (paper: 100, 500, 1000; Table 2 at alpha <= 0.1: 2000)"
    )
    mc_mode: Literal["fixed", "proportional"] = Field(
        "fixed",
        description="M_c the same for all classes, or in proportion to N_c / |D| (paper: fixed; Sec. 4 names both)",
    )
    transform: Literal["none", "feature", "sample", "sample-only"] = Field(
        "none",
        description="ReLU and root (Tukey's ladder): feature = before the statistics, sample = of the virtual samples, "
        "both also before the head; sample-only = not before the head (paper: where is not said)",
    )
    cov: Literal["full", "diag", "lowrank", "pooled", "sums"] = Field(
        "full", description="form in which covariances travel (paper: full)"
    )
    rank: int = Field(16, ge=1, description="directions kept per class where cov is lowrank")
    dtype: Literal["float32", "float64"] = Field("float32", description="of means and covariances on the wire")
    shrink: float = Field(0.0, ge=0, le=1, description="share of the pooled covariance mixed in (paper: none)")
    min_count: int = Field(
        1, ge=1, description="classes with fewer samples at a client stay there; 3 for privacy (paper: 1)"
    )
    lr: float = Field(0.01, gt=0, description="learning rate of the head's re-training (paper: not known)")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the head's re-training (paper: not known)")
    weight_decay: float = Field(1e-5, ge=0, description="weight decay of the head's re-training (paper: not known)")
    epochs: int = Field(
        30, ge=0, description="passes over the virtual samples (paper: not known); 0 = no calibration: the base's model"
    )
    batch: int = Field(64, ge=1, description="samples per step (paper: not known)")
    oracle: bool = Field(
        False, description="also calibrate on the clients' real features, for comparison; not deployable (Sec. 3.3)"
    )
    oracle_samples: int = Field(0, ge=0, description="real features per class, 0 = all (Table 5: all, 1000, 100)")
    clsnorm: bool = Field(False, description="train and infer with weight vectors of norm 1 and no bias (Sec. 3.3)")
    clsprox: float = Field(0.0, ge=0, description="mu of the proximal term on the head while training (Sec. 3.3)")

    exact: ClassVar = {
        ("oracle", True): "sends the features themselves: leave it out",
        **{("cov", c): "has no form with noise: only full and sums have one" for c in ("diag", "lowrank", "pooled")},
        **{
            ("transform", t): "changes the norm that bounds what one row can change: take transform=none"
            for t in ("feature", "sample", "sample-only")
        },
    }

    @property
    def transforms_input(self) -> bool:
        """Whether a head that was calibrated sees transformed representations."""
        return self.transform in ("feature", "sample")

    def before_head(self, samples: int) -> bool:
        """Whether the transform stands before a head after its re-training on that many samples.

        A head that took no step is the base's: it was trained on plain representations and must go on to see these.
        """
        return self.transforms_input and self.epochs > 0 and samples > 0


class MomentsClient(PostHocClient):
    """Answers with Gaussian statistics; `settings` has their form, `cov`, `rank` and `dtype`."""

    def receive(self, payload: Payload) -> None:
        """Take over the model; the centres of a query are not part of it."""
        super().receive(Payload({n: a for n, a in payload.all().items() if n != CENTRES}, {}, payload.scalars))

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer `statistics` (N_ck and Eq. 2), or `totals` (sent before it with cov=sums)."""
        s = self.settings
        if kind == "statistics":
            centres = payload.all()[CENTRES] if s.cov == "sums" else None
            found = gaussian.to_arrays(self.moments(kind), s.cov, s.rank, s.dtype, centres)
            return prefixed(STATISTICS, found), self.measure("received")
        if kind == "totals" and s.cov == "sums":
            totals = gaussian.sums(self.moments(kind))
            return prefixed(STATISTICS, {n: totals[n] for n in ("count", "sum")}), {}
        return super().answer(kind, payload)

    def moments(self, kind: str) -> ClassMoments:
        """Return count, mean and scatter of z, or of T(z), of every class that has `min_count` samples here."""
        found = ClassMoments(self.task.num_classes, self.model.width, gaussian.form_of(self.settings.cov))
        for z, label in self.described(kind):
            # Algorithm 1, lines 6 and 7; `to_arrays` divides by N_ck - 1 (Eq. 2).
            found.update(self.transformed(z), label)
        return found

    def transformed(self, z: Tensor) -> Tensor:
        """Return T(z); here z."""
        return z


class CCVRClient(MomentsClient):
    """Trains as the base method's client does, and answers with Gaussian statistics and, for the oracle, features."""

    settings: ClassVar[CCVRHParams] = CCVRHParams()

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the base's model, with a head that can do what the settings ask for."""
        model = super().build_model(spec, hparams)
        if cls.settings.clsnorm or cls.settings.transforms_input:
            from clients._models import CCVRHead

            model.head = CCVRHead(model.head, cls.settings.clsnorm)
        return model

    @classmethod
    def configure_model(cls, model: SplitModel, scalars: Mapping[str, Scalar]) -> None:
        """Put Tukey's transform before the head once the head is calibrated for it."""
        super().configure_model(model, scalars)
        if cls.settings.transforms_input:
            head: Any = model.head
            head.transform = bool(scalars.get("tukey", False))

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer also `features` (the oracle)."""
        if kind == "features" and self.settings.oracle:
            return prefixed(FEATURES, self.features()), {}
        return super().answer(kind, payload)

    def transformed(self, z: Tensor) -> Tensor:
        """Return T(z) where the statistics are of it."""
        return heads.tukey(z) if self.settings.transform == "feature" else z

    def features(self) -> Arrays:
        """Return the head's input for every training image, (n, d) float32, and the labels: for the oracle only."""
        z, label = (torch.cat(parts) for parts in zip(*self.feature_batches("features")))
        z = heads.tukey(z) if self.settings.transforms_input else z
        return {"z": z.cpu().numpy(), "label": label.cpu().numpy()}


class Proximal(PostHocClient):
    """Adds a proximal term on the head to the base's loss (`clsprox`)."""

    settings: ClassVar[CCVRHParams] = CCVRHParams()
    received_head: list[Tensor]

    def before_training(self, payload: Payload) -> None:
        """Keep phi^{t-1}."""
        super().before_training(payload)
        self.received_head = self.snapshot("head.")

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the base's loss + mu/2 ||phi - phi^{t-1}||^2."""
        loss = super().step_loss(batch)  # first: the order in which gradients are added up decides their last bits
        distance = squared_distance(list(self.model.head.parameters()), self.received_head)
        return loss + 0.5 * self.settings.clsprox * distance
