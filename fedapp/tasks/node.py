"""A real node's own settings: its id, its own data or a share of a common data set, its model, its state folder.

`fedapp supernode --node-config "client-id=3 data-path='/data/site1' model='resnet18' state-dir='/state'"`

The fields of :class:`Node` name and explain all keys; `docs/deployment.md` quotes them.

Own data stay on the node. Labels are translated to the federation's numbering by the *names* of the classes, so a site
may lack classes or number them in another order. Where the node has no test set, a quarter of its images is held out
for testing, the same images in every run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedapp import plugins, registry
from fedapp.bodies import extraction
from fedapp.bodies.known import Body, of_text
from fedapp.config import RunConfig, check_node
from fedapp.core.privacy import Privacy
from fedapp.data import datasets, natural, partitions
from fedapp.data.columns import PLAIN
from fedapp.data.moments import Samples
from fedapp.data.names import composed, is_there
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest, counted, listed, plain, suggest, suggest_choice
from fedapp.files import absolute, check_folder, explained
from fedapp.lazy import torch
from fedapp.learning.task import Task
from fedapp.models import ADAPTER, IDENTITY, MODEL_NAMES, check_form, check_model, is_own, own
from fedapp.settings import DataSettings
from fedapp.tasks import simulated
from fedapp.tasks.public import node_images

EXAMPLE = '"client-id=0 data-path=\'/data/site\'", or "partition-id=0 num-partitions=3" for a demonstration'
KINDS = {int: "a whole number from 0", float: "a number above 0"}
"""Values of a key, for messages, by the type of its field; all others are text."""
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
Positive: TypeAlias = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Text: TypeAlias = Annotated[str, Field(strict=True, min_length=1)]


def _methods(text: object) -> tuple[str, ...]:
    """Read `allow-methods`."""
    if not isinstance(text, str) or not text:
        raise ValueError
    known, methods = registry.names(), tuple(listed(text))
    if unknown := [m for m in methods if m not in known]:
        raise BadRequest(
            f"node-config: allow-methods names no method '{unknown[0]}'{suggest_choice(unknown[0], known)}"
        )
    return methods


class Node(BaseModel):
    """A checked node-config; texts are empty and numbers 0 where the key was not given."""

    model_config = ConfigDict(frozen=True)

    client: Count = Field(
        title="client-id",
        description="integer from 0, unique per node, never changed: it identifies the node's state and its rows in "
        "the results",
    )
    partitions: Count = Field(
        0,
        title="partition-id, num-partitions",
        description="instead of `client-id` and `data-path`, for demonstrations: each node uses its share of the run's "
        "data set",
    )
    data_path: Text = Field(
        "",
        description="the data: an `.npz` file (`x_train`, `y_train`, perhaps `x_test`, `y_test`, `class_names`), a "
        "folder with exactly one of them, a table (`.csv`, `.parquet`), or a folder of pictures (`<class>/*`, or "
        "`train/<class>/*`, `test/<class>/*`)",
    )
    features_with: Text = Field(
        "",
        description="pretrained body that turns the raw samples of `data-path` into features, once, on one core, "
        "before the node registers: `minilm`, or a file with the arguments of `fedapp features`, such as `'body.onnx "
        "size=128 mean=127 std=128'`; the run's model is `identity` or `adapter` ([a frozen body](frozen.md))",
    )
    features_text: Text = Field("", description="column of texts, if the raw samples are texts in a table")
    data_dir: Text = Field(
        "",
        description="folder of common data sets: the one of a demonstration, or the public data set of methods such as "
        "KT-pFL. A node never reads from the run's own `data-dir`",
    )
    model: Text = Field(
        "",
        description="this node's architecture (default, and `auto`: the run's `model`); different architectures need a "
        "method that allows them (`fedapp methods`) and a common feature width",
    )
    state_dir: Text = Field(
        "",
        description="folder that survives restarts (default `$FEDAPP_STATE`, else `~/.fedapp/state`); give each server "
        "one of its own, since a run may begin from the states of another run of the same federation (`warm-start`)",
    )
    allow: Text = Field(
        "",
        description="own models that a run may name, `package.module:function` or `package.*`, with commas between "
        "them (default: none); see [own models](own-models.md)",
    )
    allow_methods: Annotated[tuple[str, ...], BeforeValidator(_methods)] = Field(
        (), description="methods, also as `base`, that a run may use, comma-separated (default: all)"
    )
    min_class_count: Count = Field(
        0,
        description="smallest number of rows that a class must have before a reply may describe it (default 0): "
        "FedGH, FedGH on Gaussians, pFedFDA, CCVR, Personal CCVR, FedNCM, Fed3R, LDA, QDA and FedCOF must have a "
        "threshold at least as high in `method-args`; FedProto, FedTGP, FedNH, FedPAC, FD and cwFedAvg with "
        "`dist=empirical`, which have no such option, are refused. All these methods are refused with `dp = example`, "
        "since their replies then describe every class, with noise",
    )
    weights_dir: Text = Field(
        "", description="folder with stored weights, if the run's model has such: the file has the same name there"
    )
    node_key: Text = Field(
        "",
        description="file of the node's private key, with which it signs its keys in secure sums "
        "([secure-sums.md](secure-sums.md#whose-keys-they-are))",
    )
    peers: Text = Field(
        "",
        description="a copy of the roster that comes from the other sites: in secure sums the node takes part only "
        "with keys that these nodes have signed",
    )
    min_sum_clients: Count = Field(
        0,
        description="smallest number of clients in a secure sum (default 0); with it or `peers`, runs without "
        "`secure-sum` are refused",
    )
    dp: Annotated[str, Field(strict=True, pattern="^(example|client)$")] = Field(
        "",
        description="only runs with differential privacy for this unit: `example`, which `dp = sgd` also is, or "
        "`client` ([privacy.md](privacy.md))",
    )
    dp_epsilon: Positive = Field(
        0.0,
        description="limit of epsilon for all releases from this node's data together, in all runs and whatever a run "
        "requests (default: the run's)",
    )
    dp_delta: Positive = Field(0.0, description="delta for which `dp-epsilon` holds (default: the run's)")
    secure_colluders: Count = Field(
        0,
        description="secure sums count on at least so many clients that help the server, or the run is refused "
        "(default 0)",
    )

    @staticmethod
    def keys() -> dict[str, str]:
        """Return the keys of a node-config, and the field of each."""
        fields = Node.model_fields.items()
        found = {key: name for name, field in fields for key in (field.title or name.replace("_", "-")).split(", ")}
        return {**found, "partition-id": "client"}

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Node:
        """Check a node-config.

        Raises
        ------
        BadRequest : a key is missing, unknown, of the wrong type, or clashes with another; says what to write.
        """
        fields = cls.keys()
        for key in config:
            if key not in fields:
                raise BadRequest(f"node-config: unknown key '{key}'{suggest_choice(key, fields)}")
        for key, needed in (("features-text", "features-with"), ("features-with", "data-path")):
            if key in config and needed not in config:
                raise BadRequest(f"node-config: {key} needs {needed}")
        if "data-path" in config:
            if "client-id" not in config:
                raise BadRequest("node-config: data-path needs client-id, a number that no other node has")
            if clash := sorted(config.keys() & {"partition-id", "num-partitions"}):
                raise BadRequest(f"node-config: data-path (own data) and {clash[0]} (a share of common data) clash")
        elif "partition-id" in config:
            if "client-id" in config:
                raise BadRequest(
                    "node-config: client-id goes with data-path; with partition-id that is the client's id"
                )
            if "num-partitions" not in config:
                raise BadRequest("node-config: partition-id needs num-partitions, the number of all nodes")
        else:
            missing = "data-path" if "client-id" in config else "client-id and data-path"
            raise BadRequest(f"node-config: {missing} missing: start the node with --node-config {EXAMPLE}")
        try:
            node = cls(**{fields[key]: value for key, value in config.items() if (key, value) != ("model", "auto")})
        except ValidationError as e:
            first = e.errors()[0]
            if isinstance(error := first.get("ctx", {}).get("error"), BadRequest):
                raise error from None
            key = next(key for key in config if fields[key] == first["loc"][0])
            annotation: Any = cls.model_fields[fields[key]].annotation
            kind = KINDS.get(annotation, "text in quotation marks")
            kind = "'example' or 'client'" if first["type"] == "string_pattern_mismatch" else kind
            raise BadRequest(f"node-config: {key} = {config[key]!r} must be {kind}") from e
        if "partition-id" in config and node.client >= node.partitions:
            last = node.partitions - 1
            raise BadRequest(f"node-config: partition-id {node.client} is not among the partitions 0 .. {last}")
        if is_own(node.model):
            check_form(node.model, own.PLAIN)
        elif node.model and node.model not in MODEL_NAMES:
            raise BadRequest(f"node-config: unknown model '{node.model}'{suggest_choice(node.model, MODEL_NAMES)}")
        return node

    @property
    def own(self) -> bool:
        """Whether the node has data of its own."""
        return self.partitions == 0

    def check(self, config: RunConfig) -> None:
        """Refuse a run that asks for more than this node's owner allows; nothing is imported here.

        Raises
        ------
        BadRequest : it names own code that `allow` does not, or that would come from the working or the data folder, a
            method that is not allowed, a path of data, or lets a reply say something of classes with too few images.
        """
        check_node(config)
        if (self.peers or self.min_sum_clients) and not config.secure.secure_sum:
            asked = "peers" if self.peers else "min-sum-clients"
            raise BadRequest(
                f"this node's owner asks for secure sums ({asked} in the node-config), and this run has none: set "
                "secure-sum = true"
            )
        if config.secure.secure_sum and config.secure.secure_colluders < self.secure_colluders:
            raise BadRequest(
                f"this node's owner counts on {self.secure_colluders} clients that help the server (secure-colluders "
                f"in the node-config), and this run on {config.secure.secure_colluders}: raise secure-colluders"
            )
        if config.secure.secure_sum and config.privacy.dp != "none" and not self.peers:
            raise BadRequest(
                f"dp = '{config.privacy.dp}' with secure-sum: this node would add only a share of the noise, and "
                "cannot know that the others' keys are not the server's: give peers and node-key in the node-config, "
                "or leave secure-sum out"
            )
        self._check_replies(config)
        if config.data.data_dir and not self.own and not self.data_dir:
            raise BadRequest(
                f"data-dir '{config.data.data_dir}' is the server's, and a node reads no path that a server names: its "
                f"owner can give it in the node-config, data-dir='{config.data.data_dir}'"
            )
        if config.model.weights and not self.model and not self.weights_dir:
            raise BadRequest(
                f"the run's model has stored weights: put {Path(config.model.weights).name} into a folder of this node "
                "and name the folder with weights-dir in the node-config"
            )
        for name in (self.model or config.model.name_of(self.client), config.second_model):
            if not is_own(name):
                continue
            code = own.target(name)
            if name != self.model and not plugins.allowed(code, self.allow):
                raise BadRequest(
                    f"model '{name}' is not among the models of fedapp, and a node imports no code that a server "
                    f"names: its owner can allow it in the node-config, allow='{code}'"
                )
            data = [absolute(self.data_path)] if self.data_path else []
            plugins.check_place(code, Path.cwd(), *data, *(d.parent for d in data if d.is_file()))

    def _check_replies(self, config: RunConfig) -> None:
        """Refuse a method, or settings of it, whose replies reveal more than the node-config allows."""
        method, hparams = config.method_and_hparams()
        for kind, name in (("method", config.federation.method), ("base", getattr(hparams, "base", "none"))):
            if self.allow_methods and name not in (*self.allow_methods, "none"):
                raise BadRequest(
                    f"the {kind} '{name}' is not among the methods that this node takes part in "
                    f"({', '.join(self.allow_methods)}): choose one of them, or its owner adds it to allow-methods in "
                    "the node-config"
                )
        if self.dp and (config.mechanism is None or config.mechanism.unit != self.dp):
            raise BadRequest(
                f"this node's owner asks for runs with differential privacy for the unit '{self.dp}' (dp in the "
                f"node-config), and this one has dp = '{config.privacy.dp}': set dp = '{self.dp}'"
                + (" or 'sgd'" if self.dp == "example" else "")
            )
        threshold = method.class_threshold(hparams)
        if self.min_class_count <= 1 or threshold is None:
            return
        if config.privacy.dp == "example":
            raise BadRequest(
                f"this node's owner requires at least {self.min_class_count} rows of every class that a reply "
                "describes (min-class-count in the node-config), and with dp = 'example' replies describe every class, "
                "with noise: its owner removes min-class-count, or the run takes dp = 'none'"
            )
        if not threshold:
            raise BadRequest(
                f"replies of {config.federation.method} with these method-args describe every class, and this "
                f"node's owner asks for at least {self.min_class_count} rows (min-class-count in the node-config): "
                "choose another method"
            )
        if int(getattr(hparams, threshold)) < self.min_class_count:
            raise BadRequest(
                f"this node's owner requires at least {self.min_class_count} rows of every class that a reply "
                f"describes (min-class-count in the node-config), this run {getattr(hparams, threshold)}: "
                f'set method-args="{threshold}={self.min_class_count}"'
            )

    def privacy(self, config: RunConfig) -> Privacy | None:
        """Return what a run states, with this node's own budget where its owner gives one."""
        stated = config.mechanism
        if stated is None:
            return None
        return replace(stated, epsilon=self.dp_epsilon or stated.epsilon, delta=self.dp_delta or stated.delta)

    def state_root(self) -> Path:
        """Return the folder of this node's private state; it is created if needed. No run decides where it is.

        Raises
        ------
        BadRequest : it is not writable.
        """
        chosen = self.state_dir or os.environ.get("FEDAPP_STATE", "") or "~/.fedapp/state"
        root = absolute(chosen)
        user = os.getuid() if hasattr(os, "getuid") else ""
        with explained(f"state-dir {root} cannot be written", f"give a folder that user {user} owns"):
            check_folder(root)
        return root


