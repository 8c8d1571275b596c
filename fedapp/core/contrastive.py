"""Losses that compare representations or parameters: supervised contrastive, model-contrastive, proximal.

Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020, Eq. 2 ("outside" form), as FedClassAvg uses it
(Jang et al., ICPP 2022, local loss). Li et al., "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3 (MOON).
Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020 (FedProx).

Everything is computed in float32 at least, also inside an autocast region: FedClassAvg's published temperature gives
losses of several thousand, of which half precision would keep no useful digit. No function waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["l2_distance", "moon_contrast", "mse_half", "squared_distance", "supcon"]


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def supcon(
    features: Tensor,
    labels: Tensor,
    temperature: float = 0.07,
    base_temperature: float = 0.07,
    normalise: bool = True,
) -> Tensor:
    """Supervised contrastive loss over two augmented views of a batch, every row being an anchor.

    With ``s_ia = f_i . f_a / T``, ``A(i)`` all rows but i and ``P(i)`` the rows of A(i) with i's label::

        (T / T_b) * mean_i ( -1/|P(i)| sum_{p in P(i)} [ s_ip - log sum_{a in A(i)} exp(s_ia) ] )

    Parameters
    ----------
    features : Tensor, (2B, d)
        First all rows of view 1, then all rows of view 2 in the same order.
    labels : Tensor, (B,) or (2B,), integer
        Labels of one view (then repeated for the other) or of every row.
    temperature, base_temperature : float
        T and T_b, both positive. FedClassAvg's authors use 100 and 0.07 without normalisation; Khosla et al. 0.07
        and 0.07 with it.
    normalise : bool
        Scale every row to unit length first.

    Returns
    -------
    Tensor, ()
        In nats, float32 (float64 for float64 features). Exactly 0 for a batch of one image, whose only other row is
        its twin. A row without any positive (possible only when labels of all rows are given) adds 0.

    Raises
    ------
    ValueError
        Fewer than two rows, a number of labels that fits neither form, or a temperature that is not positive.
    """
    rows = features.shape[0]
    if features.ndim != 2 or rows < 2:
        raise ValueError(f"features must have shape (2B, d) with at least two rows, got {tuple(features.shape)}")
    if temperature <= 0 or base_temperature <= 0:
        raise ValueError(f"temperatures must be positive, got {temperature} and {base_temperature}")
    labels = labels.reshape(-1)
    if 2 * labels.shape[0] == rows:
        labels = torch.cat([labels, labels])
    elif labels.shape[0] != rows:
        raise ValueError(f"{rows} rows need {rows} labels or half as many, got {labels.shape[0]}")
    with torch.autocast(features.device.type, enabled=False):
        rows_f = _at_least_float32(features)
        if normalise:
            rows_f = functional.normalize(rows_f, dim=1)
        itself = torch.eye(rows, dtype=torch.bool, device=features.device)
        # The row maximum that log_softmax subtracts must not be the anchor's similarity to itself: with features that
        # are not normalised it can exceed the others by so much that all of them underflow. Hence the mask comes first.
        similarity = (rows_f @ rows_f.T / temperature).masked_fill(itself, -torch.inf)
        log_probability = functional.log_softmax(similarity, dim=1).masked_fill(itself, 0.0)
        positive = (labels[:, None] == labels[None, :]).logical_and(~itself).to(log_probability.dtype)
        per_anchor = (positive * log_probability).sum(dim=1) / positive.sum(dim=1).clamp_min(1.0)
        return -(temperature / base_temperature) * per_anchor.mean()


def moon_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """Model-contrastive loss of MOON: near the global model's representation, away from the previous local one's.

    ``-log( e^{cos(z, z_g)/tau} / (e^{cos(z, z_g)/tau} + e^{cos(z, z_p)/tau}) )``, averaged over the batch: the
    cross-entropy of two classes of which the first is right, evaluated as ``-log sigmoid`` of the difference.

    Parameters
    ----------
    z, z_global, z_previous : Tensor, (B, d)
        Representations by the model in training, the received one and the client's previous one. No gradient flows
        into the last two. If they are equal the value is log 2 and the gradient is exactly zero.
    tau : float
        Temperature, positive (paper: 0.5).

    Returns
    -------
    Tensor, ()
        In nats, float32 (float64 for float64 input).
    """
    if tau <= 0:
        raise ValueError(f"tau must be positive, got {tau}")
    with torch.autocast(z.device.type, enabled=False):
        unit, unit_global, unit_previous = (
            functional.normalize(_at_least_float32(rows), dim=1) for rows in (z, z_global.detach(), z_previous.detach())
        )
        # The difference is taken between the references, not between the cosines: equal references then cancel exactly.
        margin = (unit * (unit_global - unit_previous)).sum(dim=1)
        return -functional.logsigmoid(margin / tau).mean()


def _differences(params: Iterable[Tensor], refs: Iterable[Tensor]) -> list[Tensor]:
    """Return ``params - refs`` in float32 at least; the two lists must agree in length and shapes."""
    pairs = list(zip(params, refs, strict=True))
    if not pairs:
        raise ValueError("a proximal term needs at least one parameter")
    for param, ref in pairs:
        if param.shape != ref.shape:
            raise ValueError(f"a parameter has shape {tuple(param.shape)}, its reference {tuple(ref.shape)}")
    return [_at_least_float32(param) - _at_least_float32(ref.detach()) for param, ref in pairs]


def l2_distance(params: Iterable[Tensor], refs: Iterable[Tensor]) -> Tensor:
    """Euclidean distance of all parameters taken as one vector, not squared (FedClassAvg, Eq. 5).

    Every round starts at distance zero, where the gradient of a square root is infinite; ``vector_norm`` returns the
    subgradient 0 there.

    Parameters
    ----------
    params, refs : iterable of Tensor
        The parameters in training and the received ones, in the same order. No gradient flows into ``refs``.

    Returns
    -------
    Tensor, ()
    """
    differences = torch.cat([difference.reshape(-1) for difference in _differences(params, refs)])
    distance: Tensor = torch.linalg.vector_norm(differences)
    return distance


def mse_half(params: Iterable[Tensor], refs: Iterable[Tensor]) -> Tensor:
    """Half the sum over tensors of the mean squared difference: the proximal term of FedClassAvg's released code.

    Against `l2_distance`, whose parameters it takes, its gradient is weaker by about the number of entries of the
    tensor.
    """
    return 0.5 * torch.stack([difference.square().mean() for difference in _differences(params, refs)]).sum()


def squared_distance(params: Iterable[Tensor], refs: Iterable[Tensor]) -> Tensor:
    """Sum of squared differences ``||w - w_ref||^2``; FedProx adds ``mu / 2`` times it to the loss.

    Parameters are those of `l2_distance`.
    """
    return torch.stack([difference.square().sum() for difference in _differences(params, refs)]).sum()
