"""A real node's own settings: its id, its own data or a share of a common data set, its model, its state folder.

`fedapp supernode --node-config "client-id=3 data-path='/data/site1' model='resnet18' state-dir='/state'"`

=================  ===================================================================================================
key                meaning
=================  ===================================================================================================
`client-id`        whole number from 0 that never changes: names the node's private model and its rows in the results
`data-path`        own data: an `.npz` file (`x_train`, `y_train`, perhaps `x_test`, `y_test`, `class_names`), a folder
                   with exactly one of them, a table (`.csv`, `.parquet`), or a folder of pictures (`<class>/*`, or
                   `train/<class>/*`, `test/<class>/*`)
`partition-id`,    instead of the two above, for a demonstration: the node takes its share of the run's data set
`num-partitions`
`data-dir`         where this node has common data sets: a demonstration's, or the public one of methods that need it
`model`            this node's architecture (default, and `auto`: the run's)
`allow`            own models that a run may name, `package.module:function` or `package.*`, with commas
                   between them (default: none; nodes import no code that a server names)
`allow-methods`    methods that a run may use, with commas between them (default: all)
`min-class-count`  a run whose replies say something of classes with fewer images than this is refused (default: 0)
`dp`               `example` or `client`: only runs with differential privacy for this unit; runs with `dp = sgd` have
                   the unit `example` (default: all)
`dp-epsilon`       most that releases from this node's data may add up to, whatever a run says (default: the run's)
`dp-delta`         delta for which that holds (default: the run's)
`secure-colluders` fewest clients that a secure sum counts on helping the server (default 0)
`weights-dir`      folder with stored weights, of which a run names a file (default: none; then it gets none)
`state-dir`        folder that survives a restart (default: `$FEDAPP_STATE`, else `~/.fedapp/state`)
`node-key`         file of the node's private key, with which it signs its keys in secure sums (default: none)
`peers`            a copy of the roster that comes from the other sites: in secure sums the node takes part only with
                   keys that these nodes have signed (default: none; then it takes those that the server hands out)
=================  ===================================================================================================

Own data stay on the node. Labels are translated to the federation's numbering by the *names* of the classes, so a site
may lack classes or number them in another order. Where the node has no test set, a quarter of its images is held out
for testing, the same images in every run.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp import plugins, registry
from fedapp.config import RunConfig, check_node
from fedapp.core.privacy import Privacy
from fedapp.data import datasets, natural, partitions
from fedapp.data.columns import PLAIN, Reading
from fedapp.data.moments import Samples
from fedapp.data.names import composed, is_there
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest, counted, plain, suggest
from fedapp.lazy import torch
from fedapp.learning.task import Task
from fedapp.models import MODEL_NAMES, ModelOptions, check_form, check_model, is_own, own
from fedapp.tasks import simulated
from fedapp.tasks.public import node_images

KEYS: dict[str, type] = {
    "client-id": int,
    "partition-id": int,
    "num-partitions": int,
    "data-path": str,
    "data-dir": str,
    "model": str,
    "allow": str,
    "allow-methods": str,
    "min-class-count": int,
    "dp": str,
    "dp-epsilon": float,
    "dp-delta": float,
    "secure-colluders": int,
    "weights-dir": str,
    "state-dir": str,
    "node-key": str,
    "peers": str,
    "min-sum-clients": int,
}
EXAMPLE = '"client-id=0 data-path=\'/data/site\'", or "partition-id=0 num-partitions=3" for a demonstration'
KINDS = {int: "a whole number from 0", float: "a number above 0", str: "text in quotation marks"}


@dataclass(frozen=True)
class Node:
    """A checked node-config.

    Attributes
    ----------
    client : stable client id.
    node_key, peers : files for secure sums, "" where not given.
    min_sum_clients : smallest number of clients of a secure sum; with it or `peers` runs without are refused.
    partitions : number of shares of the demonstration that this node takes part in; 0 = own data.
    data_path, data_dir, model, state_dir, allow, weights_dir : as in the node-config, "" where not given.
    allow_methods : ids of methods; empty = all.
    min_class_count : smallest number of images of a class of which a reply may say something; 0 and 1 = all.
    dp, dp_epsilon, dp_delta, secure_colluders : as in the node-config, "" and 0 where not given.
    """

    client: int
    partitions: int = 0
    data_path: str = ""
    data_dir: str = ""
    model: str = ""
    state_dir: str = ""
    allow: str = ""
    allow_methods: tuple[str, ...] = ()
    min_class_count: int = 0
    weights_dir: str = ""
    node_key: str = ""
    peers: str = ""
    min_sum_clients: int = 0
    dp: str = ""
    dp_epsilon: float = 0.0
    dp_delta: float = 0.0
    secure_colluders: int = 0

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Node:
        """Check a node-config.

        Raises
        ------
        BadRequest : a key is missing, unknown, of the wrong type, or clashes with another; says what to write.
        """
        for key, value in config.items():
            if key not in KEYS:
                raise BadRequest(
                    f"node-config: unknown key '{key}'{suggest(key, list(KEYS))}; known: {', '.join(KEYS)}"
                )
            kind = KEYS[key]
            value = float(value) if kind is float and type(value) is int else value
            if kind is float and isinstance(value, float) and not 0 < value < math.inf:
                raise BadRequest(f"node-config: {key} = {value!r} must be {KINDS[kind]}")
            negative = isinstance(value, int) and value < 0
            if not isinstance(value, kind) or isinstance(value, bool) or negative or value == "":
                raise BadRequest(f"node-config: {key} = {value!r} must be {KINDS[kind]}")
        given = config.keys()
        if "data-path" in given:
            if "client-id" not in given:
                raise BadRequest("node-config: data-path needs client-id, a number that no other node has")
            clash = sorted(given & {"partition-id", "num-partitions"})
            if clash:
                raise BadRequest(f"node-config: data-path (own data) and {clash[0]} (a share of common data) clash")
            number, parts = int(config["client-id"]), 0
        elif "partition-id" in given:
            if "client-id" in given:
                raise BadRequest(
                    "node-config: client-id goes with data-path; with partition-id that is the client's id"
                )
            if "num-partitions" not in given:
                raise BadRequest("node-config: partition-id needs num-partitions, the number of all nodes")
            number, parts = int(config["partition-id"]), int(config["num-partitions"])
            if number >= parts:
                raise BadRequest(f"node-config: partition-id {number} is not among the partitions 0 .. {parts - 1}")
        else:
            missing = "data-path" if "client-id" in given else "client-id and data-path"
            raise BadRequest(f"node-config: {missing} missing: start the node with --node-config {EXAMPLE}")
        name = str(config.get("model", "auto"))
        if is_own(name):
            check_form(name, ModelOptions())
        elif name not in (*MODEL_NAMES, "auto"):
            raise BadRequest(
                f"node-config: unknown model '{name}'{suggest(name, MODEL_NAMES)}: choose from {', '.join(MODEL_NAMES)}"
            )
        keys = ("data-path", "data-dir", "model", "state-dir", "node-key", "peers", "allow", "weights-dir")
        texts = {k.replace("-", "_"): str(config.get(k, "")) for k in keys}
        if texts["model"] == "auto":
            texts["model"] = ""
        methods = tuple(m.strip() for m in str(config.get("allow-methods", "")).split(",") if m.strip())
        known = registry.names()
        for method in methods:
            if method not in known:
                raise BadRequest(
                    f"node-config: allow-methods names no method '{method}'{suggest(method, known)}: choose from "
                    f"{', '.join(known)}"
                )
        images, summed = int(config.get("min-class-count", 0)), int(config.get("min-sum-clients", 0))
        if config.get("dp", "example") not in ("example", "client"):
            raise BadRequest(f"node-config: dp = {config['dp']!r} must be 'example' or 'client'")
        return cls(
            number,
            parts,
            **texts,
            allow_methods=methods,
            min_class_count=images,
            min_sum_clients=summed,
            dp=str(config.get("dp", "")),
            dp_epsilon=float(config.get("dp-epsilon", 0.0)),
            dp_delta=float(config.get("dp-delta", 0.0)),
            secure_colluders=int(config.get("secure-colluders", 0)),
        )

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
                "cannot know "
                "that the others' keys are not the server's: give peers and node-key in the node-config, or leave "
                "secure-sum out"
            )
        self._check_replies(config)
        if config.data.data_dir and not self.own and not self.data_dir:
            raise BadRequest(
                f"data-dir '{config.data.data_dir}' is the server's, and a node reads no path that a server names: its "
                f"owner can give it in the node-config, data-dir='{config.data.data_dir}'"
            )
        if config.model.weights and not self.model and not self.weights_dir:
            raise BadRequest(
                f"the run's model has stored weights: put {Path(config.model.weights).name} into a folder of this "
                "node and "
                "name the folder with weights-dir in the node-config"
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
            data = [Path(self.data_path).expanduser()] if self.data_path else []
            plugins.check_place(code, Path.cwd(), *data, *(d.parent for d in data if d.is_file()))

    def _check_replies(self, config: RunConfig) -> None:
        """Refuse a method, or settings of it, whose replies reveal more than the node-config allows."""
        if self.allow_methods and config.federation.method not in self.allow_methods:
            raise BadRequest(
                f"the method '{config.federation.method}' is not among those that this node takes part in "
                f"({', '.join(self.allow_methods)}): choose one of them, or its owner adds it to allow-methods in the "
                "node-config"
            )
        if self.dp and (config.mechanism is None or config.mechanism.unit != self.dp):
            raise BadRequest(
                f"this node's owner asks for runs with differential privacy for the unit '{self.dp}' (dp in the "
                f"node-config), and this one has dp = '{config.privacy.dp}': set dp = '{self.dp}'"
                + (" or 'sgd'" if self.dp == "example" else "")
            )
        method, hparams = config.method_and_hparams()
        if self.min_class_count <= 1 or method.per_class is None:
            return
        if config.privacy.dp == "example":
            raise BadRequest(
                f"this node's owner asks for at least {self.min_class_count} images of every class of which a reply "
                "says something (min-class-count in the node-config), and with dp = 'example' replies say something, "
                "with noise, of every class: its owner removes min-class-count, or the run takes dp = 'none'"
            )
        if not method.per_class:
            raise BadRequest(
                f"replies of {config.federation.method} with these method-args say something of every class, and this "
                "node's "
                f"owner asks for at least {self.min_class_count} images (min-class-count in the node-config): choose "
                "another method"
            )
        if int(getattr(hparams, method.per_class)) < self.min_class_count:
            raise BadRequest(
                f"this node's owner asks for at least {self.min_class_count} images of every class of which a reply "
                f"says something (min-class-count in the node-config), this run {getattr(hparams, method.per_class)}: "
                f'set method-args="{method.per_class}={self.min_class_count}"'
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
        root = Path(chosen).expanduser().absolute()
        try:
            root.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=root, prefix=".", suffix=".part")
            os.close(handle)
            Path(name).unlink()
        except OSError as e:
            raise BadRequest(f"state-dir {root} cannot be written ({e.strerror}): give a folder that user "
                             f"{os.getuid() if hasattr(os, 'getuid') else ''} owns") from e  # fmt: skip
        return root


@dataclass(frozen=True, eq=False)
class OwnData:
    """A node's own images in the federation's numbering of classes.

    Attributes
    ----------
    x_train, x_test, x_validation : (n, ...) as in a `Dataset`; the last may have no rows.
    y_train, y_test, y_validation : (n,) int64, the federation\'s numbers of classes.
    classes : the federation's class names.
    inputs : how the images are normalised.
    """

    x_train: Samples
    y_train: NDArray[np.int64]
    x_test: Samples
    y_test: NDArray[np.int64]
    x_validation: Samples
    y_validation: NDArray[np.int64]
    classes: tuple[str, ...]
    inputs: InputSpec


def federation_classes(config: RunConfig) -> tuple[str, ...] | None:
    """Return the federation's class names: `class-names`, else those of the published data set, else None."""
    if config.data.class_names:
        return tuple(composed(n.strip()) for n in config.data.class_names.split(","))
    known = datasets.published(config.data.dataset)
    return known.classes if known else None