@dataclass(frozen=True, eq=False)
class OwnData:
    """A node's own images in the federation's numbering of classes.

    Attributes
    ----------
    rows : images (n, ...) as in a `Dataset` and labels (n,) int64 of `train`, `test` and, if it has any, `validation`.
    classes : the federation's class names.
    inputs : how the images are normalised.   groups : of the training rows (n,), or None; see `Dataset`.
    """

    rows: Mapping[str, tuple[Samples, NDArray[np.int64]]]
    classes: tuple[str, ...]
    inputs: InputSpec
    groups: NDArray[np.int64] | None = None


def federation_classes(config: RunConfig) -> tuple[str, ...] | None:
    """Return the federation's class names: `class-names`, else those of the published data set, else None."""
    if config.data.class_names:
        return tuple(composed(n.strip()) for n in config.data.class_names.split(","))
    known = datasets.published(config.data.dataset)
    return known.classes if known else None


class OwnDataError(BadRequest):
    """A node's own data do not fit a run; the text may hold values of the data, so it stays there."""


@functools.lru_cache(maxsize=2)
def own_data(
    path: str, classes: tuple[str, ...] | None, settings: DataSettings = PLAIN, body: str = "", text: str = ""
) -> OwnData:
    """Load a node's own data.

    Parameters
    ----------
    path : `data-path`.
    classes : the federation's class names; None = the data's own.
    settings : how the data are read, and the share of rows that validate where the data do not say which do. Where the
        run's data set is a published one, its normalisation is used, so that all nodes have the same; otherwise, and
        with `normalise = client`, mean and standard deviation of the node's training rows, which stay on the node.
    body, text : `features-with` and `features-text`.

    Raises
    ------
    BadRequest : nothing there, no such body, or `normalise = data`.
    OwnDataError : unreadable, or a class that the federation does not know.
    """
    if settings.normalise == "data":
        raise BadRequest(
            "normalise = 'data' needs the rows of all clients, which real nodes do not share: choose client, or auto"
        )
    place = absolute(path)
    if not is_there(place):
        raise BadRequest(f"data-path {place} does not exist on this node: mount or copy the data there")
    extracts = of_text(body) if body else None
    try:
        return _read(place, classes, settings, extracts, text)
    except Exception as e:
        raise OwnDataError(
            str(e) if isinstance(e, BadRequest) else f"data-path {place}: {type(e).__name__}: {e}"
        ) from e


