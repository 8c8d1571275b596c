"""Images that a server can recover from features and class means: an attack on CCVR's statistics, and its measure.

Whoever has the global model looks for an image whose representation is the one that was sent (Mahendran and Vedaldi,
CVPR 2015; CCVR, Appendix C, Fig. 8 and 9, does so for one feature and for the mean of three):

    x* = argmin over x in [0, 1]^(H x W x C) of ||f(x) - z||^2 / ||z||^2 + lambda TV(x),

where TV is the mean absolute difference of neighbouring pixels. What the attack gives is set against what the class
alone gives: the mean image of the class. All images are training images of the clients.

| symbol (paper) | here                                                                                            |
|----------------|-------------------------------------------------------------------------------------------------|
| f(x)           | what the head sees: `head_input(represent(x))` of the global model as trained                   |
| z              | a feature, the mean of n features of one class, or a draw from the class's Gaussian             |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedapp import sampling
from fedapp.data.transforms import InputSpec
from fedapp.models import SplitModel
from fedapp.results.analysis import Unavailable
from fedapp.results.runs import RunResult
from fedapp.results.statistics import Floats, Ints
from reproduction.figures.models import data_of, global_model, head_inputs, inputs_of

SECRET = 2000
"""Training images that are looked at, at most."""
DRAWN = -1
"""Instead of a number of images: a draw from N(mu_c, Sigma_c) of all the class's images, a virtual representation."""


def invert(model: SplitModel, inputs: InputSpec, z: NDArray[np.float32], steps: int = 300, tv: float = 0.02) -> Floats:
    """Return images (n, H, W, C) in [0, 1] whose representations come close to z (n, d).

    Parameters
    ----------
    model : in evaluation mode.   tv : lambda, weight of the total variation.
    """
    target = torch.from_numpy(np.asarray(z, dtype=np.float32))
    scale = target.square().sum(dim=1).clamp_min(1e-12)

    def loss(x: Tensor, normalised: Tensor) -> Tensor:
        found = model.head_input(model.represent(normalised))
        # A sum over images: each has its own gradient, and Adam scales every pixel by itself.
        return ((found - target).square().sum(dim=1) / scale).sum() + tv * total_variation(x).sum()

    return optimised(len(target), inputs, loss, steps)


