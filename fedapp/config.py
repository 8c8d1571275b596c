"""The run configuration: one frozen, validated object made from Flower's flat run-config.

pyproject.toml declares every key with the same default as here (a test compares them). Unknown keys, wrong types,
values out of range and contradictions raise a `BadRequest` that says what to do.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapp import plugins, registry, sampling
from fedapp.core.privacy import Privacy, noise_for
from fedapp.core.robust import OWN_RULE, RULES, Robust, needed, parsed
from fedapp.core.secure_sum import flaw, threshold
from fedapp.data import flower
from fedapp.data.columns import Reading, roles
from fedapp.data.datasets import OWN, check_name, published
from fedapp.data.partitions import NATURAL, PARTITION_KINDS
from fedapp.errors import BadRequest, suggest
from fedapp.lazy import torch
from fedapp.learning import dp_rules, evaluation
from fedapp.learning.optimizers import check_optimizer, parse_schedule, round_rates, takes
from fedapp.learning.training import TrainSpec, class_numbers, make_optimizer
from fedapp.method import BaseHParams, Method
from fedapp.models import MODEL_NAMES, ModelOptions, check_form, default_model, is_own, own, weights
from fedapp.transport.client_manager import Settings, needed_replies

Auto = Literal["auto"]
_FEDERATION = re.compile(r"\A[a-z0-9-]{1,64}\Z")
PROTOCOLS = ("received", "trained", "global")

_T = TypeVar("_T")
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class RunConfig(BaseModel):
    """All run-config keys. In files and on the command line their names have hyphens in place of underscores."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, alias_generator=lambda n: n.replace("_", "-"),
        populate_by_name=True, protected_namespaces=(),
    )  # fmt: skip

    method: str = Field("fedclassavg", description="id of the method; see fedapp methods")
    method_args: str = Field("", description='hyperparameters of the method, "name=value name=value"')
    dataset: str = Field(
        "digits", description="name of the data set, or npz, csv, parquet, folder, hf for your own; see fedapp datasets"
    )
    data_dir: str = Field("", description="folder with NAME.npz, or to download to; else the place of your own data")
    columns: str = Field(
        "",
        description='what the columns of csv, parquet and hf mean, such as "x=age,pulse y=diagnosis client=hospital '
        'split=part group=patient"; empty = y, label or target, client, split and group by name, all other numeric '
        "columns are features; x=* takes text columns too",
    )
    image_size: Annotated[int, Field(ge=0, le=4096)] | Auto = Field(
        "auto",
        description="side in pixels of the pictures of folder and hf: their shorter side, then the central square; "
        "0 = as they are if all are equal; auto = at most 64",
    )
    layout: Literal["auto", "classes", "clients"] = Field(
        "auto", description="what the folders in a folder of pictures are; auto = by the number of levels"
    )
    normalise: Literal["auto", "data", "client", "none"] = Field(
        "auto",
        description="mean and standard deviation by which samples are normalised: data = of the training rows of all "
        "clients that train, client = of each client's own, none; auto = those of torchvision's weights or published "
        "for the data set, else of your data's training rows, which on real nodes are each node's own",
    )
    skip_bad: bool = Field(False, description="leave out pictures of a folder that cannot be read; they are counted")
    data_fraction: float = Field(
        1.0, gt=0, le=1, description="share of the images of each class that is used, for small studies"
    )
    clients: int = Field(0, ge=0, le=1_000_000, description="number of clients; 0 = the nodes present")
    partition: str = Field(
        "auto",
        description="who holds what; auto = by-client if the data have a column client, else dirichlet; flwr:NAME = a "
        "partitioner of flwr-datasets; see fedapp partitions",
    )
    partition_args: str = Field(
        "", description='arguments of a partitioner of flwr-datasets, "name=value name=value"; see partition'
    )
    partition_file: str = Field("", description="index file of partition = file: .npz of a run, .json or .csv")
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration")
    classes_per_client: int = Field(2, ge=1, description="for the partitions pathological and classes")
    min_samples: int = Field(10, ge=1, description="smallest number of samples a client may get")
    split: Literal["auto", "official", "merged", "holdout", "given"] = Field(
        "auto",
        description="where test data come from; auto = official (by-client: given) if the data set has a test set, "
        "else holdout",
    )
    test_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="in a simulation with split = merged or holdout: share of each client's images for testing",
    )
    model: str = Field(
        "auto",
        description="architecture, or several, comma-separated, assigned to the clients in turn; your own: "
        "package.module:function; see fedapp models",
    )
    model_args: str = Field("", description='further arguments of an own model, "name=value name=value"')
    head: str = Field("", description="layer of an own model that is its head; empty = the last Linear that fits")
    width: int = Field(0, ge=0, description="features of a layer added before the head of an own model; 0 = none")
    weights: str = Field("", description="file with weights of the model, .safetensors or .pt; the head is new")
    freeze: str = Field(
        "", description="layers of a model with weights that are neither trained nor sent, such as features.layer1"
    )
    input_size: Annotated[int, Field(ge=0, le=4096)] | Auto = Field(
        "auto",
        description="side in pixels to which an own model's images are resized; 0 = as they are; auto = with weights "
        "the size that torchvision states for its model, else 0",
    )
    num_server_rounds: int = Field(20, ge=1, description="total number of rounds")
    fraction_train: float = Field(1.0, gt=0, le=1, description="share of clients per round")
    local_epochs: int = Field(2, ge=1, description="epochs of local training per round")
    batch_size: int = Field(16, ge=1, description="samples per step")
    lr: Positive | Auto = Field("auto", description="learning rate")
    optimizer: str = Field(
        "auto", description="local optimizer, new in every round: a class of torch.optim in lower case, such as adamw"
    )
    optimizer_args: str = Field("", description='further arguments of the optimizer, "name=value name=value"')
    lr_schedule: str = Field(
        "",
        description="learning rate by round: a class of torch.optim.lr_scheduler and its arguments, such as "
        '"CosineAnnealingLR eta_min=0.001"; its length is by default the number of rounds; empty = lr in all rounds',
    )
    warmup_rounds: int = Field(
        0, ge=0, description="rounds in which the learning rate rises linearly, before lr-schedule begins"
    )
    lr_schedule_steps: str = Field(
        "",
        description="the same over the steps of a round: its rates divided by lr are factors of the round's rate",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = Field("auto", description="momentum of SGD and RMSprop")
    weight_decay: NonNegative | Auto = Field("auto", description="L2 weight decay")
    clip: NonNegative | Auto = Field("auto", description="largest gradient norm; 0 = no limit")
    class_weights: str = Field(
        "none",
        description="weights of the classes in the supervised loss: none, balanced (n / (C n_c) of each client's "
        "training split), or a number for each class, comma-separated",
    )
    augment: Literal["auto", "none", "weak", "strong"] = Field("auto", description="augmentation of training images")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 = autocast in training and scoring")
    buffers: Literal["global", "local", "drop"] = Field("global", description="what happens to BatchNorm statistics")
    threads: int = Field(1, ge=1, le=1024, description="threads of each client; they affect the last bits")
    server_threads: int = Field(1, ge=1, le=1024, description="threads of the server's mathematics")
    protocols: str = Field("received,trained,global", description="which scores are measured")
    metrics: str = Field(
        "accuracy,loss",
        description="what evaluations of all clients measure on each client's own test images: accuracy, loss, "
        "balanced, macro_f1, auc, ece; in a simulation also your own, package.module:function(y_true, probabilities)",
    )
    balanced_every: int = Field(
        0, ge=-1, description="rounds between balanced scores; 0 = never (digits: 1), -1 = never"
    )
    evaluate_every: int = Field(
        0, ge=0, description="rounds between evaluations of all clients; 0 = after the last only"
    )
    final_training: bool = Field(
        True,
        description="for scores of all clients, each trains once more on what it would receive next; nothing is kept",
    )
    final_clients: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description="clients that train once more, and fine-tune, for scores of all clients; the others are scored as "
        "they receive; auto = all, but in simulations of more than 500 five rounds' worth of clients, at least 500",
    )
    balanced_clients: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description="clients of the balanced score in evaluations of all clients; auto = all, but in simulations of "
        "more than 100 as many as cost a tenth of the training, at least 100, on at least 500 images",
    )
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of each client's training images that is held out for validation scores"
    )
    unseen: str = Field(
        "",
        description="clients that take no part in the training and are scored after it: a share such as 0.3, drawn by "
        "partition-seed, or ids such as 3,7",
    )
    adapt_epochs: str = Field(
        "0,2",
        description="for unseen clients: numbers of local epochs after which they are scored; 0 = as received",
    )
    select: Literal["last", "validation"] = Field(
        "last",
        description="which round is scored at the end: the last, or of those that evaluate-every evaluates (1 unless "
        "given) the one with the best mean validation accuracy of received",
    )
    keep_models: bool | Auto = Field(
        "auto",
        description="in a simulation: keep the final models of every client for fedapp.load, as scored and as "
        "received; auto = up to 100 clients",
    )
    min_replies: Annotated[float, Field(gt=0, le=1)] | Auto = Field(
        "auto", description="smallest share of good replies; auto = 1.0 in simulation, 0.5 in deployment"
    )
    min_clients: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description="smallest number of clients that a run begins and goes on with, without those that are left out or "
        "blocked; auto = the share min-replies of them",
    )
    max_abs: float = Field(
        10_000.0, gt=0, description="largest value in heads and in means of representations that the server takes"
    )
    max_growth: NonNegative | Auto = Field(
        "auto",
        description="largest norm of a model as a multiple of 1 + that of the last round: a longer one of a client is "
        "dropped, and a round that would make one is void; 0 = no limit; auto = 10 on real nodes, else 0",
    )
    round_timeout: float = Field(3600.0, ge=0, description="seconds a round waits for replies; 0 = no limit")
    wait_timeout: float = Field(600.0, ge=0, description="seconds to wait for clients at the start; 0 = no limit")
    patience: int = Field(0, ge=0, description="stop after this many rounds without a lower training loss; 0 = never")
    wire_dtype: Literal["fp32", "fp16"] = Field("fp32", description="fp16 = float32 arrays travel in half precision")
    public_data: str = Field(
        "",
        description="public set of KT-pFL: a share such as 0.05 of the training images, held back from the clients of "
        "every method, or another data set, NAME or NAME:COUNT; empty = the method's default share",
    )
    state_dir: str = Field("", description="folder of the clients' private state; empty = OUT/state")
    federation: str = Field("", description="name under which clients store their state; empty = run")
    lost_state: Literal["refuse", "restart"] = Field(
        "refuse",
        description="what a client does whose stored state is lost, damaged, older than the server knows or another "
        "client's: refuse = it takes no part and is named; restart = it begins anew, marked in the tables",
    )
    warm_start: bool = Field(False, description="clients start from the state that an earlier run left")
    class_names: str = Field(
        "",
        description="the federation's classes, comma-separated, for nodes with their own data; empty = data set's",
    )
    clip_update: float = Field(
        0.0,
        ge=0,
        description="largest L2 norm of the change in the arrays that a client sends back; 0 = no limit",
    )
    robust: str = Field(
        "none",
        description="rules against clients that lie, for every average of what they send, from left to right: norm, "
        "median, trimmed, krum, multikrum, geomedian, such as norm+trimmed; own = the rule of cwFedAvg, FedGH or CCVR",
    )
    robust_f: int = Field(1, ge=0, description="clients of a round that may lie, for robust")
    count_cap: float | Auto = Field(
        "auto",
        description="largest sample count that is believed, as a multiple of the clients' median; 0 = no limit; "
        "auto = 2 with robust, 10 on real nodes, else 0",
    )
    secure_sum: bool = Field(
        False,
        description="clients hide what they send behind masks that cancel in the sum: the server sees sums over "
        "clients alone; for methods that need no more",
    )
    secure_dropout: float = Field(
        0.34,
        ge=0,
        lt=0.5,
        description="with secure-sum: share of the clients of a round that may drop out in it; with more the run ends",
    )
    secure_colluders: int = Field(
        0, ge=0, description="with secure-sum: clients that may tell the server all that they know"
    )
    dp: Literal["none", "example", "client"] = Field(
        "none",
        description="differential privacy of what leaves a client, by noise at the client: example = one image more or "
        "less (class statistics), client = a whole client more or less (model updates)",
    )
    dp_epsilon: float = Field(
        8.0, gt=0, le=100, description="most that a client's releases from its data may add up to, in all runs"
    )
    dp_delta: float = Field(1e-5, gt=0, le=1e-2, description="delta for which epsilon holds; below 1 / images")
    dp_noise: Annotated[float, Field(ge=0.05, le=10_000)] | Auto = Field(
        "auto",
        description="standard deviation of the noise in multiples of what one unit changes; auto = so that the "
        "releases of this run spend dp-epsilon",
    )
    dp_test: bool = Field(
        False, description="noise from the seed, so that a run repeats: no privacy, and refused by real nodes"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of every random draw")
    partition_seed: Annotated[int, Field(ge=0, lt=2**31)] | Auto = Field(
        "auto",
        description="seed of the data: which images are used, who holds them, which are held back; auto = seed, so "
        "that every seed has a partition of its own",
    )
    track: str = Field(
        "",
        description="trackers that the program which follows the run feeds, comma-separated: tensorboard, mlflow, "
        "wandb, or those of installed packages; empty = none",
    )
    out: str = Field("", description="absolute path of the run directory")
    resume: bool = Field(False, description="continue the run in OUT from its last checkpoint")

    # ---- derived -------------------------------------------------------------------------------------------------

    def to_flat(self) -> dict[str, Any]:
        """Return the flat run-config: hyphenated keys, plain values."""
        return self.model_dump(by_alias=True)

    def replaced(self, **changes: Any) -> RunConfig:
        """Return a copy with values that the program decides, by their Python names; nothing is checked again."""
        return self.model_copy(update=changes)

    @property
    def data_seed(self) -> int:
        """The seed of everything that decides who holds which images."""
        return self.seed if self.partition_seed == "auto" else int(self.partition_seed)

    @property
    def reading(self) -> Reading:
        """How own data are read."""
        size = None if self.image_size == "auto" else int(self.image_size)
        return Reading(self.columns, size, self.layout, self.skip_bad)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The architectures, in the order in which they are assigned to clients."""
        return tuple(m.strip() for m in self.model.split(",") if m.strip())

    @property
    def model_options(self) -> ModelOptions:
        """What an own model is built with."""
        known = weights.preprocessing(self.model_names[0]) if self.weights else None
        side = (known[0] if known else 0) if self.input_size == "auto" else int(self.input_size)
        unit = self.dp == "example"
        return ModelOptions(self.model_args, self.head, self.width, self.weights, self.freeze, side, unit)

    @property
    def privacy(self) -> Privacy | None:
        """What the run states of what leaves a client, or None without `dp`."""
        return _privacy(
            self.dp, self.dp_epsilon, self.dp_delta, self.dp_noise, self.releases, self.clip_update, self.dp_test
        )

    @property
    def releases(self) -> int:
        """How often a client of this run sends noised numbers: statistics once, updates in every round."""
        return self.num_server_rounds if self.dp == "client" else 1

    @property
    def second_model(self) -> str:
        """The further model that the method's hyperparameters name (`small`); empty where it has none."""
        return str(getattr(self.method_and_hparams()[1], "small", ""))

    def model_of(self, client: int) -> str:
        """Return the architecture of a client, which its id decides."""
        names = self.model_names
        return names[client % len(names)]

    def check_simulation(self) -> None:
        """Refuse settings for real nodes, and ask for the data and state folders that only real nodes state themselves.

        Raises
        ------
        BadRequest : a setting does not fit a simulation, or a folder is missing.
        """
        if self.class_names:
            raise BadRequest(
                "class-names is for nodes with their own data (--engine deploy): leave it out, the data set has names"
            )
        if self.dataset in OWN and not self.data_dir:
            raise BadRequest(f"dataset = '{self.dataset}' needs data-dir: give the path of your data")
        for name in self.further_metrics:
            evaluation.metric(name)
        if self.warm_start and not self.state_dir:
            raise BadRequest("warm-start needs state-dir (and federation): give those of the earlier run")

    @property
    def measured(self) -> tuple[str, ...]:
        """The scores that are measured."""
        return tuple(p.strip() for p in self.protocols.split(",") if p.strip())

    @property
    def adaptations(self) -> tuple[int, ...]:
        """The numbers of local epochs after which unseen clients are scored, beside what they receive."""
        return tuple(sorted({n for n in _whole_numbers("adapt-epochs", self.adapt_epochs) if n > 0}))

    def unseen_of(self, clients: Iterable[int]) -> tuple[int, ...]:
        """Return which of these clients take no part in the training, by id.

        Raises
        ------
        BadRequest : it names a client that there is not, or leaves none to train.
        """
        ids = sorted(clients)
        if not self.unseen:
            return ()
        if "." in self.unseen:
            share = float(self.unseen)
            chosen = tuple(sampling.sample_clients(self.data_seed, 0, ids, share, purpose="unseen"))
        else:
            chosen = tuple(sorted(set(_whole_numbers("unseen", self.unseen))))
        known = set(ids)
        absent = [c for c in chosen if c not in known]
        if absent:
            raise BadRequest(f"unseen = '{self.unseen}': there is no client {absent[0]}, the ids are {_range(ids)}")
        if len(chosen) == len(ids):
            raise BadRequest(f"unseen = '{self.unseen}' leaves none of {len(ids)} clients to train: name fewer")
        return chosen

    @property
    def further_metrics(self) -> tuple[str, ...]:
        """The metrics that are measured beside accuracy and loss, which are always there; with `auc` its classes."""
        given = [m.strip() for m in self.metrics.split(",") if m.strip()]
        names = dict.fromkeys(n for m in given for n in ((m, "auc_classes") if m == "auc" else (m,)))
        return tuple(m for m in names if m not in evaluation.ALWAYS)

    def check_node(self) -> None:
        """Refuse settings that a real node does not accept from a server.

        Raises
        ------
        BadRequest : the run names a function of its own, which the node would have to import, a file that it would have
            to read, or a federation by what is no name of a folder everywhere.
        """
        if self.federation and not _FEDERATION.match(self.federation):
            raise BadRequest(
                f"federation = '{self.federation[:80]}': on real nodes it names a folder: give 1 to 64 small letters, "
                "digits or hyphens"
            )
        dp_rules.check_node(self)
        if self.partition_file:
            raise BadRequest("partition-file is for simulations, because a node reads no file that a server names")
        own = [m for m in self.further_metrics if evaluation.is_own(m)]
        if own:
            raise BadRequest(
                f"metrics: '{own[0]}' is for simulations, because a node imports no code that a server names: choose "
                f"from {', '.join((*evaluation.ALWAYS, *evaluation.METRICS))}"
            )

    def robustness(self, simulation: bool) -> Robust:
        """Return what the server does against clients that lie."""
        method, hparams = self.method_and_hparams()
        cap = 0.0 if self.count_cap == "auto" and self.secure_sum else self.count_cap
        if cap == "auto":
            cap = 2.0 if self.robust != "none" else 0.0 if simulation else 10.0
            cap = cap if "count-cap" in method.guarded_by(hparams) else 0.0
        return Robust(parsed(self.robust), self.robust_f, float(cap))

    def check_liars(self, clients: int, simulation: bool) -> None:
        """Refuse rules that do not hold for the least number of replies that a round may have.

        Parameters
        ----------
        clients : that take part in the training.

        Raises
        ------
        BadRequest : there may be fewer replies than the rules need; the message says how many they need.
        """
        robust, settings = self.robustness(simulation), self.settings(simulation)
        asked = len(sampling.sample_clients(self.seed, 1, range(clients), settings.fraction))
        least = needed_replies(settings.min_replies, asked)
        need = needed(robust.averages, robust.f)
        if least < need:
            raise BadRequest(
                f"robust = '{self.robust}' with robust-f = {robust.f} needs {need} replies in every round, but a round "
                f"asks {asked} of {clients} clients and may end with {least} replies: lower robust-f, or raise "
                + ("min-replies" if asked >= need else "clients or fraction-train")
            )

    def check_sums(self, clients: int) -> None:
        """Refuse secure sums that would hide nobody.

        Parameters
        ----------
        clients : that take part in the training.

        Raises
        ------
        BadRequest : a round asks too few clients for `secure-dropout` and `secure-colluders`.
        """
        if not self.secure_sum:
            return
        asked = len(sampling.sample_clients(self.seed, 1, range(clients), self.fraction_train))
        problem = flaw(asked, threshold(asked, self.secure_dropout), self.secure_colluders)
        if problem:
            raise BadRequest(
                f"secure-sum with {asked} clients in a round: {problem}; raise clients or fraction-train, or lower "
                "secure-dropout or secure-colluders"
            )

    def numbers(self) -> frozenset[str]:
        """Return the names of all numbers that a client may send, beside the method's own."""
        scored = ["received", "trained", "unseen_received"]
        scored += ["tuned"] if self.method_and_hparams()[0].client.tunes() else []
        scored += [f"unseen_{kind}@{n}" for n in self.adaptations for kind in ("trained", "local")]
        parts = ["correct", "total", "loss-sum", "validation-correct", "validation-total", "balanced"]
        parts += [evaluation.column(m) for m in self.further_metrics]
        ours = ("num-examples", "train-loss", "steps", "train-seconds", "seconds", "restarted", "update-clipped")
        spent = ("dp-epsilon", "dp-releases") if self.dp != "none" else ()
        return frozenset((*ours, *spent, *(f"{p}-{part}" for p in scored for part in parts)))

    def balanced_in(self, server_round: int) -> bool:
        """Return whether round `server_round` measures the balanced score."""
        every = 1 if self.balanced_every == 0 and self.dataset == "digits" else self.balanced_every
        return every > 0 and server_round % every == 0

    def method_and_hparams(self) -> tuple[Method, BaseHParams]:
        """Return the method to run and its hyperparameters."""
        return _method_and_hparams(self.method, self.method_args)

    def train_spec(self) -> TrainSpec:
        """Return the local training settings."""
        return TrainSpec(
            epochs=self.local_epochs,
            batch_size=self.batch_size,
            lr=float(self.lr),
            optimizer=self.optimizer,
            momentum=float(self.momentum),
            weight_decay=float(self.weight_decay),
            clip=float(self.clip),
            augment=self.augment,
            precision=self.precision,
            optimizer_args=self.optimizer_args,
            rates=round_rates(float(self.lr), self.lr_schedule, self.warmup_rounds, self.num_server_rounds),
            step_schedule=self.lr_schedule_steps,
            class_weights=self.class_weights,
        )

    def check_continues(self, earlier: RunConfig, done: int) -> None:
        """Refuse another number of rounds where it changes the learning rates of rounds that are done.

        Parameters
        ----------
        earlier : the configuration of the run that is continued.   done : its complete rounds.

        Raises
        ------
        BadRequest : says which number of rounds it was begun with.
        """
        if self.train_spec().rates[:done] != earlier.train_spec().rates[:done]:
            raise BadRequest(
                f"the learning rates of rounds 1 to {done} were made for {earlier.num_server_rounds} rounds: resume "
                f"without --rounds, or start a new run (with the length in lr-schedule, such as T_max="
                f"{earlier.num_server_rounds}, more rounds can follow)"
            )

    def keeps_models(self, clients: int) -> bool:
        """Return whether a simulation with that many clients keeps their final models."""
        return clients <= 100 if self.keep_models == "auto" else bool(self.keep_models)

    def settings(self, simulation: bool) -> Settings:
        """Return how the server communicates with clients."""
        least = (1.0 if simulation else 0.5) if self.min_replies == "auto" else float(self.min_replies)
        return Settings(
            fraction=self.fraction_train,
            min_replies=least,
            min_clients=0 if self.min_clients == "auto" else int(self.min_clients),
            max_abs=self.max_abs,
            max_growth=(0.0 if simulation else 10.0) if self.max_growth == "auto" else float(self.max_growth),
            metrics=self.numbers(),
            scored=bool({"received", "trained"} & set(self.measured)),
            round_timeout=self.round_timeout,
            wait_timeout=self.wait_timeout,
            wire_dtype=self.wire_dtype,
            restart=self.lost_state == "restart",
            poll=0.01 if simulation else 1.0,
            queued=simulation,
        )


@functools.lru_cache(maxsize=64)
def _privacy(
    unit: str, epsilon: float, delta: float, noise: float | str, releases: int, bound: float, test: bool
) -> Privacy | None:
    if unit == "none":
        return None
    z = noise_for(epsilon, delta, releases) if noise == "auto" else float(noise)
    if unit == "client":
        return Privacy("client", epsilon, delta, z, bound, test)
    return Privacy("example", epsilon, delta, z, test=test)


@functools.lru_cache(maxsize=64)
def _method_and_hparams(method_id: str, args: str) -> tuple[Method, BaseHParams]:
    method = registry.get(method_id)
    hparams = registry.parse_args(method, args)
    return registry.resolve(method, hparams), hparams


KEYS = tuple(name.replace("_", "-") for name in RunConfig.model_fields)


DEFAULTS: dict[str, Any] = RunConfig().to_flat()
"""Every key with its default, as pyproject.toml declares them; `auto` where the method or the data set decides."""


def from_flat(values: Mapping[str, Any]) -> RunConfig:
    """Validate a flat run-config and replace every `auto` that depends on method and data set alone.

    This is the only way in: every `RunConfig` that travels through the program is valid, resolved and frozen.

    Raises
    ------
    BadRequest : unknown key, wrong type, value out of range, or contradicting keys; one line each.
    """
    unknown = [k for k in values if k not in KEYS]
    if unknown:
        raise BadRequest("; ".join(f"unknown key '{k}'{suggest(k, KEYS)}" for k in unknown))
    fields = RunConfig.model_fields
    given = {
        k: float(v) if isinstance(v, int) and not isinstance(v, bool) and _is_float(fields[k.replace("-", "_")]) else v
        for k, v in values.items()
    }
    try:
        config = RunConfig.model_validate(given)
    except ValidationError as e:
        lines: dict[str, list[str]] = {}
        for item in e.errors():
            key = str(item["loc"][0])
            lines.setdefault(key, []).append(_plain(item))
        text = "; ".join(f"{k} = {given.get(k)!r}: {' or '.join(dict.fromkeys(v))}" for k, v in lines.items())
        raise BadRequest(text) from e
    _check(config)
    config = _resolved(config)
    _check_training(config)
    return config


def _is_float(field: Any) -> bool:
    return "float" in str(field.annotation) and "int" not in str(field.annotation).replace("Point", "")


def _plain(error: Any) -> str:
    """Return a validation error of pydantic in plain words."""
    kind, context = error["type"], error.get("ctx", {})
    words = {
        "greater_than": f"must be greater than {context.get('gt')}",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than": f"must be less than {context.get('lt')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "literal_error": f"must be {context.get('expected')}",
    }
    return words.get(kind, str(error["msg"]))


def _check(config: RunConfig) -> None:
    """Refuse settings that contradict each other, without reading any data."""
    method, hparams = config.method_and_hparams()
    bad = [p for p in config.measured if p not in PROTOCOLS]
    if bad or not config.measured:
        raise BadRequest(f"protocols = '{config.protocols}': choose from {', '.join(PROTOCOLS)}")
    _check_metrics(config)
    _check_unseen(config)
    roles(config.columns)
    if not config.model_names:
        raise BadRequest("model is empty: give one architecture, several with commas between them, or auto")
    for name in config.model_names:
        if is_own(name):
            check_form(name, config.model_options)
        elif name != "auto" and name not in MODEL_NAMES:
            known = (*MODEL_NAMES, *own.installed())
            raise BadRequest(
                plugins.problems("models", MODEL_NAMES).get(name)
                or f"unknown model '{name}'{suggest(name, known)}: choose from {', '.join(known)}, or name your own as "
                "package.module:function"
            )
    stored = ModelOptions(weights=config.weights, freeze=config.freeze, unit=config.model_options.unit)
    if config.model_options != stored and not any(map(is_own, config.model_names)):
        raise BadRequest(
            "model-args, head, width and input-size are for own models (package.module:function): leave them out"
        )
    if config.weights and len(set(config.model_names)) > 1:
        raise BadRequest(f"weights are of one architecture, but model = '{config.model}' names several: give one")
    if config.freeze and not config.weights:
        raise BadRequest("freeze keeps layers with stored weights as they are: give weights too, or leave it out")
    if len(set(config.model_names)) > 1 and not method.heterogeneous:
        raise BadRequest(
            f"{config.method} needs one architecture, but model = '{config.model}' names "
            f"{len(set(config.model_names))}: give one, or choose a method that allows several (fedapp methods)"
        )
    if "features." in method.shared_prefixes(hparams) and len(set(config.model_names)) > 1:
        raise BadRequest(
            f"{config.method} with these method-args shares extractors, so all clients need one architecture: "
            "give one model, or change method-args"
        )
    if config.federation and not config.federation.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadRequest(f"federation = '{config.federation}': use letters, digits, '-', '_' and '.' only")
    if config.clip_update and not method.up_prefixes(hparams):
        raise BadRequest(f"clip-update limits changes of model arrays, but {config.method} sends none: leave it at 0")
    _check_robust(config, method, hparams)
    _check_sums(config, method, hparams)
    dp_rules.check(config, method, hparams, DEFAULTS)
    names = [n.strip() for n in config.class_names.split(",")]
    if config.class_names and (not all(names) or len(set(names)) != len(names)):
        raise BadRequest(f"class-names = '{config.class_names}': give different names with commas between them")
    named = flower.is_named(config.partition)
    if config.partition in NATURAL or named:
        changed = [k for k in ("alpha", "classes-per-client") if config.to_flat()[k] != DEFAULTS[k]]
        if changed:
            raise BadRequest(
                f"{changed[0]} is for drawn partitions, and partition = '{config.partition}' is not one: "
                + (f"give {changed[0].replace('-', '_')} in partition-args" if named else "leave it out")
            )
        if not named and config.split == "official":
            raise BadRequest(f"split = 'official' does not go with partition = '{config.partition}': use given or auto")
    if named:
        flower.arguments(config.partition, config.partition_args)
    elif config.partition_args:
        raise BadRequest(
            "partition-args is for partitioners of flwr-datasets: give one, such as partition = "
            "flwr:DirichletPartitioner"
        )
    if config.split == "given" and config.partition not in ("auto", *NATURAL):
        raise BadRequest("split = 'given' goes with partition = 'by-client': choose official, merged or holdout")
    if (config.partition == "file") != bool(config.partition_file):
        raise BadRequest("partition = 'file' and partition-file go together: give both, or neither")
    if config.select == "validation":
        if not config.validation:
            raise BadRequest("select = 'validation' needs validation images: hold some out with --set validation=0.1")
        if "received" not in config.measured:
            raise BadRequest(
                f"select = 'validation' chooses by received, but protocols = '{config.protocols}': measure it too"
            )
        if config.evaluate_every > config.num_server_rounds:
            raise BadRequest(
                f"select = 'validation' with evaluate-every = {config.evaluate_every} evaluates none of "
                f"{config.num_server_rounds} rounds: lower evaluate-every"
            )
    if config.min_clients != "auto" and 0 < config.clients < config.min_clients:
        raise BadRequest(f"min-clients = {config.min_clients}, but clients = {config.clients}: lower min-clients")
    if config.resume and not config.out:
        raise BadRequest("resume needs out: give the run directory to continue")
    check_name(config.dataset)
    kinds = ("auto", *PARTITION_KINDS)
    if config.partition not in kinds and not named:
        raise BadRequest(
            f"unknown partition '{config.partition}'{suggest(config.partition, kinds)}: choose from {', '.join(kinds)}"
        )


def _check_robust(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    guards = method.guarded_by(hparams)
    given = f" with method-args = '{config.method_args}'" if config.method_args else ""
    try:
        rules = parsed(config.robust)
    except ValueError as e:
        raise BadRequest(f"robust = '{config.robust}': {e}") from e
    if rules and not {"rules", OWN_RULE} & set(guards):
        raise BadRequest(
            f"robust is for averages of what clients send, and {config.method}{given} has none that it could guard: "
            "leave it out, or choose another method"
        )
    if rules and "rules" not in guards and rules != (OWN_RULE,):
        raise BadRequest(
            f"robust = '{config.robust}': {config.method}{given} has a rule of its own: use robust = 'own'"
        )
    if rules == (OWN_RULE,) and OWN_RULE not in guards:
        raise BadRequest(
            f"robust = 'own': {config.method}{given} has no rule of its own: choose from {', '.join(RULES)}"
        )
    if not rules and config.robust_f != DEFAULTS["robust-f"]:
        raise BadRequest(f"robust-f = {config.robust_f} says how many clients robust expects to lie: choose a rule too")
    if config.count_cap != "auto" and config.count_cap and "count-cap" not in guards:
        raise BadRequest(f"count-cap limits the weights of clients, and {config.method}{given} has none: leave it out")
    if config.count_cap != "auto" and 0 != config.count_cap < 1:
        raise BadRequest(f"count-cap = {config.count_cap:g}: must be 0, or at least 1 times the median")


def _check_sums(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    """Refuse what needs the replies of single clients where the server sees only their sum."""
    if not config.secure_sum:
        changed = [k for k in ("secure-dropout", "secure-colluders") if config.to_flat()[k] != DEFAULTS[k]]
        if changed:
            raise BadRequest(f"{changed[0]} is for secure sums: set secure-sum = true too, or leave it out")
        return
    given = f" with method-args = '{config.method_args}'" if config.method_args else ""
    if method.sums(hparams) is None:
        raise BadRequest(
            f"secure-sum: {config.method}{given} needs the reply of each client, and not only their sum: leave it out, "
            "or choose a method that averages (docs/secure-sums.md lists them)"
        )
    for key, why in (
        ("robust", "compares single replies"),
        ("max-abs", "looks at single values"),
        ("count-cap", "changes the weights of single replies"),
    ):
        if config.to_flat()[key] != DEFAULTS[key]:
            raise BadRequest(f"{key} {why}, which secure-sum hides from the server: use one of the two")


def _whole_numbers(key: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadRequest(f"{key} = '{text}': give whole numbers from 0 with commas between them")
    return [int(part) for part in parts]


def _range(ids: Sequence[int]) -> str:
    return f"{ids[0]} .. {ids[-1]}" if len(ids) > 8 else ", ".join(map(str, ids))


def _check_unseen(config: RunConfig) -> None:
    longest = max(_whole_numbers("adapt-epochs", config.adapt_epochs))
    if longest > 10_000:
        raise BadRequest(f"adapt-epochs = '{config.adapt_epochs}': {longest} epochs are more than 10000")
    if not config.unseen:
        return
    if "." not in config.unseen:
        _whole_numbers("unseen", config.unseen)
        return
    try:
        share = float(config.unseen)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise BadRequest(f"unseen = '{config.unseen}': give a share between 0 and 1, or ids with commas between them")


def _check_metrics(config: RunConfig) -> None:
    known = (*evaluation.ALWAYS, *evaluation.METRICS)
    taken = {*known, "correct", "total", "validation", *(evaluation.column(m) for m in evaluation.METRICS)}
    for name in config.further_metrics:
        module, _, function = name.partition(":")
        if not evaluation.is_own(name):
            if name not in known:
                raise BadRequest(
                    f"metrics: unknown '{name}'{suggest(name, known)}: choose from {', '.join(known)}, or name your "
                    "own as package.module:function"
                )
        elif not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise BadRequest(f"metrics: '{name}' is not of the form package.module:function")
        elif function in taken:
            raise BadRequest(f"metrics: '{function}' is the name of another score: rename your function")
        else:
            taken.add(function)


def _check_training(config: RunConfig) -> None:
    """Refuse an optimizer, a schedule or weights that are not valid, or that leave a setting without effect."""
    name = config.optimizer
    if not takes(name, "momentum") and config.momentum:
        raise BadRequest(f"momentum is for SGD and RMSprop: leave it at auto with optimizer = '{name}'")
    if not takes(name, "weight_decay") and config.weight_decay:
        raise BadRequest(f"{name} has no weight decay: leave weight-decay at auto, or choose another optimizer")
    if name == "rprop" and config.lr_schedule_steps:
        raise BadRequest("rprop uses lr for the first step of a round only: leave out lr-schedule-steps")
    spec = config.train_spec()  # makes the rates of the rounds
    if config.optimizer_args:
        make_optimizer([torch.nn.Parameter(torch.zeros(()))], spec)
    if config.lr_schedule_steps:
        parse_schedule("lr-schedule-steps", config.lr_schedule_steps)
    class_numbers(config.class_weights)


def known_partition(partition: str, dataset: str) -> str:
    """Return what `auto` stands for where the name of the data set decides it; the user's own data must be read."""
    return "dirichlet" if partition == "auto" and published(dataset) is not None else partition


def _resolved(config: RunConfig) -> RunConfig:
    """Replace every `auto` that depends only on method and data set by its value."""
    method, _ = config.method_and_hparams()
    d = method.defaults

    def pick(value: Any, auto: _T) -> Any:
        return auto if value == "auto" else value

    optimizer = pick(config.optimizer, d.optimizer)
    check_optimizer(optimizer)
    # The user's own data decide the model when they are read.
    known = published(config.dataset)
    model = "auto" if known is None else default_model(known.shape)
    return config.replaced(
        model=",".join(model if n == "auto" else n for n in config.model_names),
        lr=pick(config.lr, d.lr_digits if config.dataset == "digits" else d.lr),
        optimizer=optimizer,
        momentum=pick(config.momentum, d.momentum if optimizer == "sgd" else 0.0),
        weight_decay=pick(config.weight_decay, d.weight_decay if takes(optimizer, "weight_decay") else 0.0),
        clip=pick(config.clip, d.clip),
        partition=known_partition(config.partition, config.dataset),
        augment=pick(config.augment, d.augment),
        evaluate_every=max(1, config.evaluate_every) if config.select == "validation" else config.evaluate_every,
    )


_KNOWN: OrderedDict[str, RunConfig] = OrderedDict()
"""Configurations that this process has validated, by the text of their flat form; the newest last."""


def for_context(config: RunConfig) -> dict[str, Any]:
    """Return the flat run-config for Flower's contexts in this process; :func:`from_context` then knows it as valid."""
    flat = config.to_flat()
    _remember(_text(flat), config)
    return flat


def from_context(run_config: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a Flower context; every message brings it, and a process validates it once."""
    text = _text(run_config)
    if text not in _KNOWN:
        _remember(text, from_flat(json.loads(text)))
    return _KNOWN[text]


def _text(flat: Mapping[str, Any]) -> str:
    return json.dumps(dict(flat), sort_keys=True)


def _remember(text: str, config: RunConfig) -> None:
    _KNOWN[text] = config
    while len(_KNOWN) > 16:
        _KNOWN.popitem(last=False)


FORMER = ("cuda-graphs",)
"""Keys that earlier versions wrote into every `config.toml` and that changed no number."""


def without_former(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run directory's `config.toml` says, without keys that no longer exist and changed no number."""
    return {key: value for key, value in values.items() if key not in FORMER}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of run-config keys.

    Raises
    ------
    BadRequest : the file does not exist, cannot be read, or is not TOML.
    """
    try:
        with path.open("rb") as f:
            data = tomllib.load(f)
    except FileNotFoundError as e:
        raise BadRequest(f"{path} does not exist: check the path") from e
    except OSError as e:
        raise BadRequest(f"{path} cannot be read ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadRequest(f"{path} is not TOML: {e}") from e
    return data


def write_toml(path: Path, config: RunConfig) -> None:
    """Write a configuration as the TOML file that `fedapp run FILE.toml` reads."""
    path.write_text(tomli_w.dumps(config.to_flat()), encoding="utf-8")


def parse_value(key: str, text: str) -> Any:
    """Turn the text of `--set key=value` into the type of the key.

    Raises
    ------
    BadRequest : the key is unknown, or the text is not of its type.
    """
    if key not in KEYS:
        raise BadRequest(f"unknown key '{key}'{suggest(key, KEYS)}")
    field = RunConfig.model_fields[key.replace("-", "_")]
    kind = str(field.annotation)
    if text == "auto" and "auto" in kind:
        return text
    or_auto = " or auto" if "auto" in kind else ""
    if "bool" in kind:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise BadRequest(f"{key} = '{text}': must be true or false{or_auto}")
    if "int" in kind:
        try:
            return int(text)
        except ValueError as e:
            raise BadRequest(f"{key} = '{text}': must be a whole number{or_auto}") from e
    if "float" in kind:
        try:
            return float(text)
        except ValueError as e:
            raise BadRequest(f"{key} = '{text}': must be a number{or_auto}") from e
    return text
