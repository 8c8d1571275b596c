"""Every run-config key with its type, default and meaning, and what the program derives from them.

pyproject.toml declares every key with the same default (a test compares them). The file is long because there are many
keys, and whoever looks for one looks here.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedapp import registry, sampling
from fedapp.core.privacy import Privacy, noise_for
from fedapp.core.robust import Robust, needed, parsed
from fedapp.core.secure_sum import flaw, threshold
from fedapp.data.columns import SHOWN, Reading
from fedapp.data.datasets import OWN
from fedapp.errors import BadRequest, counted, is_number, suggest
from fedapp.learning import dp_rules, evaluation
from fedapp.learning.optimizers import round_rates
from fedapp.learning.training import TrainSpec
from fedapp.method import BaseHParams, Method
from fedapp.models import ModelOptions, weights
from fedapp.transport.client_manager import Settings, needed_replies

Auto = Literal["auto"]
_FEDERATION = re.compile(r"\A[a-z0-9-]{1,64}\Z")
PROTOCOLS = ("received", "trained", "global")

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
        "for the data set, else as data, with public rows; on real nodes as client",
    )
    skip_bad: bool = Field(False, description="leave out files and pictures that cannot be used; they are counted")
    data_fraction: float = Field(
        1.0, gt=0, le=1, description="share of the images of each class that is used, for small studies"
    )
    clients: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="number of clients; 0 = the nodes present, in a simulation all that the data name, else 10",
    )
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
        description="where test data come from; auto = official (by-client: given, flwr: by another column than "
        "label: merged) if the data set has a test set, else holdout",
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
        "balanced, macro_f1, auc, ece; in a simulation also confusion, in the last of them, and your own, "
        "package.module:function(y_true, probabilities)",
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
        "partition-seed, or ids such as 3,7, or names as the data card prints them (a name that is a number: name:7)",
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
        "auto = 2 with robust, 10 on real nodes without secure-sum (which hides counts; CCVR 2), else 0. Pooled scores "
        "believe test counts so far too (auto = 10 on real nodes, else 0)",
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
    dp: Literal["none", "example", "sgd", "client"] = Field(
        "none",
        description="differential privacy of what leaves a client, by noise at the client: example = one image more or "
        "less (class statistics), sgd = the same for models, by noise in each step of the local training (DP-SGD), "
        "client = a whole client more or less (model updates)",
    )
    dp_epsilon: float = Field(
        8.0, gt=0, le=100, description="most that a client's releases from its data may add up to, in all runs"
    )
    dp_delta: float = Field(1e-5, gt=0, le=1e-2, description="delta for which epsilon holds; below 1 / images")
    dp_noise: Annotated[float, Field(ge=0.05, le=10_000)] | Auto = Field(
        "auto",
        description="standard deviation of the noise in multiples of what one unit changes, with dp = sgd of the noise "
        "of a step in multiples of dp-clip; auto = so that the releases of this run spend dp-epsilon",
    )
    dp_clip: float = Field(1.0, gt=0, description="with dp = sgd: norm that the gradient of each image is clipped to")
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
        if self.dp == "sgd":
            own = 0.0 if self.dp_noise == "auto" else float(self.dp_noise)
            return Privacy(
                "example", self.dp_epsilon, self.dp_delta, own, self.dp_clip, self.dp_test,
                sgd=True, rounds=self.num_server_rounds, asked=self.dp_epsilon,
            )  # fmt: skip
        return _privacy(
            self.dp, self.dp_epsilon, self.dp_delta, self.dp_noise, self.releases, self.clip_update, self.dp_test
        )

    @property
    def releases(self) -> int:
        """How often a client of this run sends noised numbers: statistics once, models in every round."""
        return 1 if self.dp == "example" else self.num_server_rounds

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
        return tuple(sorted({n for n in whole_numbers("adapt-epochs", self.adapt_epochs) if n > 0}))

    def unseen_of(self, clients: Iterable[int], names: Sequence[str] = ()) -> tuple[int, ...]:
        """Return which of these clients take no part in the training, by id.

        Parameters
        ----------
        names : of all clients by id, where the data name them; else empty.

        Raises
        ------
        BadRequest : it names a client that there is not, or leaves none to train.
        """
        ids = sorted(clients)
        if not self.unseen:
            return ()
        share = share_of(self.unseen)
        if share is not None:
            chosen = tuple(sampling.sample_clients(self.data_seed, 0, ids, share, purpose="unseen"))
        else:
            chosen = tuple(sorted({self._client(part.strip(), names, ids) for part in self.unseen.split(",")}))
        known = set(ids)
        absent = [c for c in chosen if c not in known]
        if absent:
            raise BadRequest(f"unseen = '{self.unseen}': there is no client {absent[0]}, the ids are {_range(ids)}")
        if len(chosen) == len(ids):
            raise BadRequest(
                f"unseen = '{self.unseen}' leaves none of {counted(len(ids), 'client')} to train: name fewer"
            )
        return chosen

    def _client(self, text: str, names: Sequence[str], ids: Sequence[int]) -> int:
        """Return the id of an unseen client that is given by id or by name."""
        if _is_id(text):
            return int(text)
        name = text.removeprefix("name:")
        if name in names:
            return names.index(name)
        there = f"the data have {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        raise BadRequest(
            f"unseen = '{self.unseen}': no client is called '{name}'{suggest(name, names)}: "
            + (there if names else f"these clients have no names, so give ids: {_range(ids)}")
        )

    @property
    def names_unseen(self) -> bool:
        """Whether unseen clients are given by name, which the data must have."""
        return share_of(self.unseen) is None and not all(_is_id(part.strip()) for part in self.unseen.split(","))

    @property
    def further_metrics(self) -> tuple[str, ...]:
        """The metrics that are measured beside accuracy and loss, which are always there; with `auc` its classes."""
        names = dict.fromkeys(n for m in self._named_metrics for n in ((m, "auc_classes") if m == "auc" else (m,)))
        return tuple(m for m in names if m not in (*evaluation.ALWAYS, evaluation.CONFUSION))

    @property
    def confusion(self) -> bool:
        """Whether the last evaluation measures confusion matrices."""
        return evaluation.CONFUSION in self._named_metrics

    @property
    def _named_metrics(self) -> list[str]:
        return [m.strip() for m in self.metrics.split(",") if m.strip()]

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
        if self.confusion:
            raise BadRequest("metrics: 'confusion' is for simulations, because it tells how many samples of each class")
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
            cap = 2.0 if self.robust != "none" else 0.0 if simulation else method.count_cap
            cap = cap if "count-cap" in method.guarded_by(hparams) or self.dp == "example" else 0.0
        return Robust(parsed(self.robust), self.robust_f, float(cap))

    def believed_tests(self, tests: Iterable[int], simulation: bool) -> float:
        """Return up to how many test samples a client's word counts in pooled scores.

        Parameters
        ----------
        tests : how many each client states.   simulation : all clients are the user's own, so `auto` has no limit.
        """
        cap = (0.0 if simulation else 10.0) if self.count_cap == "auto" else self.count_cap
        # Without a cap nobody is counted: a simulation may have very many clients, and asks in every round.
        known = [n for n in tests if n] if cap else []
        # The lower median, which one client alone cannot raise, not even one of two.
        return cap * statistics.median_low(known) if known else math.inf

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
                f"robust = '{self.robust}' with robust-f = {robust.f} needs {counted(need, 'reply')} in "
                f"every round, but a round "
                f"asks {asked} of {counted(clients, 'client')} and may end with "
                f"{counted(least, 'reply')}: lower robust-f, or raise "
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
                f"secure-sum with {counted(asked, 'client')} in a round: {problem}; raise clients or "
                f"fraction-train, or lower "
                "secure-dropout or secure-colluders"
            )

    def numbers(self) -> frozenset[str]:
        """Return the names of all numbers that a client may send, beside the method's own."""
        scored = ["received", "trained", "unseen_received"]
        scored += ["tuned", "unseen_tuned"] if self.method_and_hparams()[0].client.tunes() else []
        scored += [f"unseen_{kind}@{n}" for n in self.adaptations for kind in ("trained", "local")]
        parts = ["correct", "total", "loss-sum", "validation-correct", "validation-total", "balanced"]
        parts += [evaluation.column(m) for m in self.further_metrics]
        parts += [evaluation.CONFUSION] if self.confusion else []
        ours = ("num-examples", "train-loss", "steps", "train-seconds", "seconds", "restarted", "update-clipped")
        spent = ("dp-epsilon", "dp-releases") if self.dp != "none" else ()
        return frozenset((*ours, *spent, *(f"{p}-{part}" for p in scored for part in parts)))

    def balanced_in(self, server_round: int) -> bool:
        """Return whether round `server_round` measures the balanced score."""
        every = 1 if self.balanced_every == 0 and self.dataset == "digits" else self.balanced_every
        return every > 0 and server_round % every == 0

    def method_and_hparams(self) -> tuple[Method, BaseHParams]:
        """Return the method to run and its hyperparameters."""
        return registry.configured(self.method, self.method_args)

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
                f"the learning rates of rounds 1 to {done} were made for "
                f"{counted(earlier.num_server_rounds, 'round')}: resume "
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
            poll=0.01 if simulation else 0.1,
            slowest=0.1 if simulation else 1.0,
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


