"""What a server can learn from the clients' replies, on handwritten digits: `python -m reproduction study leakage`.

Each attack is a simple one that the server's operator could run. Better attacks exist, so the numbers are lower bounds
on what leaks. This command prints:

1. Head weights (FedClassAvg and all methods that average heads): which classes does a client lack? Score: change of the
   class's bias between the message and the reply of the first round.
2. Local average representations (FedGH): what does the reply itself say?
3. Gaussian statistics (CCVR): what does the mean of n images show to a server that has the extractor and some images of
   the same kind? A linear map from representations to pixels, learned on those images, reconstructs an image from the
   mean. This image is compared with the nearest of the n real ones. The baseline is the class's average image, which
   the label alone gives.
4. The same without any image: the server optimises an image until its representation is the mean
   (`reproduction/figures/inversion.py`).

`attacks` are those of docs/privacy.md, before and after noise, on whole models, heads and statistics
(`python -m reproduction study privacy`):

=================  =====================================================================================================
`absent`           AUC of finding the classes that a client lacks: by the change of the head's bias in round 1, by the
                   labels of class means, or by the counts of sums
`member`           AUC of telling a client's training images from its test images: by the loss of the model that it sent
                   after the last round (Yeom et al., CSF 2018), or by the similarity of the feature and its class mean
`known others`     AUC of telling whether one image is in a release, for somebody who knows all others: by the
                   likelihood ratio. No attack on this release does better
`one image`        correlation with the true image, and how often it is the most similar one of its class: from one step
                   of SGD on the image by matching its gradient (Geiping et al., NeurIPS 2020), or from the feature that
                   a class sum of one image is (`inversion.invert`)
`one feature`      the same step, of the head alone: cosine of the true feature and the row of the gradient over that of
                   its bias, which is the feature (Zhu and Blaschko, ICLR 2021)
`rebuilt_rows`     correlation of the rows of a client and of those rebuilt from its second moments: the factor of these
                   is a rotation of the rows, which independent component analysis undoes (Hyvarinen, 1999)
=================  =====================================================================================================
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import spearmanr
from sklearn.decomposition import FastICA
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedapp import sampling, server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.core.noise import Source, seeded
from fedapp.core.privacy import Joint, noise_for, noised
from fedapp.core.sums import unit_rows
from fedapp.data.card import data_card
from fedapp.data.transforms import InputSpec, channels_first, normalise
from fedapp.engines import local as engines
from fedapp.learning.evaluation import batched
from fedapp.models import SplitModel, build_model
from fedapp.results.predict import read_model
from fedapp.results.runs import read_run
from fedapp.results.statistics import Floats
from fedapp.tasks.simulated import FederatedData, federated
from fedapp.transport import records
from fedapp.transport.local_grid import LocalGrid
from reproduction.figures import inversion

CLIENTS = 10


class Wiretap(LocalGrid):
    """Keeps what the server sends and receives in training, and the last answer of each client."""

    def __init__(self, flat: dict[str, Any], clients: int) -> None:
        super().__init__(client_app, flat, clients)
        self.sent: dict[int, dict[str, NDArray[Any]]] = {}
        self.heard: dict[int, dict[int, dict[str, NDArray[Any]]]] = {}
        self.answers: dict[int, dict[str, NDArray[Any]]] = {}

    def push_messages(self, messages: Any) -> Any:
        """Record what the server sends."""
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train":
                server_round = int(message.metadata.group_id)
                self.sent.setdefault(server_round, records.payload_of(message)[0].all())
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        """Record what the clients reply."""
        replies: list[Message] = list(super().pull_messages(message_ids))
        for reply in replies:
            kind, server_round = reply.metadata.message_type, reply.metadata.group_id
            if kind == "train" or kind.startswith("query."):
                arrays, _, info, _ = records.reply_of(reply)
                heard = self.heard.setdefault(int(server_round), {}) if kind == "train" else self.answers
                heard[int(info["client"])] = arrays
        return replies


def listen(out: Path, **values: Any) -> Wiretap:
    """Run a federation and return what its server sent and received."""
    flat = from_flat({"clients": CLIENTS, "out": str(out), **values}).to_flat()
    grid = Wiretap(flat, CLIENTS)
    server_app.serve(grid, flat)
    return grid


def class_counts(seed: int = 0) -> NDArray[np.int64]:
    """Images of each class that each client trains on, int64 (clients, classes)."""
    data = federated(from_flat({"seed": seed}), CLIENTS)
    return data_card(data.dataset, data.partition).train


def head_weights(folder: Path) -> Iterator[str]:
    """Identify absent classes by one round's change of the head's bias."""
    for method in ("lgfedavg", "fedclassavg"):
        for clip in (0.0, 0.1):
            scores, truth, ranks = [], [], []
            for seed in range(3):
                values = {"method": method, "seed": seed, "num-server-rounds": 1, "clip-update": clip}
                grid = listen(folder / f"{method}-{clip}-{seed}", **values)
                classes = class_counts(seed)
                for client, arrays in grid.heard[1].items():
                    counts = classes[client]
                    change = arrays["head.bias"] - grid.sent[1]["head.bias"]
                    scores += list(-change)
                    truth += list(counts == 0)
                    ranks.append(spearmanr(change, counts).statistic)
            auc = roc_auc_score(truth, scores)
            yield (
                f"{method}, clip-update {clip:g}: absent classes found with AUC {auc:.2f} ({np.mean(truth):.0%} are "
                f"absent); rank correlation of change and class size {np.mean(ranks):.2f}"
            )


def average_representations(folder: Path) -> Iterator[str]:
    """Read the labels of FedGH's replies."""
    for least in (1, 5):
        grid = listen(folder / f"fedgh-{least}", method="fedgh", **{"num-server-rounds": 1,
                      "method-args": f"min_class_count={least}"})  # fmt: skip
        classes = class_counts()
        right = small = 0
        for client, arrays in grid.heard[1].items():
            counts = classes[client]
            right += int(set(arrays["labels"].tolist()) == set(np.flatnonzero(counts).tolist()))
            small += int(sum(counts[s] < 5 for s in arrays["labels"]))
        yield (
            f"fedgh, min_class_count {least}: the reply names exactly the classes present for {right} of {CLIENTS} "
            f"clients; {small} class means of fewer than 5 images were sent"
        )


