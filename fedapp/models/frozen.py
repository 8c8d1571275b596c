"""The frozen layer of the model `identity`: random Fourier features of standardised features.

`model-args` of `identity` name it: "random-features=2000 gamma=0.3 seed=11". Before round 1 the server computes mean
and deviation of the features of all clients; "standardise=true" is this standardisation alone.
"""

from __future__ import annotations

import functools
import math

from pydantic import Field

from fedapp.core import fourier
from fedapp.errors import BadRequest, described, hyperparameters, named_values
from fedapp.lazy import nn, torch
from fedapp.method import BaseHParams
from fedapp.settings import ModelSettings

IDENTITY = "identity"
"""The model of data that are features already: `auto` stands for it where `fedapp features` made the data."""
ADAPTER = "adapter"
"""The model of such data with a private layer before the head: clients may then have different bodies."""
MOST = 2500
"""Random features above which a client's second moments are larger than 25 MB."""


class FrozenArgs(BaseHParams):
    """The `model-args` of `identity`."""

    standardise: bool = False
    random_features: int = Field(0, ge=0)
    gamma: float = Field(0.3, gt=0)
    seed: int = Field(11, ge=0, lt=2**63)
    force: bool = False

    @property
    def scaled(self) -> bool:
        """Whether features are standardised by mean and deviation of the features of all clients."""
        return self.standardise or self.random_features > 0

    @property
    def largest(self) -> float:
        """Bound on the absolute value of a random feature."""
        return round(math.sqrt(2 / self.random_features) / fourier.STEP) * fourier.STEP

    def matrix(self, width: int) -> tuple[fourier.Float64, fourier.Float64]:
        """Return W (d, D) and u (D,) for features of this width d."""
        return fourier.directions(width, self.random_features, self.gamma, self.seed)


def of(name: str, settings: ModelSettings) -> FrozenArgs:
    """Return the arguments of a model if it is `identity`; their defaults for all others.

    Raises
    ------
    BadRequest : an unknown name, a value out of range, or more random features than are sent without `force`.
    """
    return _read(settings.model_args if name == IDENTITY else "")


@functools.lru_cache(maxsize=16)
def _read(text: str) -> FrozenArgs:
    found = hyperparameters(IDENTITY, FrozenArgs, named_values("model-args", text, ""), key="model-args")
    if found.random_features > MOST and not found.force:
        raise BadRequest(
            f"model-args: random-features = {found.random_features} makes answers of "
            f"{4 * found.random_features**2 / 1e6:,.0f} MB a client for heads from sums: take {MOST} or fewer, or add "
            "force=true"
        )
    return found


def stages(name: str, shape: tuple[int, ...], settings: ModelSettings) -> list[tuple[str, nn.Module]]:
    """Return the frozen layers of a model for samples of this shape, with their names.

    Raises
    ------
    BadRequest : the samples are not rows of features.
    """
    args = of(name, settings)
    if args.scaled and len(shape) != 1:
        raise BadRequest(
            f"model-args of {IDENTITY} are for rows of features, and this data has {described(shape)}: leave them out, "
            "on real nodes with normalise = none"
        )
    if not args.random_features:
        return []
    from fedapp.models.blocks import RandomFeatures

    torch.empty(shape[0], args.random_features)  # the size of W, so that a bound on memory holds for it too
    return [("random", RandomFeatures(*args.matrix(shape[0])))]