def optimised(count: int, inputs: InputSpec, loss: Callable[[Tensor, Tensor], Tensor], steps: int) -> Floats:
    """Return images (count, H, W, C) in [0, 1] that minimise a loss, by Adam on the logits of pixels from mid-grey.

    Parameters
    ----------
    loss : of images (count, C, H, W) in [0, 1] and the same images normalised.
    """
    mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (inputs.mean, inputs.std))
    pixels = torch.zeros(count, *inputs.shape, requires_grad=True)
    optimizer = torch.optim.Adam([pixels], lr=0.1)
    with torch.enable_grad():
        for _ in range(steps):
            x = torch.sigmoid(pixels)
            (pixels.grad,) = torch.autograd.grad(loss(x, (x - mean) / std), [pixels])
            optimizer.step()
    images: Floats = torch.sigmoid(pixels).detach().permute(0, 2, 3, 1).numpy().astype(np.float64)
    return images


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, (n,), of images (n, C, H, W)."""
    down, right = (x.diff(dim=axis).abs().flatten(1).mean(dim=1) for axis in (2, 3))
    return down + right


@dataclass(frozen=True, eq=False)
class Attack:
    """What was recovered from the means of n images each, or from draws (`images` = `DRAWN`).

    Attributes
    ----------
    images : n.   secret, recovered : examples, (m, n, H, W, C) and (m, H, W, C) in [0, 1].   label : (m,).
    similarity : mean correlation of the recovered image with the most similar of the n real ones.
    by_class : the same for the mean image of the class instead of the recovered one: what the label alone gives.
    identified : share of attacks in which the training image of the class that is most similar to the recovered one is
        one of the n.
    chance : what `identified` would be for a random image of the class.
    recognised : share of the recovered images in which an independent classifier sees the class.
    """

    images: int
    secret: Floats
    recovered: Floats
    label: Ints
    similarity: float
    by_class: float
    identified: float
    chance: float
    recognised: float


Attacks = dict[int, Attack]


def measure(run: RunResult, counts: Sequence[int], per_class: int = 4, steps: int = 300) -> tuple[Attacks, float]:
    """Invert features and class means of a run's global model, as it was trained, and measure what they show.

    Parameters
    ----------
    counts : n, images in a mean; `DRAWN` for draws from the class's Gaussian.
    per_class : attacks on every class that has enough images.

    Returns
    -------
    The attacks by n, and the accuracy of the independent classifier on real training images, which it has not seen.

    Raises
    ------
    Unavailable : no global model, or no class has enough images.
    """
    from sklearn.svm import SVC

    from fedapp.core import gaussian, virtual

    data, inputs, model = data_of(run), inputs_of(run), global_model(run, calibrated=False)
    rng = sampling.rng(run.seed, "inversion")
    train, test = (np.concatenate([getattr(c, part) for c in data.partition.clients]) for part in ("train", "test"))
    train, test = (np.sort(rng.permutation(part)[:SECRET]) for part in (train, test))
    (x, y), (other, other_y) = (data.dataset.take(part) for part in (train, test))
    z = head_inputs(model, torch.from_numpy(x), inputs)
    pixels, seen = (part.astype(np.float64) / data.inputs.scale for part in (x, other))
    # It was trained on other images than those attacked, and knows nothing of the attacked model.
    judge = SVC(C=10.0).fit(seen.reshape(len(seen), -1), other_y)
    pooled = gaussian.moments(z, y, data.dataset.num_classes)
    attacks: Attacks = {}
    for n in counts:
        rows, targets = [], []
        for label in np.unique(y):
            own = np.flatnonzero(y == label)
            if len(own) < max(2, n):
                continue
            if n == DRAWN:
                mean, cov = virtual.gaussian_of(pooled, int(label), 0.0)
                targets += list(virtual.sample(mean, virtual.factorise(cov), per_class, run.seed, int(label)))
                rows += [own] * per_class
            else:
                chosen = [rng.choice(own, n, replace=False) for _ in range(per_class)]
                targets += [z[r].mean(axis=0) for r in chosen]
                rows += chosen
        if not rows:
            raise Unavailable(f"no class has {n} training images")
        recovered = invert(model, data.inputs, np.stack(targets), steps)
        attacks[n] = _judged(n, rows, recovered, pixels, y, judge)
    real = judge.predict(pixels.reshape(len(pixels), -1)) == y
    return attacks, float(real.mean())


def compared(
    rows: Sequence[Ints] | Ints, recovered: Floats, pixels: Floats, y: Ints
) -> tuple[float, float, float, float]:
    """Compare recovered images with the real ones behind them (`rows`), and with all of their class.

    Returns
    -------
    `similarity`, `by_class`, `identified` and `chance` of an :class:`Attack`.
    """
    unit = standardised(pixels)
    found = []
    for image, r in zip(standardised(recovered), rows):
        own = np.flatnonzero(y == y[r[0]])
        mean = standardised(pixels[own].mean(axis=0)[None])[0]
        hit = own[(unit[own] @ image).argmax()] in r
        found.append(((unit[r] @ image).max(), (unit[r] @ mean).max(), hit, len(r) / len(own)))
    similarity, by_class, identified, chance = (float(np.mean(values)) for values in zip(*found))
    return similarity, by_class, identified, chance


def _judged(n: int, rows: Sequence[Ints], recovered: Floats, pixels: Floats, y: Ints, judge: object) -> Attack:
    label = np.array([int(y[r[0]]) for r in rows])
    seen = judge.predict(recovered.reshape(len(recovered), -1))  # type: ignore[attr-defined]
    one = [int(np.flatnonzero(label == c)[0]) for c in np.unique(label)]
    shown = min(n, 3) if n > 0 else 0
    secret = np.stack([pixels[rows[i][:shown]] for i in one])
    numbers = compared(rows, recovered, pixels, y)
    return Attack(n, secret, recovered[one], label[one], *numbers, float((seen == label).mean()))


def standardised(images: Floats) -> Floats:
    """Return rows (n, H W C) of mean 0 and length 1, whose products are correlations; 0 for an even image."""
    rows = images.reshape(len(images), -1)
    rows = rows - rows.mean(axis=1, keepdims=True)
    unit: Floats = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