def gaussian_means(folder: Path) -> Iterator[str]:
    """Reconstruct images from class means under the global model."""
    out = folder / "trained"
    listen(out, method="fedavg", **{"num-server-rounds": 10})
    predictor = read_model(out / "models" / "last.safetensors")
    data = federated(from_flat({}), CLIENTS).dataset
    images = torch.from_numpy(np.array(data.x_train)).permute(0, 3, 1, 2)
    with torch.no_grad():
        z = predictor.model.represent(normalise(images, predictor.inputs)).numpy().astype(np.float64)
    x, y = np.array(data.x_train).reshape(len(z), -1).astype(np.float64), np.array(data.y_train)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(z))
    known, secret = order[:300], order[300:]
    decoder = Ridge(alpha=1.0).fit(z[known], x[known])
    for n in (1, 2, 3, 5, 10, 30):
        rebuilt, guessed, named = [], [], []
        for label in range(10):
            for _ in range(20):
                rows = rng.choice(secret[y[secret] == label], n, replace=False)
                mean = z[rows].mean(0)
                picture = decoder.predict(mean[None])[0]
                average = x[known][y[known] == label].mean(0)
                rebuilt.append(max(np.corrcoef(picture, x[r])[0, 1] for r in rows))
                guessed.append(max(np.corrcoef(average, x[r])[0, 1] for r in rows))
                named.append(int(np.square(z[secret] - mean).sum(1).argmin() in np.flatnonzero(np.isin(secret, rows))))
        yield (
            f"ccvr, mean of {n:2} images: correlation of the reconstructed image with the nearest real one "
            f"{np.mean(rebuilt):.2f} (the label alone: {np.mean(guessed):.2f}); the nearest of {len(secret)} candidates"
            f" is one of them in {np.mean(named):.0%}"
        )


