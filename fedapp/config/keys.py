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
from typing import Any

from pydantic import BaseModel, ConfigDict

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
from fedapp.settings import (
    DataSettings,
    EvaluationSettings,
    FederationSettings,
    ModelSettings,
    PrivacySettings,
    RobustnessSettings,
    SecureSettings,
    StorageSettings,
    TrainingSettings,
)
from fedapp.transport.client_manager import Settings, needed_replies

_FEDERATION = re.compile(r"\A[a-z0-9-]{1,64}\Z")
PROTOCOLS = ("received", "trained", "global")


class RunConfig(BaseModel):
    """The settings of a run, in nine groups. Files and command lines know their keys without the groups."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    federation: FederationSettings = FederationSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    storage: StorageSettings = StorageSettings()
    robustness: RobustnessSettings = RobustnessSettings()
    privacy: PrivacySettings = PrivacySettings()
    secure: SecureSettings = SecureSettings()

    # ---- derived -------------------------------------------------------------------------------------------------

    def to_flat(self) -> dict[str, Any]:
        """Return the flat run-config: hyphenated keys, plain values."""
        values = {key: value for _, group in self for key, value in group.model_dump(by_alias=True).items()}
        return {key: values[key] for key in KEYS}

    def replaced(self, **changes: Any) -> RunConfig:
        """Return a copy with values that the program decides, by their Python names."""
        of: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            of.setdefault(GROUP_OF[name], {})[name] = value
        return self.model_copy(update={g: getattr(self, g).replaced(**values) for g, values in of.items()})

    @property
    def data_seed(self) -> int:
        """The seed of everything that decides who holds which images."""
        return self.federation.seed if self.data.partition_seed == "auto" else int(self.data.partition_seed)

    @property
    def reading(self) -> Reading:
        """How own data are read."""
        size = None if self.data.image_size == "auto" else int(self.data.image_size)
        return Reading(self.data.columns, size, self.data.layout, self.data.skip_bad)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The architectures, in the order in which they are assigned to clients."""
        return tuple(m.strip() for m in self.model.model.split(",") if m.strip())

    @property
    def model_options(self) -> ModelOptions:
        """What an own model is built with."""
        known = weights.preprocessing(self.model_names[0]) if self.model.weights else None
        side = (known[0] if known else 0) if self.model.input_size == "auto" else int(self.model.input_size)
        unit = self.privacy.dp == "example"
        return ModelOptions(
            self.model.model_args, self.model.head, self.model.width, self.model.weights, self.model.freeze, side, unit
        )

    @property
    def mechanism(self) -> Privacy | None:
        """What the run states of what leaves a client, or None without `dp`."""
        if self.privacy.dp == "sgd":
            dp = self.privacy
            own = 0.0 if dp.dp_noise == "auto" else float(dp.dp_noise)
            return Privacy(
                "example", dp.dp_epsilon, dp.dp_delta, own, dp.dp_clip, dp.dp_test,
                sgd=True, rounds=self.federation.num_server_rounds, asked=dp.dp_epsilon,
            )  # fmt: skip
        return _privacy(
            self.privacy.dp,
            self.privacy.dp_epsilon,
            self.privacy.dp_delta,
            self.privacy.dp_noise,
            self.releases,
            self.robustness.clip_update,
            self.privacy.dp_test,
        )

    @property
    def releases(self) -> int:
        """How often a client of this run sends noised numbers: statistics once, models in every round."""
        return 1 if self.privacy.dp == "example" else self.federation.num_server_rounds

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
        if self.data.class_names:
            raise BadRequest(
                "class-names is for nodes with their own data (--engine deploy): leave it out, the data set has names"
            )
        if self.data.dataset in OWN and not self.data.data_dir:
            raise BadRequest(f"dataset = '{self.data.dataset}' needs data-dir: give the path of your data")
        for name in self.further_metrics:
            evaluation.metric(name)
        if self.storage.warm_start and not self.storage.state_dir:
            raise BadRequest("warm-start needs state-dir (and federation): give those of the earlier run")

    @property
    def measured(self) -> tuple[str, ...]:
        """The scores that are measured."""
        return tuple(p.strip() for p in self.evaluation.protocols.split(",") if p.strip())

    @property
    def adaptations(self) -> tuple[int, ...]:
        """The numbers of local epochs after which unseen clients are scored, beside what they receive."""
        return tuple(sorted({n for n in whole_numbers("adapt-epochs", self.evaluation.adapt_epochs) if n > 0}))

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
        if not self.evaluation.unseen:
            return ()
        share = share_of(self.evaluation.unseen)
        if share is not None:
            chosen = tuple(sampling.sample_clients(self.data_seed, 0, ids, share, purpose="unseen"))
        else:
            chosen = tuple(
                sorted({self._client(part.strip(), names, ids) for part in self.evaluation.unseen.split(",")})
            )
        known = set(ids)
        absent = [c for c in chosen if c not in known]
        if absent:
            raise BadRequest(
                f"unseen = '{self.evaluation.unseen}': there is no client {absent[0]}, the ids are {_range(ids)}"
            )
        if len(chosen) == len(ids):
            raise BadRequest(
                f"unseen = '{self.evaluation.unseen}' leaves none of {counted(len(ids), 'client')} to train: name fewer"
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
            f"unseen = '{self.evaluation.unseen}': no client is called '{name}'{suggest(name, names)}: "
            + (there if names else f"these clients have no names, so give ids: {_range(ids)}")
        )

    @property
    def names_unseen(self) -> bool:
        """Whether unseen clients are given by name, which the data must have."""
        return share_of(self.evaluation.unseen) is None and not all(
            _is_id(part.strip()) for part in self.evaluation.unseen.split(",")
        )

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
        return [m.strip() for m in self.evaluation.metrics.split(",") if m.strip()]

    def check_node(self) -> None:
        """Refuse settings that a real node does not accept from a server.

        Raises
        ------
        BadRequest : the run names a function of its own, which the node would have to import, a file that it would have
            to read, or a federation by what is no name of a folder everywhere.
        """
        if self.storage.federation and not _FEDERATION.match(self.storage.federation):
            raise BadRequest(
                f"federation = '{self.storage.federation[:80]}': on real nodes it names a folder: give 1 to 64 small "
                "letters, "
                "digits or hyphens"
            )
        dp_rules.check_node(self)
        if self.data.partition_file:
            raise BadRequest("partition-file is for simulations, because a node reads no file that a server names")
        if self.confusion:
            raise BadRequest("metrics: 'confusion' is for simulations, because it tells how many samples of each class")
        own = [m for m in self.further_metrics if evaluation.is_own(m)]
        if own:
            raise BadRequest(
                f"metrics: '{own[0]}' is for simulations, because a node imports no code that a server names: choose "
                f"from {', '.join((*evaluation.ALWAYS, *evaluation.METRICS))}"
            )

    def robust_rules(self, simulation: bool) -> Robust:
        """Return what the server does against clients that lie."""
        method, hparams = self.method_and_hparams()
        cap = 0.0 if self.robustness.count_cap == "auto" and self.secure.secure_sum else self.robustness.count_cap
        if cap == "auto":
            cap = 2.0 if self.robustness.robust != "none" else 0.0 if simulation else method.count_cap
            cap = cap if "count-cap" in method.guarded_by(hparams) or self.privacy.dp == "example" else 0.0
        return Robust(parsed(self.robustness.robust), self.robustness.robust_f, float(cap))

    def believed_tests(self, tests: Iterable[int], simulation: bool) -> float:
        """Return up to how many test samples a client's word counts in pooled scores.

        Parameters
        ----------
        tests : how many each client states.   simulation : all clients are the user's own, so `auto` has no limit.
        """
        cap = (0.0 if simulation else 10.0) if self.robustness.count_cap == "auto" else self.robustness.count_cap
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
        robust, settings = self.robust_rules(simulation), self.settings(simulation)
        asked = len(sampling.sample_clients(self.federation.seed, 1, range(clients), settings.fraction))
        least = needed_replies(settings.min_replies, asked)
        need = needed(robust.averages, robust.f)
        if least < need:
            raise BadRequest(
                f"robust = '{self.robustness.robust}' with robust-f = {robust.f} needs {counted(need, 'reply')} in "
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
        if not self.secure.secure_sum:
            return
        asked = len(sampling.sample_clients(self.federation.seed, 1, range(clients), self.federation.fraction_train))
        problem = flaw(asked, threshold(asked, self.secure.secure_dropout), self.secure.secure_colluders)
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
        spent = ("dp-epsilon", "dp-releases") if self.privacy.dp != "none" else ()
        return frozenset((*ours, *spent, *(f"{p}-{part}" for p in scored for part in parts)))

    def balanced_in(self, server_round: int) -> bool:
        """Return whether round `server_round` measures the balanced score."""
        every = (
            1
            if self.evaluation.balanced_every == 0 and self.data.dataset == "digits"
            else self.evaluation.balanced_every
        )
        return every > 0 and server_round % every == 0

    def method_and_hparams(self) -> tuple[Method, BaseHParams]:
        """Return the method to run and its hyperparameters."""
        return registry.configured(self.federation.method, self.federation.method_args)

    def train_spec(self) -> TrainSpec:
        """Return the local training settings."""
        return TrainSpec(
            epochs=self.training.local_epochs,
            batch_size=self.training.batch_size,
            lr=float(self.training.lr),
            optimizer=self.training.optimizer,
            momentum=float(self.training.momentum),
            weight_decay=float(self.training.weight_decay),
            clip=float(self.training.clip),
            augment=self.training.augment,
            precision=self.training.precision,
            optimizer_args=self.training.optimizer_args,
            rates=round_rates(
                float(self.training.lr),
                self.training.lr_schedule,
                self.training.warmup_rounds,
                self.federation.num_server_rounds,
            ),
            step_schedule=self.training.lr_schedule_steps,
            class_weights=self.training.class_weights,
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
                f"{counted(earlier.federation.num_server_rounds, 'round')}: resume "
                f"without --rounds, or start a new run (with the length in lr-schedule, such as T_max="
                f"{earlier.federation.num_server_rounds}, more rounds can follow)"
            )

    def keeps_models(self, clients: int) -> bool:
        """Return whether a simulation with that many clients keeps their final models."""
        return clients <= 100 if self.evaluation.keep_models == "auto" else bool(self.evaluation.keep_models)

    def settings(self, simulation: bool) -> Settings:
        """Return how the server communicates with clients."""
        least = (
            (1.0 if simulation else 0.5)
            if self.federation.min_replies == "auto"
            else float(self.federation.min_replies)
        )
        return Settings(
            fraction=self.federation.fraction_train,
            min_replies=least,
            min_clients=0 if self.federation.min_clients == "auto" else int(self.federation.min_clients),
            max_abs=self.robustness.max_abs,
            max_growth=(0.0 if simulation else 10.0)
            if self.robustness.max_growth == "auto"
            else float(self.robustness.max_growth),
            metrics=self.numbers(),
            scored=bool({"received", "trained"} & set(self.measured)),
            round_timeout=self.federation.round_timeout,
            wait_timeout=self.federation.wait_timeout,
            wire_dtype=self.federation.wire_dtype,
            restart=self.storage.lost_state == "restart",
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


_ORDER = """
    method method-args dataset data-dir columns image-size layout normalise skip-bad data-fraction clients partition
    partition-args partition-file alpha classes-per-client min-samples split test-share model model-args head width
    weights freeze input-size num-server-rounds fraction-train local-epochs batch-size lr optimizer optimizer-args
    lr-schedule warmup-rounds lr-schedule-steps momentum weight-decay clip class-weights augment precision
    buffers threads server-threads protocols metrics balanced-every evaluate-every final-training final-clients
    balanced-clients validation unseen adapt-epochs select keep-models min-replies min-clients max-abs max-growth
    round-timeout wait-timeout patience wire-dtype public-data state-dir federation lost-state warm-start
    class-names clip-update robust robust-f count-cap secure-sum secure-dropout secure-colluders dp dp-epsilon
    dp-delta dp-noise dp-clip dp-test seed partition-seed track out resume
"""
KEYS = tuple(_ORDER.split())
"""Every key, in the order of `config.toml`."""
GROUPS = {name: type(group) for name, group in RunConfig()}
"""The groups by name."""
GROUP_OF = {name: group for group, settings in GROUPS.items() for name in settings.model_fields}
"""The group of every key, by its Python name."""
FIELDS = {field.alias: field for settings in GROUPS.values() for field in settings.model_fields.values()}
"""Type, default and meaning of every key."""
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
