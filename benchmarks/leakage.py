"""What a server can learn from the clients' replies, on handwritten digits: `python -m benchmarks.leakage`.

There are four questions, each with a simple attack that the server's operator could run. Better attacks exist, so the
numbers are lower bounds on what leaks:

1. Head weights (FedClassAvg and all methods that average heads): which classes does a client lack? Score: change of the
   class's bias between the message and the reply of the first round.
2. Local average representations (FedGH): what does the reply itself say?
3. Gaussian statistics (CCVR): what does the mean of n images show to a server that has the extractor and some images of
   the same kind? A linear map from representations to pixels, learned on those images, reconstructs an image from the
   mean. This image is compared with the nearest of the n real ones. The baseline is the class's average image, which
   the label alone gives.
4. The same without any image: the server optimises an image until its representation is the mean
   (`fedapp/results/inversion.py`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score

from fedapp import server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.data.card import data_card
from fedapp.data.transforms import normalise
from fedapp.results import inversion
from fedapp.results.predict import read_model
from fedapp.results.runs import read_run
from fedapp.tasks.simulated import federated
from fedapp.transport import records
from fedapp.transport.local_grid import LocalGrid

CLIENTS = 10


class Wiretap(LocalGrid):
    """Keeps what the server sends and receives in training."""

    def __init__(self, flat: dict[str, Any], clients: int) -> None:
        super().__init__(client_app, flat, clients)
        self.sent: dict[int, dict[str, NDArray[Any]]] = {}
        self.heard: dict[int, dict[int, dict[str, NDArray[Any]]]] = {}

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
            if reply.metadata.message_type == "train":
                arrays, _, info, _ = records.reply_of(reply)
                self.heard.setdefault(int(reply.metadata.group_id), {})[int(info["client"])] = arrays
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


def head_weights(folder: Path) -> list[str]:
    """Identify absent classes by one round's change of the head's bias."""
    lines = []
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
            lines.append(
                f"{method}, clip-update {clip:g}: absent classes found with AUC {auc:.2f} ({np.mean(truth):.0%} are "
                f"absent); rank correlation of change and class size {np.mean(ranks):.2f}"
            )
    return lines


def average_representations(folder: Path) -> list[str]:
    """Read the labels of FedGH's replies."""
    lines = []
    for least in (1, 5):
        grid = listen(folder / f"fedgh-{least}", method="fedgh", **{"num-server-rounds": 1,
                      "method-args": f"min_class_count={least}"})  # fmt: skip
        classes = class_counts()
        right = small = 0
        for client, arrays in grid.heard[1].items():
            counts = classes[client]
            right += int(set(arrays["labels"].tolist()) == set(np.flatnonzero(counts).tolist()))
            small += int(sum(counts[s] < 5 for s in arrays["labels"]))
        lines.append(
            f"fedgh, min_class_count {least}: the reply names exactly the classes present for {right} of {CLIENTS} "
            f"clients; {small} class means of fewer than 5 images were sent"
        )
    return lines


def gaussian_means(folder: Path) -> list[str]:
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
    lines = []
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
        lines.append(
            f"ccvr, mean of {n:2} images: correlation of the reconstructed image with the nearest real one "
            f"{np.mean(rebuilt):.2f} (the label alone: {np.mean(guessed):.2f}); the nearest of {len(secret)} candidates"
            f" is one of them in {np.mean(named):.0%}"
        )
    return lines


def inverted_means(folder: Path) -> list[str]:
    """Reconstruct images from class means with the global model alone."""
    listen(folder / "inverted", method="fedavg", **{"num-server-rounds": 10})
    leak = inversion.measure(read_run(folder / "inverted"), (1, 2, 3, 5, 10, 30, inversion.DRAWN), per_class=20)
    lines = []
    for n, found in leak.attacks.items():
        what = "virtual representation" if n == inversion.DRAWN else f"mean of {n:2} images"
        named = f"the most similar image of the class is one of them in {found.identified:.0%} (by chance: "
        lines.append(
            f"ccvr, {what}: correlation of the recovered image with the nearest real one {found.similarity:.2f} (the "
            f"label alone: {found.by_class:.2f}); "
            + (f"{named}{found.chance:.0%}); " if n != inversion.DRAWN else "")
            + f"an independent classifier sees the class in {found.recognised:.0%} (real images: {leak.classifier:.0%})"
        )
    return lines


def main() -> None:
    """Print all measurements."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for part in (head_weights, average_representations, gaussian_means, inverted_means):
            for line in part(Path(folder)):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
