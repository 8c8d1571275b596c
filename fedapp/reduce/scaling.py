"""The exchange before round 1 from which mean and deviation of the features of all clients follow."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedapp.errors import BadRequest, Impossible
from fedapp.method import Arrays, BaseHParams, Method, ServerContext
from fedapp.reduce.spec import Total

KIND = "scaling"
"""The kind of the query."""
SCALING = f"{KIND}/"
"""Prefix of the arrays of an answer."""
TOLERANCE = 1e-9
"""How far rounding may take squares from possible ones, relative to these."""
FLOOR = 1e-3
"""Least deviation of a feature, as a multiple of the root mean square of all deviations."""
SMALL = 2.0**-8
"""Least root mean square of the deviations: features are rounded before they are added up."""


def _empty(context: ServerContext) -> Arrays:
    width = context.shape[0]
    return {"count": np.zeros(1), "sum": np.zeros(width), "square": np.zeros(width)}


def _problem(context: ServerContext, arrays: Arrays, lost: float) -> str | None:
    """Return why arrays cannot be a count, sums and sums of squares, or None."""
    form, own = ({n: (a.shape, a.dtype) for n, a in of.items()} for of in (_empty(context), arrays))
    if own != form:
        return Impossible(f"the scaling of {context.shape[0]} features needs count, sum and square in float64")
    count, total, square = arrays["count"][0], arrays["sum"], arrays["square"]
    if not count >= 1 or count != np.rint(count):
        return Impossible("count must be a number of samples")
    least = total**2 / count * (1 - TOLERANCE) - lost
    return None if bool((square >= least).all()) else "no features have these sums and squares"


MOMENTS = Total(
    SCALING, _empty, _problem, lambda arrays: float(arrays["count"][0]), capped=False,
    terms={"sum": "features", "square": "products"}, least=None,
)  # fmt: skip


def with_scaling(method: Method, hparams: BaseHParams) -> Method:
    """Return the method with this exchange, in which all clients take part, before its own."""
    return dataclasses.replace(
        method,
        extra_up=(*method.extra_up, SCALING),
        queries=(*method.queries, KIND),
        reduces={**method.reductions(hparams), f"query.{KIND}": {"moments": MOMENTS}},
    )


def moments_from(sums: Arrays) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation (ddof 0) of each feature; the deviation has a floor.

    Raises
    ------
    BadRequest : the deviations are so small that the sums are not those of the features.
    """
    mean = sums["sum"] / sums["count"]
    variance = np.maximum(sums["square"] / sums["count"] - mean**2, 0)
    whole = float(np.sqrt(variance.mean()))
    if whole < SMALL:
        raise BadRequest(
            f"the features have a deviation of {whole:.2g}, too small to be standardised: multiply them by a constant"
        )
    return mean.tolist(), np.maximum(np.sqrt(variance), FLOOR * whole).tolist()