def share_of(text: str) -> float | None:
    """Return a share such as 0.3; None if a text is none, as ids and names of clients."""
    return float(text) if "." in text and is_number(text) else None


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()


def whole_numbers(key: str, text: str) -> list[int]:
    """Return the whole numbers of a text with commas between them.

    Raises
    ------
    BadRequest : it holds something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_id, parts)):
        raise BadRequest(f"{key} = '{text}': give whole numbers from 0 with commas between them")
    return [int(part) for part in parts]


def _range(ids: Sequence[int]) -> str:
    return f"{ids[0]} .. {ids[-1]}" if len(ids) > 8 else ", ".join(map(str, ids))


KEYS = tuple(name.replace("_", "-") for name in RunConfig.model_fields)
OTHER_NAMES = {
    "algorithm": "method", "strategy": "method", "hparams": "method-args", "hyperparameters": "method-args",
    "data": "dataset", "data-path": "data-dir", "path": "data-dir", "normalize": "normalise",
    "nodes": "clients", "concentration": "alpha", "dirichlet-alpha": "alpha", "labels-per-client": "classes-per-client",
    "shards": "classes-per-client", "test-size": "test-share", "test-fraction": "test-share", "architecture": "model",
    "net": "model", "rounds": "num-server-rounds", "num-rounds": "num-server-rounds", "n-rounds": "num-server-rounds",
    "global-rounds": "num-server-rounds", "communication-rounds": "num-server-rounds", "fraction": "fraction-train",
    "fraction-fit": "fraction-train", "client-fraction": "fraction-train", "participation": "fraction-train",
    "join-ratio": "fraction-train", "epochs": "local-epochs", "num-epochs": "local-epochs", "n-epochs": "local-epochs",
    "batch": "batch-size", "bs": "batch-size", "learning-rate": "lr", "local-lr": "lr", "optim": "optimizer",
    "scheduler": "lr-schedule", "lr-scheduler": "lr-schedule", "warmup": "warmup-rounds", "wd": "weight-decay",
    "l2": "weight-decay", "grad-clip": "clip", "clip-grad": "clip", "max-grad-norm": "clip",
    "augmentation": "augment", "amp": "precision", "val": "validation", "val-split": "validation",
    "validation-split": "validation", "early-stopping": "patience", "timeout": "round-timeout",
    "epsilon": "dp-epsilon", "delta": "dp-delta", "noise": "dp-noise", "noise-multiplier": "dp-noise",
    "random-seed": "seed", "random-state": "seed", "logger": "track", "tracker": "track", "output": "out",
    "output-dir": "out", "out-dir": "out", "n-clients": "clients", "num-clients": "clients", "model-name": "model",
    "dataset-name": "dataset",
}  # fmt: skip
"""Names that other programs and papers have for a key, for the "did you mean" of an unknown one."""


DEFAULTS: dict[str, Any] = RunConfig().to_flat()
"""Every key with its default, as pyproject.toml declares them; `auto` where the method or the data set decides."""
