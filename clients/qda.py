"""QDA, client side: the statistics of CCVR as sums, the losses of heads from sums, and a head that is quadratic.

| symbol        | here                                                            |
|---------------|-----------------------------------------------------------------|
| n_c, mu_c     | `count` and `sum` of an answer (`clients/ccvr.py`)              |
| S_c           | from `square`, sums around the mu_c that the server sent        |
| f             | the factor of `scale`, which the head's arrays contain          |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from clients.ccvr import MomentsClient
from clients.sums import HeadHParams, LossesClient
from fedapp.errors import BadRequest
from fedapp.learning.task import ModelSpec
from fedapp.learning.training import Phase
from fedapp.method import Scalar

if TYPE_CHECKING:
    from fedapp.models import SplitModel

HEAD, ANSWER = 1e9, 1e8
"""Largest head and largest answer, in bytes."""
QUADRATIC = "quadratic"
"""Scalar that says that the head is a quadratic one."""


class QDAHParams(HeadHParams):
    """Hyperparameters of QDA; those of the base method are given as `base.NAME=value`."""

    cov: ClassVar[Literal["sums"]] = "sums"
    rank: ClassVar[int] = 0
    dtype: ClassVar[str] = "float64"

    scale: Literal["auto", "fit", "none"] = Field(
        "auto",
        description="one factor for all logits, which changes no prediction: fit = the best for the losses of the "
        "clients' training rows; auto = none with dp, else fit",
    )
    share: float = Field(
        0.7, ge=0, le=1, description="h, share of the covariance within all classes in that of each class (no paper)"
    )
    shrink: float = Field(0.2, ge=1e-9, le=1, description="g, share of tr(Sigma)/d I in each covariance (no paper)")
    prior: Literal["uniform", "pooled"] = Field(
        "uniform", description="pi_c: the same for all classes, or n_c / N (no paper)"
    )
    force: bool = Field(False, description="also a head above 1 GB, and answers above 100 MB")

    def settled(self, given: bool = False) -> Self:
        """Return them with the scale that `auto` stands for: a quadratic head has none of a trained one's."""
        found = super().settled(given)
        return found.model_copy(update={"scale": "fit"}) if self.scale == "auto" else found

    def strength(self, scale: float) -> float:
        """Return the factor of the logits, if these hold log n_c / N."""
        return scale if self.prior == "pooled" else 0.0


class QDAClient(LossesClient, MomentsClient):
    """Trains as the base method's client does, answers with sums of squares, and never trains a quadratic head."""

    settings: ClassVar[QDAHParams] = QDAHParams()

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the base's model, with a linear head that can become a quadratic one.

        Raises
        ------
        BadRequest : a head or answers of an unreasonable size.
        """
        from clients._models import QuadraticHead

        model = super().build_model(spec, hparams)
        numbers = spec.num_classes * (model.width + 1) * model.width // 2
        if not cls.settings.force and (4 * numbers > HEAD or 8 * numbers > ANSWER):
            raise BadRequest(
                f"qda with {spec.num_classes} classes and {model.width} features makes answers of "
                f"{8 * numbers / 1e6:,.0f} MB and a head of {4 * numbers / 1e6:,.0f} MB: take lda, or features of a "
                "smaller width, or set force=true"
            )
        model.head = QuadraticHead(model.head)
        return model

    @classmethod
    def configure_model(cls, model: SplitModel, scalars: Mapping[str, Scalar]) -> None:
        """Make the head quadratic once the server has computed it."""
        super().configure_model(model, scalars)
        if scalars.get(QUADRATIC):
            head: Any = model.head
            head.make_quadratic()

    def phases(self) -> Sequence[Phase]:
        """Train as the base does, and nothing once the head is quadratic: it is the solution."""
        head: Any = self.model.head
        return [] if head.factor is not None else super().phases()