def inverted_means(folder: Path) -> Iterator[str]:
    """Reconstruct images from class means with the global model alone."""
    listen(folder / "inverted", method="fedavg", **{"num-server-rounds": 10})
    attacked, classifier = inversion.measure(
        read_run(folder / "inverted"), (1, 2, 3, 5, 10, 30, inversion.DRAWN), per_class=20
    )
    for n, found in attacked.items():
        what = "virtual representation" if n == inversion.DRAWN else f"mean of {n:2} images"
        named = f"the most similar image of the class is one of them in {found.identified:.0%} (by chance: "
        yield (
            f"ccvr, {what}: correlation of the recovered image with the nearest real one {found.similarity:.2f} (the "
            f"label alone: {found.by_class:.2f}); "
            + (f"{named}{found.chance:.0%}); " if n != inversion.DRAWN else "")
            + f"an independent classifier sees the class in {found.recognised:.0%} (real images: {classifier:.0%})"
        )


# ---- before and after noise, for docs/privacy.md ---------------------------------------------------------------------

ROUNDS = 5
"""Of FedAvg without noise. With noise there is one round, which has all of epsilon: the least noise there can be, and
training from a mean with noise on whole models ends in NaN in the second."""
BOUND = 1.0
DELTA = 1e-5
LEVELS = ("none", "example 8", "example 1", "client 8")
"""Unit and epsilon of the noise."""
TRIALS = 1000
IMAGES = 10
"""Single images that are attacked for each seed."""


def level_of(level: str) -> dict[str, Any]:
    """Return the run-config keys of a level: noise of the seed, so that the table can be made again."""
    unit, _, epsilon = level.partition(" ")
    if unit == "none":
        return {}
    noise: dict[str, Any] = {"dp": unit, "dp-epsilon": float(epsilon), "dp-delta": DELTA, "dp-test": True}
    return noise | ({"clip-update": BOUND} if unit == "client" else {})


def auc(members: Sequence[float] | NDArray[Any], others: Sequence[float] | NDArray[Any]) -> float:
    """Return how often a member has the higher score, ties counting half."""
    truth = [True] * len(members) + [False] * len(others)
    return float(roc_auc_score(truth, np.concatenate([members, others])))


def settings(method: str, level: str, seed: int, weights: Path) -> dict[str, Any]:
    """Return the run-config keys of a federation that is listened to."""
    values: dict[str, Any] = {"method": method, "seed": seed, "protocols": "global", "final-training": False}
    values |= level_of(level)
    if method in ("fedavg", "fedclassavg"):
        return values | {"num-server-rounds": ROUNDS if (method, level) == ("fedavg", "none") else 1}
    given = {"weights": str(weights)} if method == "fedncm" or level != "none" else {}
    return values | given | {"num-server-rounds": 1, "method-args": "base=none" if method == "fedncm" else ""}


def absent_scores(method: str, grid: Wiretap) -> dict[int, NDArray[Any]]:
    """Return for each client how absent its classes look: higher is more absent."""
    if method in ("fedavg", "fedclassavg"):
        return {c: grid.sent[1]["head.bias"] - a["head.bias"] for c, a in grid.heard[1].items()}
    if method == "fedncm":
        return {c: -sums_in(a)[1] for c, a in grid.answers.items()}
    return {
        c: 1.0 - np.isin(np.arange(10), a["labels"]) if "labels" in a else -a["noised/count"]
        for c, a in grid.heard[1].items()
    }


