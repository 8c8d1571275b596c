"""Scoring a model: one evaluator for all methods and protocols, and metrics of its probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp import plugins
from fedapp.data.transforms import InputSpec, channels_first, normalise
from fedapp.errors import BadRequest, raised
from fedapp.lazy import F, Tensor, nn, torch

BATCH = 128
"""Images per forward pass in scoring; the scores do not depend on it beyond float32 rounding."""


@dataclass(frozen=True)
class Scores:
    """Sums and counts, from which every average recomputes.

    Attributes
    ----------
    correct, total : (C,) int64 per class.
    loss_sum : sum of the samples' cross-entropies, in nats.
    probabilities : (n, C) float64, the softmax of the logits that the loss is of; None where they were not asked for.
    further : other scores on the same samples, by name, for the same reply.   numbers : a method's own, for it too.
    """

    correct: NDArray[np.int64]
    total: NDArray[np.int64]
    loss_sum: float
    probabilities: NDArray[np.float64] | None = None
    further: Mapping[str, Scores] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.total.sum())

    @property
    def accuracy(self) -> float:
        """Share of correct predictions, NaN without samples."""
        return float(self.correct.sum() / self.n) if self.n else float("nan")

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats, NaN without samples."""
        return self.loss_sum / self.n if self.n else float("nan")

    @property
    def balanced(self) -> float:
        """Mean over the classes that are present of their share of correct predictions, NaN without samples."""
        present = self.total > 0
        if not present.any():
            return float("nan")
        return float((self.correct[present] / self.total[present]).mean())


def batched(function: Callable[[Tensor], Tensor], x: Tensor, inputs: InputSpec, batch: int = BATCH) -> Tensor:
    """Apply a function to normalised batches of images, without gradients.

    Parameters
    ----------
    function : maps (B, C, H, W) float32 to (B, ...).
    x : (n, H, W, C) uint8, n >= 1.   inputs : how images are normalised.   batch : images per call.

    Returns
    -------
    (n, ...) the results of all batches, in the order of `x`.
    """
    with torch.inference_mode():
        parts = [function(normalise(channels_first(x[i : i + batch]), inputs)) for i in range(0, len(x), batch)]
        return torch.cat(parts)


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    inputs: InputSpec,
    num_classes: int,
    batch: int = BATCH,
    precision: str = "fp32",
    probabilities: bool = False,
) -> Scores:
    """Score a model in evaluation mode; the mode that it was in is restored.

    Parameters
    ----------
    model : maps (B, C, H, W) float32 to logits (B, num_classes).
    x : (n, H, W, C) uint8.   y : (n,) int64, values below num_classes.   inputs : how images are normalised.
    batch : images per forward pass.
    precision : as in training, `fp32`, or `bf16` for autocast of the forward pass. The loss is computed in float32.

    probabilities : keep those of every image.

    Returns
    -------
    Hits and samples per class, and the sum of the losses.
    """
    with torch.inference_mode():
        was_training = model.training
        # BatchNorm must use its running statistics and dropout must be off, or a score would depend on the batches.
        model.eval()
        device = y.device
        correct = torch.zeros(num_classes, dtype=torch.int64, device=device)
        total = torch.bincount(y, minlength=num_classes)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        kept = [torch.zeros((0, num_classes), device=device)]
        for i in range(0, len(y), batch):
            labels = y[i : i + batch]
            with torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
                logits = model(normalise(channels_first(x[i : i + batch]), inputs))
            logits = logits.float()
            # Added by label, not by a mask: picking rows would make the host wait for the device.
            correct.scatter_add_(0, labels, (logits.argmax(dim=1) == labels).long())
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            if probabilities:
                kept.append(logits)
        model.train(was_training)
        predicted = torch.cat(kept).cpu().double().softmax(dim=1).numpy() if probabilities else None
        return Scores(correct.cpu().numpy(), total.cpu().numpy(), float(loss), predicted)


# ---- metrics ---------------------------------------------------------------------------------------------------------

