"""Stored models: how they are written, how they become a module again, and `fedapp predict`, which uses them.

A node writes `STATE-DIR/<federation>/<client-id>/personal.safetensors` after every round it trained, and again at the
final evaluation, after one more local training on the payload of the next round (unless `final-training` is false).
It writes `received.safetensors` when it evaluates a payload of the server. A simulation with `keep-models` writes both
files of every client to `OUT/models/clients/<client-id>/` at the final evaluation. Each file is complete: its header
names the method, the architecture, the classes and the normalisation.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clients.base import FedClient
from fedapp import plugins, registry
from fedapp.config import RunConfig
from fedapp.data import datasets, pictures, tables
from fedapp.data.columns import BODY, body_of, read_unlabelled, samples
from fedapp.data.moments import Samples
from fedapp.data.names import PICTURE_SUFFIXES, absent, is_there
from fedapp.data.pictures import FORMATS, check_depth, pixels
from fedapp.data.transforms import InputSpec, channels_first, normalise
from fedapp.errors import BadRequest, counted, plain
from fedapp.lazy import Image, Tensor, nn, pd, torch
from fedapp.learning.evaluation import BATCH
from fedapp.learning.state import StateError, read_safetensors, write_safetensors
from fedapp.learning.task import ModelSpec
from fedapp.method import Arrays, Scalar
from fedapp.models import SplitModel, is_own, own, selection, weights
from fedapp.models.bounded import Bounded
from fedapp.results.whole import WholeModel
from fedapp.settings import ModelSettings
from fedapp.tasks import identity

SCHEMA = 1
LARGEST = 1 << 26
"""Numbers of one sample: images of 4,700 x 4,700 pixels in colour."""
SPARE, FROZEN = 1 << 24, 1 << 29
"""Numbers that a model may have beyond those in its file: in general, and where layers were frozen and never sent."""
FILES = {"trained": "personal.safetensors", "received": "received.safetensors", "tuned": "tuned.safetensors"}
"""The file of each point, which is the score of the model in it, in the folder of a client."""


def described(inputs: InputSpec, classes: Sequence[str]) -> dict[str, object]:
    """Return the facts of the data that a stored model needs, as JSON values."""
    names = ("shape", "kind", "scale", "mean", "std", "binary", "features", "columns")
    values = {name: getattr(inputs, name) for name in names} | {"classes": tuple(classes)}
    values |= {BODY: inputs.body, "extraction": json.loads(inputs.extraction or "{}")} if inputs.body else {}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()} | {"num_classes": len(classes)}


def keep(
    path: Path, client: FedClient, protocol: str, config: RunConfig, server_round: int, scalars: Mapping[str, Scalar]
) -> None:
    """Write the current model of a client with everything that is needed to use it.

    Parameters
    ----------
    protocol : the score, `trained`, `received` or `tuned`, whose model it is.
    server_round : the round of the model's last training, or of the server's model if it is as received.
    """
    task = client.task
    header: dict[str, object] = {
        **described(task.inputs, task.extras.get("classes", ())),
        "model-schema": SCHEMA,
        **built_from(config, task.model, task.settings, task.unit),
        "num_classes": task.num_classes,
        "client": task.client,
        "round": server_round,
        "scalars": dict(scalars),
    }
    durable = client.store is not None and client.store.durable
    write_safetensors(
        path, selection.everything(client.tuned if protocol == "tuned" else client.model), header, durable
    )


def built_from(config: RunConfig, model: str, settings: ModelSettings, unit: bool) -> dict[str, object]:
    """Return the settings that build a stored model again, as JSON values."""
    return {
        "method": config.federation.method,
        "method-args": config.federation.method_args,
        "model": model,
        "model-options": own.header(settings, unit),
        "made-with": made_with(model, settings.weights),
    }


def made_with(model: str, stored: str) -> dict[str, str]:
    """Return the SHA-256 of an own model's code and of stored weights, by which a change of them is noticed later."""
    found = identity.code_of([own.target(model)] if is_own(model) else [])
    return {**found, **({"weights": weights.checksum(stored)} if stored else {})}


