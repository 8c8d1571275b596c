"""A classifier cut into a body, an activation and one linear head.

Every federated method here treats the two parts differently: the body may be private and of any architecture, the
head has the same shape at every client. `SplitModel` fixes that cut once, so that "the head" always means the same two
tensors.
"""

from __future__ import annotations

from fedapp.lazy import Tensor, nn


class SplitModel(nn.Module):
    """Image classifier `head(activation(features(x)))`.

    A subclass may put a function between the representation and the head (`head_input`).

    Parameters
    ----------
    name : in the zoo, for messages and for the header of saved states.
    features : body, maps images (B, channels, size, size) float32 to (B, width) float32. It ends *before* the last
        activation, because FedClassAvg's contrastive loss works on these signed numbers (Jang et al., ICPP 2022).
    activation : between body and head. It has no parameters and must not work in place, since `features(x)` is used on
        its own.
    head : Linear(width, num_classes) with bias.

    Attributes
    ----------
    width : number of features that the head sees.   num_classes : outputs of the head.
    unit : whether representations are brought to norm 1, as `dp = example` needs: what one image can change is then
        known.

    Raises
    ------
    ValueError : the activation works in place, or the head has no bias.

    Notes
    -----
    Names in the state dict, and so on the wire: `features.*`, `head.weight` (num_classes, width), `head.bias`
    (num_classes,).
    """

    def __init__(self, *, name: str, features: nn.Module, activation: nn.ReLU | nn.Identity, head: nn.Linear) -> None:
        super().__init__()
        if isinstance(activation, nn.ReLU) and activation.inplace:
            raise ValueError("the activation must not work in place: features(x) is used next to represent(x)")
        if head.bias is None:
            raise ValueError("the head needs a bias: head.weight and head.bias are shared by name")
        self.name = name
        self.width = head.in_features
        self.num_classes = head.out_features
        self.unit = False
        self.features = features
        self.activation = activation
        self.head = head

    def represent(self, x: Tensor) -> Tensor:
        """Return what the head sees of normalised images (B, channels, size, size) float32: (B, width) float32.

        It is `activation(features(x))`: non-negative where the activation is ReLU; with `unit` of norm 1.
        """
        z: Tensor = self.activation(self.features(x))
        return nn.functional.normalize(z, dim=1) if self.unit else z

    def head_input(self, z: Tensor) -> Tensor:
        """Return the numbers that the head multiplies, (B, width) float32; here the representations themselves.

        A model whose logits are linear in a function of its representations defines that function here.
        """
        return z

    def classify(self, z: Tensor) -> Tensor:
        """Return the logits (B, num_classes) float32 of representations, or of class means of them, (B, width)."""
        logits: Tensor = self.head(self.head_input(z))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of images (B, channels, size, size)."""
        return self.classify(self.represent(x))
