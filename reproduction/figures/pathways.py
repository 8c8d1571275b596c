"""The motivating example of cwFedAvg (Fig. 1): three clients, two classes in R^3, a network of 3, 4 and 2 neurons.

It needs no run. All models start from the same values; each client trains alone, with and without WDR. The server then
averages once, as FedAvg does, or class by class with cwFedAvg's own functions. Critical pathways are the largest
weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp import sampling
from fedapp.core.averages import RunningMean
from fedapp.core.classwise import class_globals, class_weights, mix, norm_distribution, wdr
from fedapp.method import Arrays
from fedapp.results.figures.pieces import Array, key, legend
from fedapp.results.figures.style import COLOURS, MUTED, WIDTH, styled
from fedapp.results.figures.words import Runs, Words

COUNTS = ((2700, 300), (200, 1800), (500, 500))
"""Samples by client and class (paper)."""
NEURONS = (3, 4, 2)
CRITICAL = 8
"""Weights of 20 that are drawn (paper)."""
EPOCHS, BATCH, RATE, LAMBDA = 5, 10, 0.05, 0.4
"""Ours: the paper names none of them. Lambda is 0.1 K^2, as for the method."""
CENTRES = ((1.0, 1.0, -1.0), (-1.0, 1.0, 1.0))
"""Ours: of the two classes' Gaussians, whose standard deviation is 1."""


def data(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Draw the clients' points (n, 3) and classes (n,)."""
    clients = []
    for client, counts in enumerate(COUNTS):
        generator = sampling.torch_generator(seed, "toy-data", client)
        y = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
        clients.append((torch.tensor(CENTRES)[y] + torch.randn(len(y), 3, generator=generator), y))
    return clients


def trained(x: Tensor, y: Tensor, client: int, lam: float, seed: int = 0) -> Arrays:
    """Train one client from the common initial values by SGD on CE + lam R; names are `0.weight` ... `head.bias`."""
    generator = sampling.torch_generator(seed, "toy-model")
    first, head = nn.Linear(NEURONS[0], NEURONS[1]), nn.Linear(NEURONS[1], NEURONS[2])
    for layer in (first, head):  # PyTorch's own bound, from a generator of our own
        for p in layer.parameters():
            nn.init.uniform_(p, -(layer.in_features**-0.5), layer.in_features**-0.5, generator=generator)
    share = torch.bincount(y, minlength=NEURONS[2]) / len(y)
    optimiser = torch.optim.SGD([*first.parameters(), *head.parameters()], lr=RATE)
    order = sampling.torch_generator(seed, "toy-batches", client)
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(y), generator=order), BATCH):
            loss = F.cross_entropy(head(F.relu(first(x[batch]))), y[batch])
            optimiser.zero_grad()
            torch.autograd.backward(loss + lam * wdr(head.weight, share))
            optimiser.step()
    named = {"first.weight": first.weight, "first.bias": first.bias, "head.weight": head.weight, "head.bias": head.bias}
    return {n: p.detach().numpy().copy() for n, p in named.items()}


def models(seed: int = 0) -> dict[str, Arrays]:
    """Return all models of the figure by title, in its order: rows of four."""
    clients = data(seed)
    sizes = np.array([sum(c) for c in COUNTS], dtype=np.float64)
    plain, regular = ([trained(x, y, i, lam, seed) for i, (x, y) in enumerate(clients)] for lam in (0.0, LAMBDA))
    pt = np.stack([norm_distribution(m["head.weight"]) for m in regular])  # Eq. 4
    q = class_weights(sizes, pt)  # Eq. 6
    by_class, personal = class_globals(regular, q), mix(regular, pt, q)  # Eqs. 5 and 7
    mean = RunningMean()
    mean.add_many(list(zip(plain, sizes)))
    rows = (
        ("FedAvg, client", plain, "FedAvg, global", mean.mean()),
        ("WDR, client", regular, "global of class 0", by_class[0]),
        ("cwFedAvg, client", personal, "global of class 1", by_class[1]),
    )
    found: dict[str, Arrays] = {}
    for name, members, last, model in rows:
        found |= {f"{name} {i + 1}": m for i, m in enumerate(members)} | {last: model}
    return found


def critical(model: Mapping[str, Array]) -> list[tuple[int, int, int, float]]:
    """Return the largest weights: (layer, from, to, weight), the largest first."""
    weights = [
        (layer, int(j), int(i), float(w))
        for layer, name in enumerate(("first.weight", "head.weight"))
        for (i, j), w in np.ndenumerate(model[name])
    ]
    return sorted(weights, key=lambda w: -abs(w[3]))[:CRITICAL]


def _network(axes: Axes, model: Mapping[str, Array]) -> None:
    """Draw neurons as circles and critical weights as lines: solid and green positive, dashed and red negative."""
    place = [[(layer, (n - 1) / 2 - k) for k in range(n)] for layer, n in enumerate(NEURONS)]
    shown = critical(model)
    for layer, start, end, w in shown:
        (x0, y0), (x1, y1) = place[layer][start], place[layer + 1][end]
        look = {"color": COLOURS[2], "linestyle": "-"} if w > 0 else {"color": COLOURS[1], "linestyle": (0, (3, 1.2))}
        axes.plot([x0, x1], [y0, y1], linewidth=0.5 + 3.0 * abs(w) / abs(shown[0][3]), zorder=1, **look)
    for neurons in place:
        x, y = zip(*neurons)
        axes.plot(x, y, "o", markersize=9, color="#ffffff", markeredgecolor=MUTED, markeredgewidth=0.9, zorder=2)
    for k, (x_out, y_out) in enumerate(place[-1]):
        axes.annotate(str(k), (x_out, y_out), ha="center", va="center", fontsize=6.5, zorder=3, color="#20242b")
    axes.set(xlim=(-0.25, 2.25), ylim=(-1.9, 1.9))
    axes.set_axis_off()


@styled
def _drawn(found: Mapping[str, Mapping[str, Array]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    for axes, (title, model) in zip(figure.subplots(3, 4).flat, found.items()):
        _network(axes, model)
        axes.set_title(title, fontsize=8)
    legend(
        figure, key("positive weight", color=COLOURS[2]), key("negative weight", color=COLOURS[1], linestyle="--"),
        key("width: magnitude within a network", color=MUTED, linewidth=3),
    )  # fmt: skip
    return figure


def pathways(runs: Runs = ()) -> Words:
    """Draw the critical pathways of all models of the example."""
    found = models()
    ends = {name: [end for layer, _, end, _ in critical(m) if layer == 1] for name, m in found.items()}
    said = "; ".join(f"{name} {into.count(0)} and {into.count(1)}" for name, into in ends.items())
    return (
        f"The {CRITICAL} largest of 20 weights: inputs at the left, the two classes at the right; green and solid "
        "positive, red and dashed negative, width by magnitude within a network. Clients 1 to 3 hold "
        f"{', '.join(f'{a} and {b}' for a, b in COUNTS)} points of the two classes, Gaussians of standard "
        f"deviation 1 around {' and '.join(f'({x:g}, {y:g}, {z:g})' for x, y, z in CENTRES)}. Top: local models and "
        "FedAvg's mean. Middle: local models with WDR, and the first class-specific global model. Bottom: the models "
        f"that the clients get from cwFedAvg, and the second. One round of {EPOCHS} epochs, SGD with lr {RATE:g} and "
        f"batches of {BATCH}, lambda {LAMBDA:g}.",
        f"Twelve drawings of small networks. Critical weights that lead to class 0 and to class 1: {said}.",
        _drawn(found),
    )