Metric: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.float64]], float]
"""Maps labels (n,) and probabilities (n, C) of one client to a number; n >= 1."""
BINS = 15
"""Bins of the calibration error, as in Guo, Pleiss, Sun, Weinberger, On Calibration of Modern Neural Networks, 2017."""


def balanced(y: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return the mean recall over the classes that are present."""
    from sklearn.metrics import recall_score

    return float(recall_score(y, probabilities.argmax(axis=1), labels=np.unique(y), average="macro", zero_division=0))


def macro_f1(y: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return the mean F1 over the classes that are present."""
    from sklearn.metrics import f1_score

    return float(f1_score(y, probabilities.argmax(axis=1), labels=np.unique(y), average="macro", zero_division=0))


def auc(y: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve, each class against the rest.

    It is the mean over the classes that are present; NaN where only one is. scikit-learn's own mean over all classes is
    not defined as soon as one of them is absent.
    """
    from sklearn.metrics import roc_auc_score

    present = np.unique(y)
    if len(present) < 2:
        return float("nan")
    return float(np.mean([roc_auc_score(y == c, probabilities[:, c]) for c in present]))


def auc_classes(y: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return the number of classes that `auc` is the mean over."""
    present = len(np.unique(y))
    return float(present) if present > 1 else 0.0


def ece(y: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return the expected calibration error: |accuracy - confidence| in bins of the largest probability."""
    confidence, hit = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    bins = np.digitize(confidence, np.linspace(0, 1, BINS + 1)[1:-1], right=True)
    gaps = np.bincount(bins, weights=hit - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(y))


METRICS: Mapping[str, Metric] = {of.__name__: of for of in (balanced, macro_f1, auc, auc_classes, ece)}
"""Metrics that `metrics` may name besides `accuracy` and `loss`, which are always there."""
MOST_CONFUSED = 256
"""Largest number of classes with which a reply holds such a matrix."""
LOW_IS_GOOD = ("loss", "ece")


def is_own(name: str) -> bool:
    """Whether a metric is the user's own, `package.module:function`."""
    return ":" in name


def column(name: str) -> str:
    """Return the name of a metric in tables.

    `<protocol>_balanced` has always been the score on all clients' test images, so the one on the client's own has
    another name.
    """
    return "balanced_own" if name == "balanced" else name.rpartition(":")[2]


@functools.cache
def metric(name: str) -> Metric:
    """Return a metric by its name; an own one is imported.

    Raises
    ------
    BadRequest : it cannot be imported, or is not a function.
    """
    if not is_own(name):
        return METRICS[name]
    found = plugins.imported(name, f"metrics: '{name}'")
    if not callable(found):
        raise BadRequest(f"metrics: '{name}' is not a function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def confusion(y: NDArray[np.int64], probabilities: NDArray[np.float64] | None) -> NDArray[np.int64]:
    """Return how many samples of each class (rows) were taken for each class (columns), (C, C)."""
    if probabilities is None:
        raise TypeError("a score without probabilities was asked for a confusion matrix")
    classes = probabilities.shape[1]
    found = np.bincount(classes * y + probabilities.argmax(axis=1), minlength=classes**2)
    return found.reshape(classes, classes)


def measured(names: Iterable[str], y: NDArray[np.int64], probabilities: NDArray[np.float64] | None) -> dict[str, float]:
    """Return metrics of one client by column: NaN without images, or where a probability is not finite.

    Raises
    ------
    BadRequest : an own metric fails, or returns something else than a number.
    """
    usable = probabilities is not None and len(y) > 0 and bool(np.isfinite(probabilities).all())
    found = {}
    for name in names:
        value = float("nan")
        if usable and probabilities is not None:
            try:
                value = float(metric(name)(y, probabilities))
            except BadRequest:
                raise
            except Exception as e:
                raise BadRequest(f"metrics: '{name}' fails with {raised(e)}") from e
        found[column(name)] = value
    return found
