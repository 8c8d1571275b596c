"""Models that a node keeps after training, and `fedapp predict`, which uses them.

A node writes `STATE-DIR/<federation>/<client-id>/personal.safetensors` after every round it trained, and again at the
final evaluation, after one more local training on what the server would send next (unless `final-training` is false).
It writes `received.safetensors` when it evaluates what the server sent. Each file is complete: its header names the
method, the architecture, the classes and the normalisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clients.base import FedClient
from fedapp import registry
from fedapp.config import RunConfig
from fedapp.data import datasets
from fedapp.data.transforms import InputSpec, channels_first, normalise
from fedapp.errors import BadRequest
from fedapp.learning.state import StateError, read_safetensors, write_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.method import Scalar
from fedapp.models import SplitModel
from fedapp.transport import selection

SCHEMA = 1


def keep(path: Path, client: FedClient, config: RunConfig, server_round: int, scalars: Mapping[str, Scalar]) -> None:
    """Write the current model of a client with everything that is needed to use it."""
    task = client.task
    header: dict[str, object] = {
        "model-schema": SCHEMA,
        "method": config.method,
        "method-args": config.method_args,
        "model": task.model,
        "num_classes": task.num_classes,
        "shape": list(task.inputs.shape),
        "kind": task.inputs.kind,
        "scale": task.inputs.scale,
        "mean": list(task.inputs.mean),
        "std": list(task.inputs.std),
        "classes": list(task.extras.get("classes", ())),
        "client": task.client,
        "round": server_round,
        "scalars": dict(scalars),
    }
    write_safetensors(path, selection.everything(client.model), header)


@dataclass(frozen=True)
class Predictor:
    """A model with its classes and normalisation.

    Attributes
    ----------
    model : in evaluation mode, on the CPU.   classes : names, in the order of the logits.   about : one line.
    """

    model: SplitModel
    classes: tuple[str, ...]
    inputs: InputSpec
    about: str

    @torch.inference_mode()
    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, C) class probabilities of images (N, H, W, C) uint8 with grey levels 0 .. scale."""
        x = normalise(channels_first(torch.from_numpy(images)), self.inputs)
        found: NDArray[np.float32] = torch.softmax(self.model(x).float(), dim=1).numpy()
        return found


def load(path: Path, dataset: str = "") -> Predictor:
    """Load a model that a node or a server kept.

    Parameters
    ----------
    path : `personal.safetensors` or `received.safetensors` of a node, or `models/last.safetensors` of a run directory.
    dataset : published data set whose classes and normalisation to use where the file does not say (a server's file).

    Raises
    ------
    BadRequest : the file is not a model, or it holds only a part of one.
    """
    if not path.is_file():
        raise BadRequest(
            f"{path} does not exist: give a node's STATE-DIR/<federation>/<client-id>/personal.safetensors"
        )
    try:
        arrays, header = read_safetensors(path)
    except StateError:
        raise BadRequest(
            f"{path} is not a model of fedapp: give a personal.safetensors or a models/last.safetensors"
        ) from None
    head: dict[str, Any] = dict(header)
    if "model" not in head:
        raise BadRequest(f"{path} is a client's training state: use personal.safetensors in its folder")
    if int(head.get("model-schema", SCHEMA)) != SCHEMA:
        raise BadRequest(f"{path} has schema {head['model-schema']}, this version reads {SCHEMA}")
    if "scale" not in head:
        known = datasets.published(dataset)
        if known is None:
            names = ", ".join(n for n in datasets.DATASET_NAMES if datasets.published(n))
            raise BadRequest(f"{path} is a server's model, which has no normalisation: add --dataset, one of {names}")
        head |= vars(known)
    method = registry.get(str(head["method"]))
    hparams = registry.parse_args(method, str(head.get("method-args", "")))
    method = registry.resolve(method, hparams)
    # Files of versions before 0.3 hold images alone, as `channels` and `size`.
    shape = tuple(map(int, head["shape"] if "shape" in head else (head["channels"], head["size"], head["size"])))
    spec = ModelSpec(str(head["model"]), int(head["num_classes"]), shape, 0)
    client: type[FedClient] = method.client
    model = client.build_model(spec, hparams)
    lacking = [n for n, _ in model.named_parameters() if n not in arrays]
    if lacking:
        raise BadRequest(
            f"{path} holds only the shared part of {head['method']} ({', '.join(sorted(arrays))[:80]}): "
            "use a node's personal.safetensors"
        )
    try:
        selection.merge(model, arrays)
    except ValueError as e:
        raise BadRequest(f"{path} does not fit the model '{spec.name}': {e}") from e
    client.configure_model(model, head.get("scalars", {}))
    inputs = InputSpec(
        shape, float(head["scale"]), tuple(map(float, head["mean"])), tuple(map(float, head["std"])),
        str(head.get("kind", "image")),
    )  # fmt: skip
    classes = tuple(map(str, head["classes"])) or tuple(str(i) for i in range(spec.num_classes))
    who = f"client {head['client']}, " if "client" in head else ""
    about = f"{who}{head['method']}, {head['model']}, round {head.get('round', 'last')}, {spec.num_classes} classes"
    return Predictor(model.eval(), classes, inputs, about)


def read_images(paths: Sequence[Path], inputs: InputSpec) -> NDArray[np.uint8]:
    """Read pictures the way a folder of pictures is read: upright, central square, resized, grey or colour.

    Returns
    -------
    (N, H, W, C) uint8 with grey levels 0 .. scale.

    Raises
    ------
    BadRequest : a file is not a picture.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    channels, height, width = inputs.shape
    out = np.empty((len(paths), height, width, channels), np.uint8)
    for row, path in enumerate(paths):
        try:
            with Image.open(path) as picture:
                upright = ImageOps.exif_transpose(picture).convert("L" if channels == 1 else "RGB")
        except (OSError, UnidentifiedImageError) as e:
            reason = "does not exist" if isinstance(e, FileNotFoundError) else "is not a picture that can be read"
            raise BadRequest(f"{path} {reason}") from e
        if upright.size != (width, height):
            upright = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(upright, np.float64).reshape(height, width, channels)
        out[row] = pixels if inputs.scale == 255 else np.rint(pixels * inputs.scale / 255)
    return out


def run(model: Path, images: Sequence[Path], top: int, dataset: str = "") -> list[tuple[str, list[tuple[str, float]]]]:
    """Return for each picture its `top` most probable classes with their probabilities, most probable first."""
    predictor = load(model, dataset)
    probabilities = predictor.probabilities(read_images(images, predictor.inputs))
    rows = []
    for path, p in zip(images, probabilities, strict=True):
        order = np.argsort(-p, kind="stable")[:top]
        rows.append((str(path), [(predictor.classes[i], float(p[i])) for i in order]))
    return rows