class LoadedModel(nn.Module):
    """A trained classifier that takes raw samples: transform and model in one module.

    Raw samples are images uint8 (N, H, W, C) with grey levels 0 .. `inputs.scale`, and all others float32 (N, *shape),
    as in the columns of own data. NaN in a table stands for an unknown value.

    Parameters
    ----------
    model : takes normalised samples.   classes : names, in the order of the logits.   inputs : shape and normalisation.
    about : one line that says which model it is.

    Attributes
    ----------
    model, classes, inputs, about : as given.   kind : `image`, `series`, `table` or `array`.
    """

    def __init__(self, model: SplitModel, classes: Sequence[str], inputs: InputSpec, about: str) -> None:
        super().__init__()
        self.model = model
        self.classes = tuple(classes)
        self.inputs = inputs
        self.kind = inputs.kind
        self.about = about
        self.eval()

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of one raw sample: (H, W, C) images, else as the model takes it."""
        shape = self.inputs.shape
        return (*shape[1:], shape[0]) if self.kind == "image" else shape

    def transform(self, raw: Tensor) -> Tensor:
        """Return raw samples (N, *raw_shape) as the model takes them: normalised float32 (N, *inputs.shape).

        Raises
        ------
        BadRequest : another type or shape.
        """
        wanted = torch.uint8 if self.kind == "image" else torch.float32
        if raw.dtype != wanted or tuple(raw.shape[1:]) != self.raw_shape:
            raise BadRequest(
                f"this model takes {self.wanted()}, but was given {str(raw.dtype).removeprefix('torch.')} "
                f"{tuple(raw.shape)}"
            )
        return normalise(channels_first(raw), self.inputs)

    def wanted(self) -> str:
        """Return in words which raw samples the model takes."""
        what = {"image": "images", "series": "series", "table": "rows of a table"}.get(self.kind, "arrays")
        numbers = ", ".join(map(str, self.raw_shape))
        return f"{what} {'uint8' if self.kind == 'image' else 'float32'} (N, {numbers})"

    def forward(self, raw: Tensor) -> Tensor:
        """Return the logits (N, C) of raw samples."""
        logits: Tensor = self.model(self.transform(raw))
        return logits

    def with_body(self, body: str) -> WholeModel:
        """Return this head with the body on whose features it was trained, for raw pictures or texts.

        Parameters
        ----------
        body : `efficientnet-lite0`, `minilm` or a file, with arguments of `fedapp features` where the model does not
            know them: `"text.onnx tokenizer=tokenizer.json"`.

        Raises
        ------
        BadRequest : it is another body, or one of its packages is missing.

        Examples
        --------
        >>> load("runs/a").with_body("minilm").predict(["Where is my card?"])  # doctest: +SKIP
        """
        return WholeModel(self, body)

    @torch.inference_mode()
    def predict(self, raw: NDArray[Any] | Tensor) -> NDArray[np.float32]:
        """Return the class probabilities (N, C) of raw samples, an array or a tensor.

        Grey images may lack the last axis. Numbers of other types become float32 where the model takes float32.

        Raises
        ------
        BadRequest : samples of another kind or shape, or values that are not numbers.
        """
        given = raw.detach().cpu().numpy() if isinstance(raw, Tensor) else np.asarray(raw)
        if self.kind == "image" and given.dtype != np.uint8:
            raise BadRequest(f"this model takes {self.wanted()}, but was given {given.dtype} {given.shape}")
        x, kind = samples("predict", "x", given)
        if kind != self.kind or x.shape[1:] != self.raw_shape:
            raise BadRequest(f"this model takes {self.wanted()}, but was given {given.dtype} {given.shape}")
        if self.kind == "image" and x.size and x.max() > self.inputs.scale:
            raise BadRequest(f"this model takes grey levels 0 .. {self.inputs.scale:g}, but was given {x.max()}")
        device = next(self.parameters()).device
        parts = [torch.from_numpy(np.array(x[i : i + BATCH])) for i in range(0, len(x), BATCH)]
        logits = [self(part.to(device)).float().cpu() for part in parts]
        probabilities: NDArray[np.float32] = torch.cat([torch.zeros(0, len(self.classes)), *logits]).softmax(1).numpy()
        return probabilities


def read_model(
    path: Path,
    dataset: str = "",
    *,
    facts: Callable[[], Mapping[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None,
    allow: str = "",
) -> LoadedModel:
    """Read a model that a node, a simulation's client or a server kept.

    Parameters
    ----------
    path : `personal.safetensors` or `received.safetensors` of a client, or a run's `models/last.safetensors`.
    dataset : published data set whose classes and normalisation to use where the file does not say (a server's file).
    facts : returns them instead of `dataset`.
    more : further entries of the header, for `about`: `client`, `name`, `when`.
    allow : own models that the file may name; their code is imported.

    Raises
    ------
    BadRequest : the file is not a model, or it holds only a part of one.
    """
    if not is_there(path) or not path.is_file():
        raise absent(path, "give a node's STATE-DIR/<federation>/<client-id>/personal.safetensors")
    try:
        arrays, header = read_safetensors(path)
    except StateError:
        raise BadRequest(
            f"{path} is not a model of fedapp: give a personal.safetensors or a models/last.safetensors"
        ) from None
    head: dict[str, Any] = dict(header)
    if "model" not in head:
        raise BadRequest(f"{path} is a client's training state: use personal.safetensors in its folder")
    if head.get("model-schema", SCHEMA) != SCHEMA:
        raise BadRequest(f"{path} has schema {head['model-schema']}, this version reads {SCHEMA}")
    if "scale" not in head and facts is not None:
        head |= facts()
    if "scale" not in head:
        known = datasets.published(dataset)
        if known is None:
            names = ", ".join(n for n in datasets.DATASET_NAMES if datasets.published(n))
            raise BadRequest(f"{path} is a server's model, which has no normalisation: add --dataset, one of {names}")
        head |= vars(known)
    return rebuilt(path, {**head, **(more or {})}, arrays, allow)


def rebuilt(path: Path, head: Mapping[str, Any], arrays: Arrays, allow: str = "") -> LoadedModel:
    """Build the module of a stored model.

    Parameters
    ----------
    path : where it comes from, for messages.   head : see `keep`.   arrays : the model's, by name.
    allow : own models that the file may name; their code is imported.

    Raises
    ------
    BadRequest : the header is damaged, or the arrays are not those of the model.
    """
    try:
        with plugins.only(allow, installed=True):
            return _rebuilt(path, head, arrays, allow)
    except BadRequest:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, MemoryError) as e:
        raise BadRequest(f"{path} is damaged ({type(e).__name__}: {e}): take another copy of it") from e


def _rebuilt(path: Path, head: Mapping[str, Any], arrays: Arrays, allow: str) -> LoadedModel:
    method, hparams = registry.configured(str(head["method"]), str(head.get("method-args", "")))
    # Files of versions before 0.3 hold images alone, as `channels` and `size`.
    shape = tuple(map(int, head["shape"] if "shape" in head else (head["channels"], head["size"], head["size"])))
    name, given = str(head["model"]), dict(head.get("model-options", {}))
    noted = {str(k): str(v) for k, v in dict(head.get("made-with", {})).items()}
    _check_code(path, name, noted, allow)
    settings = own.PLAIN.replaced(
        model_args=str(given.get("args", "")),
        head=str(given.get("head", "")),
        width=int(given.get("width", 0)),
        input_size=int(given.get("side", 0)),
    )
    spec = ModelSpec(name, int(head["num_classes"]), shape, 0, settings, bool(given.get("unit", False)))
    classes = tuple(map(str, head["classes"]))
    _check_sizes(path, spec, classes, arrays)
    client: type[FedClient] = method.client
    # Before a model is built from a header, nothing says how large it is.
    most = sum(array.size for array in arrays.values()) + (FROZEN if given.get("freeze") else SPARE)
    with Bounded(most, "its header asks for a model that is much larger than the file"):
        model = client.build_model(spec, hparams)
    lacking = [n for n in model.state_dict() if n not in arrays and not n.endswith("num_batches_tracked")]
    if lacking and given.get("weights"):
        # A server's file lacks what was never sent, layers that stay and buffers of whole numbers: the weights have it.
        stored = settings.replaced(weights=str(given["weights"]), freeze=str(given.get("freeze", "")))
        if identity.changed(noted, {"weights": weights.checksum(stored.weights)}):
            raise BadRequest(
                f"{path} was made with other weights than {stored.weights} has (SHA-256): put the former file back"
            )
        model = client.build_model(dataclasses.replace(spec, settings=stored), hparams)
    sent = selection.shared_names(model, ("",))
    lacking = [n for n in lacking if n in sent]
    if lacking:
        raise BadRequest(
            f"{path} holds only the shared part of {head['method']} ({', '.join(sorted(arrays))[:80]}): "
            "take a client's model (client=0), or a node's personal.safetensors"
        )
    client.configure_model(model, head.get("scalars", {}))
    try:
        selection.merge(model, arrays)
    except ValueError as e:
        raise BadRequest(f"{path} does not fit the model '{spec.name}': {e}") from e
    if not client.alone:
        warnings.warn(
            f"{path}: the scores of the run are not those of the stored model alone ({head['method']} with "
            f"{plain(head.get('method-args') or 'its defaults')}); it predicts with its head",
            stacklevel=2,
        )
    inputs = InputSpec(
        shape, float(head["scale"]), tuple(map(float, head["mean"])), tuple(map(float, head["std"])),
        str(head.get("kind", "image")), tuple(map(bool, head.get("binary", ()))),
        tuple(map(str, head.get("features", ()))), tuple(map(str, head.get("columns", ()))), str(head.get(BODY, "")),
        json.dumps(dict(head["extraction"]), sort_keys=True) if "extraction" in head else "",
    )  # fmt: skip
    classes = classes or tuple(str(i) for i in range(spec.num_classes))
    named = {len(inputs.columns), len(inputs.features)} if inputs.columns else set()
    if not {len(inputs.std), shape[0], *named} == {len(inputs.mean)}:
        raise BadRequest(f"{path} is damaged: its normalisation does not fit the model")
    who = f"client {head['client']}" + (f" ({head['name']})" if head.get("name") else "") if "client" in head else ""
    told = [who, str(head["method"]), spec.name, str(head.get("when") or f"round {head.get('round', 'last')}")]
    about = plain(", ".join([*filter(None, told), counted(spec.num_classes, "class")]))
    return LoadedModel(model, classes, inputs, about)


def _check_code(path: Path, name: str, noted: Mapping[str, str], allow: str) -> None:
    """Refuse code of an own model that `allow` does not name, or that is not as it was noted by SHA-256."""
    if ":" in name and not plugins.allowed(name, allow):
        raise BadRequest(
            f"{path} was trained with the model '{name}', code that is imported to use it: if you trust it, "
            f'allow it with allow="{name}" (on the command line --allow "{name}")'
        )
    if other := identity.changed(noted, made_with(name, "")):
        raise BadRequest(
            f"{path}: since the model was trained, these have changed (SHA-256): {other}. Put the former ones back"
        )


def _check_sizes(path: Path, spec: ModelSpec, classes: Sequence[str], arrays: Arrays) -> None:
    """Compare the sizes in a header with those of the file, before anything so large is made.

    Raises
    ------
    BadRequest : they differ, or a sample would be larger than `LARGEST`.
    """
    rows = [len(arrays[name]) for name in ("head.weight", "head.bias") if name in arrays]
    if {*rows, *([len(classes)] if classes else [])} != {spec.num_classes}:
        raise BadRequest(f"{path} is damaged: its classes do not fit the model")
    if math.prod(spec.shape) > LARGEST or math.prod((spec.settings.input_size,) * 2) > LARGEST:
        raise BadRequest(f"{path} is damaged: a sample would have the shape {spec.shape}")


def read_images(paths: Sequence[Path], inputs: InputSpec) -> NDArray[np.uint8]:
    """Read pictures the way a folder of pictures is read: upright, central square, resized, grey or colour.

    Returns
    -------
    (N, H, W, C) uint8 with grey levels 0 .. scale.

    Raises
    ------
    BadRequest : a file is not a picture.
    """
    channels, height, width = inputs.shape
    if channels not in (1, 3):
        raise BadRequest(
            f"{paths[0]}: this model takes images with {counted(channels, 'channel')}: give them as .npz (column x)"
        )
    out = np.empty((len(paths), height, width, channels), np.uint8)
    for row, path in enumerate(paths):
        with pictures.named(path), Image.open(path, formats=FORMATS) as picture:
            check_depth(picture)
            found = pixels(picture, out.shape[1:])
        out[row] = found if inputs.scale == 255 else np.rint(found * inputs.scale / 255)
    return out


def read_samples(path: Path, net: LoadedModel) -> tuple[Samples, list[str]]:
    """Read the raw samples of one file: a picture, the column `x` of a `.npz` file, or the rows of a table.

    A table, `.csv` or `.parquet`, has one row for each sample and is read as for training (`tables.rows`). Its columns
    are found by their names, in any order, and others are left out; where the model does not know the names of its
    features, and in a CSV file without names, each column is a feature (but `y`, `client`, ...).

    Returns
    -------
    x : (n, *raw_shape).   names : of the samples, for tables of results: the file, and the row where it has several.

    Raises
    ------
    BadRequest : the file cannot be read, or it does not fit the model, or its features are of another body.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npz", ".csv", ".parquet"):
        if net.kind != "image":
            raise BadRequest(f"{path}: this model takes {net.wanted()}: give them as .npz (column x), .csv or .parquet")
        return read_images([path], net.inputs), [str(path)]
    if not is_there(path) or not path.is_file():
        raise absent(path)
    if suffix != ".npz":
        if net.kind != "table":
            raise BadRequest(f"{path}: {suffix} rows are for tables, and this model takes {net.wanted()}: give .npz")
        x = tables.rows(path, net.inputs.features, len(net.inputs.mean), net.inputs.columns)
    else:
        arrays = read_unlabelled(path)
        x, body = arrays["x"], body_of(path, arrays)
        if body and net.inputs.body not in ("", body):
            raise BadRequest(
                f"{path} holds features of the body {body[:8]}, and this model was trained on features of "
                f"{net.inputs.body[:8]}: extract the features with that body"
            )
    return x, [f"{path}:{row}" for row in range(len(x))]


def run(net: LoadedModel | WholeModel, files: Sequence[Path], text: str = "") -> pd.DataFrame:
    """Classify all samples of files.

    Parameters
    ----------
    files : a folder stands for all pictures below it.   text : column of texts, for a model of texts.

    Returns
    -------
    One row per sample: `sample` (file, or file:row), `class` and `probability` of the most probable class, and `p_NAME`
    for each class.
    """
    found, names = [], []
    x: Any
    for path in (below for given in files for below in _files(given)):
        x, rows = net.read(path, text) if isinstance(net, WholeModel) else read_samples(path, net)
        try:
            found.append(net.predict(x))
        except BadRequest as e:
            raise BadRequest(f"{path}: {e}") from e
        names += rows
    p = np.concatenate(found)
    best = p.argmax(axis=1)
    columns: dict[str, Any] = {
        "sample": names,
        "class": [net.classes[i] for i in best],
        "probability": p.max(axis=1),
    }
    return pd.DataFrame({**columns, **{f"p_{name}": p[:, i] for i, name in enumerate(net.classes)}})


def _files(given: Path) -> list[Path]:
    """Return a file, or the pictures below a folder.

    Raises
    ------
    BadRequest : there are none.
    """
    if not given.is_dir():
        return [given]
    found = sorted(path for path in given.rglob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
    if not found:
        raise BadRequest(f"{given} holds no picture ({', '.join(sorted(PICTURE_SUFFIXES))})")
    return found