class OwnDataError(BadRequest):
    """A node's own data do not fit what a run asks for; the text may hold values of the data, so it stays there."""


@functools.lru_cache(maxsize=2)
def own_data(
    path: str,
    classes: tuple[str, ...] | None,
    dataset: str,
    validation: float = 0.0,
    reading: Reading = PLAIN,
    how: str = "auto",
) -> OwnData:
    """Load a node's own data.

    Parameters
    ----------
    path : `data-path`.
    classes : the federation's class names; None = the data's own.
    dataset : the run's data set: where it is a published one, its normalisation is used, so that all nodes have the
        same; otherwise mean and standard deviation of the node's training rows, which then stay on the node.
    validation : share of the training rows that validate, where the data do not say which do; the same in every run.
    reading : how the data are read.
    how : `normalise`: `auto`; `client` = mean and standard deviation of the node's training rows in any case; `none`.

    Raises
    ------
    BadRequest : nothing there, or `normalise = data`.
    OwnDataError : unreadable, or a class that the federation does not know.
    """
    if how == "data":
        raise BadRequest(
            "normalise = 'data' needs the rows of all clients, which real nodes do not share: choose client, or auto"
        )
    place = Path(path).expanduser()
    if not is_there(place):
        raise BadRequest(f"data-path {place} does not exist on this node: mount or copy the data there")
    try:
        return _read(place, classes, dataset, validation, reading, how)
    except Exception as e:
        raise OwnDataError(
            str(e) if isinstance(e, BadRequest) else f"data-path {place}: {type(e).__name__}: {e}"
        ) from e


