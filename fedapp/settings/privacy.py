"""Differential privacy of a client's replies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedapp.settings._group import AUTO, Group, OrAuto


class PrivacySettings(Group):
    """Differential privacy of a client's replies."""

    dp: Literal["none", "example", "sgd", "client"] = Field(
        "none",
        description="differential privacy of a client's replies, by noise at the client: example = one sample more or "
        "less (class statistics), sgd = the same for models, by noise in each step of the local training (DP-SGD), "
        "client = a whole client more or less (model updates)",
    )
    dp_epsilon: float = Field(8.0, gt=0, le=100, description="total epsilon budget of a client over all runs")
    dp_delta: float = Field(1e-5, gt=0, le=1e-2, description="delta for which epsilon holds; below 1 / rows")
    dp_noise: Annotated[float, Field(ge=0.05, le=10_000), OrAuto] = Field(
        AUTO,
        description="standard deviation of the noise as a multiple of the sensitivity to one unit, with dp = sgd in "
        "each step as a multiple of dp-clip; auto = the releases of this run spend dp-epsilon",
    )
    dp_clip: float = Field(1.0, gt=0, description="with dp = sgd: clipping norm of each sample's gradient")
    dp_test: bool = Field(
        False, description="noise from the seed, so that a run repeats: no privacy, and refused by real nodes"
    )

    @property
    def unit_features(self) -> bool:
        """Whether models scale representations to norm 1, which bounds the effect of one sample."""
        return self.dp == "example"
