"""Losses that compare representations or parameters: supervised contrastive, model-contrastive, proximal.

Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020, Eq. 2 ("outside" form): L_CL of FedClassAvg (Jang et
al., ICPP 2022, Eq. 4), whose proximal term L_R is Eq. 5. Li et al., "Model-Contrastive Federated Learning", CVPR 2021,
Eq. 3 (MOON). Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2 (FedProx).

Everything is computed in float32 at least, also inside an autocast region: FedClassAvg's published temperature gives
losses of several thousand; half precision would keep no useful digit of them. No function waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedapp.lazy import F, Tensor, torch


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def supcon(
    features: Tensor, labels: Tensor, temperature: float = 0.07, base_temperature: float = 0.07, normalise: bool = True
) -> Tensor:
    """Supervised contrastive loss over two augmented views of a batch; every row is an anchor.

    With ``s_ia = f_i . f_a / T``, ``A(i)`` all rows but i and ``P(i)`` the rows of A(i) with i's label, it is::

        (T / T_b) * mean_i ( -1/|P(i)| sum_{p in P(i)} [ s_ip - log sum_{a in A(i)} exp(s_ia) ] )

    Parameters
    ----------
    features : Tensor, (2B, d)
        First all rows of view 1, then all rows of view 2 in the same order.
    labels : Tensor, (B,) or (2B,), integer
        Labels of one view (then repeated for the other) or of every row.
    temperature, base_temperature : float
        T and T_b, both positive. The code of FedClassAvg's authors has 100 and 0.07 without normalisation, that of
        Khosla et al. 0.07 and 0.07 with it.
    normalise : bool
        Scale every row to unit length first.

    Returns
    -------
    Tensor, ()
        In nats, float32 (float64 for float64 features). Exactly 0 for a batch of one image: A(i) is then its
        twin alone. A row with an empty P(i) (possible only where labels of all rows are given) adds 0.
    """
    rows, labels = features.shape[0], labels.reshape(-1)
    if 2 * labels.shape[0] == rows:
        labels = torch.cat([labels, labels])
    with torch.autocast(features.device.type, enabled=False):
        rows_f = _at_least_float32(features)
        if normalise:
            rows_f = F.normalize(rows_f, dim=1)
        itself = torch.eye(rows, dtype=torch.bool, device=features.device)
        # a = i is masked before log_softmax, which subtracts the row's maximum: without normalisation the anchor's
        # similarity to itself can exceed all others by so much that their exponentials would be 0.
        similarity = (rows_f @ rows_f.T / temperature).masked_fill(itself, -torch.inf)
        log_probability = F.log_softmax(similarity, dim=1).masked_fill(itself, 0.0)  # 0, as 0 * -inf is NaN
        positive = (labels[:, None] == labels[None, :]).logical_and(~itself).to(log_probability.dtype)
        per_anchor = (positive * log_probability).sum(dim=1) / positive.sum(dim=1).clamp_min(1.0)
        return -(temperature / base_temperature) * per_anchor.mean()


def moon_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """MOON's model-contrastive loss (Eq. 3): near the global model's representation, away from the client's last.

    ``-log( e^{cos(z, z_g)/tau} / (e^{cos(z, z_g)/tau} + e^{cos(z, z_p)/tau}) )``, averaged over the batch. It is
    evaluated as ``-log sigmoid`` of the difference of the exponents, which cannot overflow.

    Parameters
    ----------
    z, z_global, z_previous : Tensor, (B, d)
        Representations by the model in training, the received model and the client's previous model. No gradient
        flows into the last two. Where they are equal, the value is log 2 and the gradient is exactly zero.
    tau : float
        Temperature, positive (paper: 0.5).

    Returns
    -------
    Tensor, ()
        In nats, float32 (float64 for float64 input).
    """
    with torch.autocast(z.device.type, enabled=False):
        unit, unit_global, unit_previous = (
            F.normalize(_at_least_float32(rows), dim=1) for rows in (z, z_global.detach(), z_previous.detach())
        )
        # z . z_g - z . z_p as z . (z_g - z_p): equal references then cancel exactly.
        margin = (unit * (unit_global - unit_previous)).sum(dim=1)
        return -F.logsigmoid(margin / tau).mean()


def _differences(params: Iterable[Tensor], refs: Iterable[Tensor]) -> list[Tensor]:
    """Return ``params - refs`` in float32 at least; the two lists must agree in length and shapes."""
    pairs = zip(params, refs, strict=True)
    return [_at_least_float32(param) - _at_least_float32(ref.detach()) for param, ref in pairs]


def l2_distance(params: Iterable[Tensor], refs: Iterable[Tensor]) -> Tensor:
    """Euclidean distance of all parameters taken as one vector, not squared: L_R of FedClassAvg (Eq. 5).

    Every round starts at distance zero, where the gradient of a square root is infinite; ``vector_norm`` has the
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
    """Half the sum over tensors of the mean squared difference: the proximal term in the code of FedClassAvg's authors.

    Parameters are those of `l2_distance`; the gradient is weaker by about the number of entries of the tensor.
    """
    return 0.5 * torch.stack([difference.square().mean() for difference in _differences(params, refs)]).sum()


def squared_distance(params: Iterable[Tensor], refs: Iterable[Tensor]) -> Tensor:
    """Sum of squared differences ``||w - w_ref||^2``; FedProx adds ``mu / 2`` times it to the loss.

    Parameters are those of `l2_distance`.
    """
    return torch.stack([difference.square().sum() for difference in _differences(params, refs)]).sum()