def _read(
    place: Path, classes: tuple[str, ...] | None, dataset: str, validation: float, reading: Reading, how: str
) -> OwnData:
    data = datasets.load(datasets.source(place), place, reading)
    if data.skipped:
        warnings.warn(f"left out because they cannot be used: {plain(', '.join(data.skipped))}", stacklevel=2)
    table = np.arange(data.num_classes)
    if classes is not None:
        foreign = [name for name in data.classes if name not in classes]
        if foreign:
            raise BadRequest(
                f"data-path {place}: class '{foreign[0]}' is not among the federation's "
                f"{counted(len(classes), 'class')} "
                f"({', '.join(classes[:12])}{', ...' if len(classes) > 12 else ''}){suggest(foreign[0], classes)}: "
                "rename it here, or add it to the run's class-names"
            )
        table = np.array([classes.index(name) for name in data.classes])
    if data.num_test:
        rows = np.arange(data.num_train + data.num_test)
        whole = partitions.ClientSplit(rows[: data.num_train], rows[data.num_train :])
        mine = partitions.of_clients(data, "own", "given", [whole], {})
    else:
        mine = partitions.make(data, kind="iid", split="holdout", clients=1, seed=0, min_samples=1)
    mine = natural.given_validation(mine, data)
    if validation and not len(mine.clients[0].validation):
        mine = partitions.hold_out(mine, validation, 0, data)
    (x_train, y_train), (x_test, y_test), (x_validation, y_validation) = (
        data.take(getattr(mine.clients[0], part)) for part in ("train", "test", "validation")
    )
    inputs = InputSpec.of(data)
    known = datasets.published(dataset)
    if known is not None and data.kind == "image" and len(known.mean) == data.shape[0]:
        brightest = int(max(x_train.max(initial=0), x_test.max(initial=0)))
        if brightest > known.scale:
            raise BadRequest(f"data-path {place}: {dataset} has grey levels 0 .. {known.scale:g}, found {brightest}")
        inputs = InputSpec(data.shape, known.scale, known.mean, known.std)
    inputs = simulated.fitted(inputs, x_train, how)
    return OwnData(
        x_train,
        table[y_train],
        x_test,
        table[y_test],
        x_validation,
        table[y_validation],
        classes or data.classes,
        inputs,
    )