def _read(
    place: Path, classes: tuple[str, ...] | None, settings: DataSettings, body: Body | None, text: str
) -> OwnData:
    dataset = settings.dataset
    file = place if body is None else extraction.cached(extraction.of_files(place, text, settings, node=True), body)
    data = datasets.load(datasets.source(file), file, settings, node=True)
    if skipped := data.skipped or data.about.get("left-out"):
        warnings.warn(f"left out because they cannot be used: {plain(', '.join(skipped))}", stacklevel=2)
    table = np.arange(data.num_classes)
    if classes is not None:
        foreign = [name for name in data.classes if name not in classes]
        if foreign:
            raise BadRequest(
                f"data-path {place}: class '{foreign[0]}' is not among the federation's "
                f"{counted(len(classes), 'class')} "
                f"({', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''})"
                + suggest(foreign[0], classes, "rename it here, or add it to the run's class-names")
            )
        table = np.array([classes.index(name) for name in data.classes])
    if data.num_test:
        rows = np.arange(data.num_train + data.num_test)
        whole = partitions.ClientSplit(rows[: data.num_train], rows[data.num_train :])
        mine = partitions.of_clients(data, "own", "given", [whole], {})
    else:
        alone = DataSettings(partition="iid", split="holdout", clients=1, partition_seed=0, min_samples=1)
        mine = partitions.make(data, alone)
    mine = natural.given_validation(mine, data)
    if settings.validation and not len(mine.clients[0].validation):
        mine = partitions.hold_out(mine, settings.validation, 0, data)
    parts = [part for part in partitions.PARTS if part != "validation" or len(mine.clients[0].validation)]
    taken = {part: data.take(getattr(mine.clients[0], part)) for part in parts}
    inputs = InputSpec.of(data)
    known = datasets.published(dataset)
    if known is not None and data.kind == "image" and len(known.mean) == data.shape[0]:
        brightest = int(max(taken[part][0].max(initial=0) for part in ("train", "test")))
        if brightest > known.scale:
            raise BadRequest(f"data-path {place}: {dataset} has grey levels 0 .. {known.scale:g}, found {brightest}")
        inputs = InputSpec(data.shape, known.scale, known.mean, known.std)
    # The features of all nodes stay on one scale.
    how = "none" if data.about and settings.normalise == "auto" else settings.normalise
    inputs = simulated.fitted(inputs, taken["train"][0], how)
    labelled = {part: (x, table[y]) for part, (x, y) in taken.items()}
    groups = None if data.groups is None else data.groups[mine.clients[0].train]
    return OwnData(labelled, classes or data.classes, inputs, groups)