def sums_in(arrays: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the class sums (C, d) and counts (C,) in an answer, with noise or without."""
    if "sums/sum" in arrays:
        return arrays["sums/sum"].astype(np.float64), arrays["sums/count"].astype(np.float64)
    both = arrays["sums/b"].astype(np.float64)
    return both[:, :-1], both[:, -1]


def absent(method: str, grid: Wiretap, seed: int) -> float:
    """Return the AUC of absent classes over all clients."""
    truth = class_counts(seed) == 0
    scores = absent_scores(method, grid)
    pairs = [(scores[c], truth[c]) for c in scores]
    return auc(np.concatenate([s[t] for s, t in pairs]), np.concatenate([s[~t] for s, t in pairs]))


def member_by_loss(grid: Wiretap, values: Mapping[str, Any]) -> float:
    """Return the AUC of membership by the loss of the models that clients sent last, mean over clients."""
    data, net = parts_of(values)
    found = []
    for client, arrays in grid.heard[max(grid.heard)].items():
        net.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
        losses = []
        for part in ("train", "test"):
            x, y = data.tensors(part, client, torch.device("cpu"))
            logits = batched(net, x, data.inputs)
            losses.append(-torch.nn.functional.cross_entropy(logits, y, reduction="none").numpy())
        found.append(auc(*(np.nan_to_num(part, nan=-1e30) for part in losses)))
    return float(np.mean(found))


def parts_of(values: Mapping[str, Any]) -> tuple[FederatedData, SplitModel]:
    """Return data and the server's first model of a run, in evaluation mode."""
    config = engines.effective({"clients": CLIENTS, **values})
    data = federated(config, config.data.clients)
    net = build_model(
        config.model.model, num_classes=data.dataset.num_classes, shape=data.inputs.shape,
        seed=sampling.server_model_seed(config.federation.seed), settings=config.model,
        unit=config.privacy.unit_features,
    )  # fmt: skip
    return data, net.eval()


def member_by_similarity(grid: Wiretap, values: Mapping[str, Any]) -> float:
    """Return the AUC of membership by the cosine of a feature and its client's class sum, mean over clients."""
    data, net = parts_of(values)
    found = []
    for client, arrays in grid.answers.items():
        sums, _ = sums_in(arrays)
        scores = []
        for part in ("train", "test"):
            x, y = data.tensors(part, client, torch.device("cpu"))
            z = batched(net.represent, x, data.inputs).numpy().astype(np.float64)
            scores.append((unit_rows(z) * unit_rows(sums)[y.numpy()]).sum(axis=1))
        found.append(auc(*scores))
    return float(np.mean(found))


def known_others(noise: float, seed: int) -> float:
    """Return the AUC of telling releases of class counts and sums with one image from those without it.

    The image's feature has norm 1, as all have. Only how the release moves along the image's direction says anything,
    and what the other images add is known, so that they are left out.

    Parameters
    ----------
    noise : z, 0 = none.
    """
    joint = Joint(10, 64)
    rng, source = np.random.default_rng(seed), seeded(seed)
    z = np.zeros((10, 64))
    z[3] = unit_rows(rng.normal(size=(1, 64)))[0]
    image = joint.vector({"count": np.eye(10)[3], "sum": z})
    if not noise:
        return 1.0
    within, without = (
        # All trials in one call, which is many times as fast.
        noised(np.tile(exact, TRIALS), joint.sensitivity, noise, source).reshape(TRIALS, -1) @ image
        for exact in (image, np.zeros_like(image))
    )
    return auc(within, without)


def matched(net: SplitModel, inputs: InputSpec, observed: Sequence[Tensor], labels: Tensor, steps: int = 150) -> Floats:
    """Return images (n, H, W, C) in [0, 1] whose gradient points as an observed one does.

    ``1 - cos(g(x), g) + 0.01 TV(x)`` by Adam on the logits of the pixels (Geiping et al., NeurIPS 2020, there on the
    pixels themselves). The labels are taken as known: of one image the gradient of the bias says it.

    Parameters
    ----------
    observed : gradient of the mean cross-entropy, in the order of the model's parameters.
    """
    length = torch.sqrt(sum((g.square().sum() for g in observed), torch.zeros(())))

    def loss(x: Tensor, normalised: Tensor) -> Tensor:
        found = gradient(net, normalised, labels, create_graph=True)
        dot = sum(((a * b).sum() for a, b in zip(found, observed, strict=True)), torch.zeros(()))
        own = torch.sqrt(sum((g.square().sum() for g in found), torch.tensor(1e-20)))
        return 1 - dot / (own * length) + 0.01 * inversion.total_variation(x).mean()

    return inversion.optimised(len(labels), inputs, loss, steps)


def gradient(net: SplitModel, x: Tensor, labels: Tensor, create_graph: bool = False) -> list[Tensor]:
    """Return the gradient of the mean cross-entropy of normalised images, by parameter."""
    loss = torch.nn.functional.cross_entropy(net(x), labels)
    return list(torch.autograd.grad(loss, list(net.parameters()), create_graph=create_graph))


def step_of_client(gradients: Sequence[Tensor], noise: float, source: Source) -> list[Tensor]:
    """Return what a client's one step of SGD shows: its update over its length, or clipped to the bound, with noise.

    The step is at least as long as the bound, which is the best case for the attack.
    """
    update = np.concatenate([g.numpy().ravel() for g in gradients]).astype(np.float64)
    update /= np.linalg.norm(update)
    seen = noised(update * BOUND, BOUND, noise, source) if noise else update
    ends = np.cumsum([g.numel() for g in gradients])[:-1]
    return [torch.from_numpy(part.astype(np.float32)).view_as(g) for part, g in zip(np.split(seen, ends), gradients)]


def feature_of(weight: Tensor, bias: Tensor) -> NDArray[Any]:
    """Return the feature (d,) that a gradient of the head of one image holds: its row over its bias, largest first."""
    label = int(bias.abs().argmax())
    return np.asarray((weight[label] / bias[label]).numpy(), dtype=np.float64)


@dataclass(frozen=True)
class Secret:
    """Images that are attacked: rows of the data (n,), normalised (n, C, H, W) and labels (n,), and all of the data."""

    rows: NDArray[np.int64]
    x: Tensor
    y: Tensor
    pixels: Floats
    labels: NDArray[np.int64]


def secret_of(data: FederatedData, seed: int) -> Secret:
    """Draw training images, the same number of each class."""
    raw = np.array(data.dataset.x_train)
    labels = np.array(data.dataset.y_train)
    rng = sampling.rng(seed, "leakage")
    rows = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[: IMAGES // 10] for c in range(10)])
    x = normalise(channels_first(torch.from_numpy(raw[rows])), data.inputs)
    pixels = raw.astype(np.float64) / data.inputs.scale
    return Secret(rows, x, torch.from_numpy(labels[rows]).long(), pixels, labels)


def judged(images: Floats, secret: Secret) -> dict[str, float]:
    """Return the mean correlation with the true images, and how often the true one is the nearest of its class.

    `label` is the correlation of the class's mean image, which the label alone gives.
    """
    similar, label, named, _ = inversion.compared(secret.rows[:, None], images, secret.pixels, secret.labels)
    return {"similar": similar, "label": label, "named": named}


def single_images(level: str, seed: int) -> dict[str, float]:
    """Attack one step of SGD on single images: of the whole model, and of the head alone."""
    data, net = parts_of({"method": "fedavg", "seed": seed})
    secret = secret_of(data, seed)
    noise = 0.0 if level == "none" else noise_for(float(level.split()[1]), DELTA, 1)
    source = seeded(seed)
    images, cosines = [], []
    for x, y in zip(secret.x, secret.y, strict=True):
        exact = gradient(net, x[None], y[None])
        images.append(matched(net, data.inputs, step_of_client(exact, noise, source), y[None])[0])
        # Names come in the order of the parameters; the head's are the last two.
        head = step_of_client(exact[-2:], noise, source)
        with torch.no_grad():
            true = net.represent(x[None])[0].numpy().astype(np.float64)
        found = feature_of(*head)
        cosines.append(float(unit_rows(found[None])[0] @ unit_rows(true[None])[0]))
    return {**judged(np.stack(images), secret), "feature": float(np.mean(cosines))}


def single_sums(level: str, seed: int, weights: Path) -> dict[str, float]:
    """Attack class sums of one image: its feature, which the server inverts through the extractor."""
    data, net = parts_of(settings("fedncm", level, seed, weights))
    secret = secret_of(data, seed)
    with torch.no_grad():
        z = net.represent(secret.x).numpy().astype(np.float64)
    if level != "none":
        joint, source = Joint(10, net.width), seeded(seed)
        noise = noise_for(float(level.split()[1]), DELTA, 1)
        for i, (row, c) in enumerate(zip(z.copy(), secret.y.tolist(), strict=True)):
            sums = np.zeros((10, net.width))
            sums[c] = row
            vector = joint.vector({"count": np.eye(10)[c], "sum": sums})
            z[i] = joint.parts(noised(vector, joint.sensitivity, noise, source))["sum"][c]
        z = unit_rows(z)  # as all features are
    images = inversion.invert(net, data.inputs, z.astype(np.float32))
    return judged(images, secret)


def attacks(seeds: Sequence[int], weights: Path) -> dict[str, list[float]]:
    """Return what each attack reaches, by seed; names are `attack, what is sent, level`.

    Parameters
    ----------
    weights : of the extractor on which statistics are made, for `digits-a`.
    """
    found: dict[str, list[float]] = {}

    def note(attack: str, what: str, level: str, value: float) -> None:
        found.setdefault(f"{attack}, {what}, {level}", []).append(round(value, 4))

    for seed in seeds:
        for method, levels in (
            ("fedavg", ("none", "client 8")), ("fedclassavg", ("none", "client 8")),
            ("fedgh", LEVELS[:3]), ("fedncm", LEVELS[:3]),
        ):  # fmt: skip
            for level in levels:
                values = settings(method, level, seed, weights)
                with tempfile.TemporaryDirectory() as folder:
                    grid = listen(Path(folder) / "run", **values)
                note("absent", method, level, absent(method, grid, seed))
                if method == "fedavg":
                    note("member", method, level, member_by_loss(grid, values))
                if method == "fedncm":
                    note("member", method, level, member_by_similarity(grid, values))
                    noise = noise_for(float(level.split()[1]), DELTA, 1) if level != "none" else 0.0
                    note("known others", method, level, known_others(noise, seed))
        for level in ("none", "client 8"):
            for name, value in single_images(level, seed).items():
                note(name, "fedclassavg" if name == "feature" else "fedavg", level, value)
        for level in LEVELS[:3]:
            for name, value in single_sums(level, seed, weights).items():
                note(name, "fedncm", level, value)
    return found


def rotated_rows(a: Floats, rows: int, mean: Floats) -> Floats:
    """Return centred rows of features, (n, d), up to an unknown rotation among the rows.

    Parameters
    ----------
    a : second moments of rows with a constant, (d + 1, d + 1).
    """
    values, vectors = np.linalg.eigh(a)
    factor = np.sqrt(np.maximum(values[-rows:], 0))[:, None] * vectors[:, -rows:].T
    return np.asarray(factor[:, :-1] - factor[:, -1:] * mean)  # the constant is rotated as the features are


def rebuilt_rows(rotated: Floats) -> Floats:
    """Return the independent components of rotated rows (n, d): the rows, without their order, signs and lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 50 steps are enough
        found = FastICA(len(rotated), max_iter=50, whiten="unit-variance", random_state=0).fit_transform(rotated.T)
    return np.asarray(found.T)


def likeness(found: Floats, true: Floats) -> float:
    """Return the mean absolute correlation between found and true rows, matched in the best order."""
    units = [unit_rows(x - x.mean(axis=1, keepdims=True)) for x in (found, true)]
    similar = np.abs(units[0] @ units[1].T)
    return float(similar[linear_sum_assignment(-similar)].mean())


def from_moments(x: Floats, rows: int, seed: int) -> dict[str, float]:
    """Return the likeness of rows rebuilt from second moments, and of the `rotated` rows before, to the true rows.

    `rows` rows are drawn from features (N, d). The attacker knows the mean of all rows from the total.
    """
    drawn = x[np.random.default_rng(seed).choice(len(x), rows, replace=False)].astype(np.float64)
    h, mean = np.column_stack([drawn, np.ones(rows)]), x.mean(axis=0, dtype=np.float64)
    rotated, true = rotated_rows(h.T @ h, rows, mean), drawn - mean
    return {"rebuilt": likeness(rebuilt_rows(rotated), true), "rotated": likeness(rotated, true)}


def main() -> None:
    """Print all measurements."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for part in (head_weights, average_representations, gaussian_means, inverted_means):
            for line in part(Path(folder)):
                print(line, flush=True)