def node_task(config: RunConfig, node: Node, device: torch.device, images: int = partitions.UNION) -> Task:
    """Return the task of a real node; `extras["classes"]` holds the names of the classes.

    `images` is the largest number of images of the balanced score, where the data are common.

    Raises
    ------
    BadRequest : the data or the architecture do not fit.
    """
    if node.model:
        config = config.replaced(weights="", freeze="")  # those of the run are for its own model
    elif node.weights_dir and config.model.weights:
        config = config.replaced(weights=str(Path(node.weights_dir).expanduser() / Path(config.model.weights).name))
    if node.data_dir or node.own:  # whoever has own data reads nothing that the run names
        folder = str(Path(node.data_dir).expanduser().absolute()) if node.data_dir else ""
        config = config.replaced(data_dir=folder)
    if node.own:
        reading = replace(config.reading, node=True)
        data = own_data(
            node.data_path,
            federation_classes(config),
            config.data.dataset,
            config.data.validation,
            reading,
            config.data.normalise,
        )
        inputs = simulated.with_weights(config, data.inputs)
        public = node_images(config, data.inputs)
        extras = {} if public is None else {"public": torch.from_numpy(public).to(device)}
        train, test, validation = (
            (torch.from_numpy(x).to(device), torch.from_numpy(y).to(device))
            for x, y in (
                (data.x_train, data.y_train), (data.x_test, data.y_test), (data.x_validation, data.y_validation)
            )
        )  # fmt: skip
        task = simulated.assemble(config, node.client, len(data.classes), inputs, train, test, extras)
        if len(data.y_validation):
            task = replace(task, x_validation=validation[0], y_validation=validation[1])
        classes = data.classes
    else:
        total = config.data.clients or node.partitions
        task = simulated.simulated_task(config, node.client, total, device, images)
        classes = simulated.federated(config, total).dataset.classes
    task = replace(task, model=node.model or task.model, extras={**task.extras, "classes": classes})
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
        simulated.try_model(task.model, rows, task.inputs, task.num_classes, task.options)


def fingerprint(classes: tuple[str, ...]) -> str:
    """Return a short hash of class names and their order, by which nodes are compared without sending the names."""
    return hashlib.sha256("\x1f".join(classes).encode()).hexdigest()[:12]