def _other_model(model: str) -> BadRequest:
    return BadRequest(
        f"this node's data are features of a pretrained body, and the run's model is {model}: set model = {IDENTITY} "
        f"or {ADAPTER}"
    )


def node_task(config: RunConfig, node: Node, device: torch.device, images: int = partitions.UNION) -> Task:
    """Return the task of a real node; `extras["classes"]` holds the names of the classes.

    `images` is the largest number of images of the balanced score, where the data are common.

    Raises
    ------
    BadRequest : the data or the architecture do not fit.
    """
    model = node.model or config.model.name_of(node.client)
    if node.features_with and model not in (IDENTITY, ADAPTER):
        raise _other_model(model)
    if node.model:
        config = config.replaced(weights="", freeze="")  # those of the run are for its own model
    elif node.weights_dir and config.model.weights:
        config = config.replaced(weights=str(absolute(node.weights_dir) / Path(config.model.weights).name))
    if node.data_dir or node.own:  # with own data the node reads nothing that the run names
        folder = str(absolute(node.data_dir)) if node.data_dir else ""
        config = config.replaced(data_dir=folder)
    if node.own:
        data = own_data(node.data_path, federation_classes(config), config.data, node.features_with, node.features_text)
        inputs = simulated.with_weights(config, data.inputs)
        public = node_images(config, data.inputs)
        extras: dict[str, Any] = {} if public is None else {"public": torch.from_numpy(public).to(device)}
        extras |= {} if data.groups is None else {"groups": data.groups}
        rows = {part: simulated.on_device(taken, device) for part, taken in data.rows.items()}
        task = simulated.assemble(config, node.client, len(data.classes), inputs, rows, extras)
        classes = data.classes
    else:
        total = config.data.clients or node.partitions
        task = simulated.simulated_task(config, node.client, total, device, images)
        classes = simulated.federated(config, total).dataset.classes
    task = replace(task, model=node.model or task.model, extras={**task.extras, "classes": classes})
    if task.inputs.body and task.model not in (IDENTITY, ADAPTER):
        raise _other_model(task.model)
    if node.own or node.model:
        check_model(task.model, task.inputs.shape)
    return task


def try_own(task: Task) -> None:
    """Try a node's own model on two of its training rows, before it takes part.

    Raises
    ------
    BadRequest : it does not do what a model must; says what to change.
    """
    if is_own(task.model):
        rows = task.x_train[:2].cpu().numpy()
        simulated.try_model(task.model, rows, task.inputs, task.num_classes, task.settings)


def fingerprint(classes: tuple[str, ...]) -> str:
    """Return a short hash of class names and their order, by which nodes are compared without sending the names."""
    return hashlib.sha256("\x1f".join(classes).encode()).hexdigest()[:12]
