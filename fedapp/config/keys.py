"""The configuration of a run, the values that follow from several groups of settings, and the tables of flat keys.

The keys with their types, defaults and meanings are in `fedapp.settings`. pyproject.toml declares every key with the
same default (a test compares them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedapp import registry, sampling
from fedapp.core.privacy import BOUND, Privacy, noise_for
from fedapp.data.names import SHOWN
from fedapp.errors import BadRequest, counted, suggest
from fedapp.learning import evaluation
from fedapp.learning.optimizers import round_rates
from fedapp.method import BaseHParams, Method
from fedapp.models import frozen
from fedapp.privacy.clients import noised_client
from fedapp.reduce.scaling import with_scaling
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
    unless_auto,
)
from fedapp.settings.evaluation import CONFUSION, is_id, share_of


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
        return unless_auto(self.data.partition_seed, self.federation.seed)

    @property
    def mechanism(self) -> Privacy | None:
        """The run's statement about its noised replies, or None without `dp`."""
        dp = self.privacy
        if dp.dp == "none":
            return None
        if dp.dp == "sgd":
            return Privacy(
                "example", dp.dp_epsilon, dp.dp_delta, unless_auto(dp.dp_noise, 0.0), dp.dp_clip, dp.dp_test,
                sgd=True, rounds=self.federation.num_server_rounds, asked=dp.dp_epsilon,
            )  # fmt: skip
        given: Any = dp.dp_noise
        noise = noise_for(dp.dp_epsilon, dp.dp_delta, self.releases) if given == "auto" else float(given)
        bound = self.robustness.clip_update if dp.dp == "client" else BOUND
        return Privacy(dp.dp, dp.dp_epsilon, dp.dp_delta, noise, bound, dp.dp_test)

    @property
    def releases(self) -> int:
        """How often a client of this run sends noised numbers: statistics once, models in every round."""
        return 1 if self.privacy.dp == "example" else self.federation.num_server_rounds

    @property
    def second_model(self) -> str:
        """The further model that the method's hyperparameters name (`small`); empty where it has none."""
        return str(getattr(self.method_and_hparams()[1], "small", ""))

    @property
    def bodies_apart(self) -> tuple[str, ...]:
        """First digits of the bodies that get a head each; empty where layers of each client follow on its features."""
        return self.data.named_bodies if getattr(self.method_and_hparams()[1], "base", "") == "none" else ()

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
                f"unseen = '{self.evaluation.unseen}': these data have no client {absent[0]}, the ids are {_range(ids)}"
            )
        if len(chosen) == len(ids):
            raise BadRequest(
                f"unseen = '{self.evaluation.unseen}' leaves none of {counted(len(ids), 'client')} to train: name fewer"
            )
        return chosen

    def _client(self, text: str, names: Sequence[str], ids: Sequence[int]) -> int:
        """Return the id of an unseen client that is given by id or by name."""
        if is_id(text):
            return int(text)
        name = text.removeprefix("name:")
        if name in names:
            return names.index(name)
        there = f"the data have {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        raise BadRequest(
            f"unseen = '{self.evaluation.unseen}': no client is called '{name}'"
            + suggest(name, names, there if names else f"these clients have no names, so give ids: {_range(ids)}")
        )

    def resolved(self, simulation: bool) -> RunConfig:
        """Return the configuration with a number for each `auto` of `RobustnessSettings` and `FederationSettings`.

        Parameters
        ----------
        simulation : all clients are the user's own.
        """
        method, hparams = self.method_and_hparams()
        guard, federation = self.robustness, self.federation
        cap = 2.0 if guard.rules else 0.0 if simulation else method.usual_cap(hparams)
        capped = "count-cap" in method.guarded_by(hparams) or self.privacy.dp == "example"
        return self.replaced(
            count_cap=unless_auto(guard.count_cap, cap if capped and not self.secure.secure_sum else 0.0),
            # Noise of `dp = client` makes an honest update far longer than a model.
            max_growth=unless_auto(guard.max_growth, 0.0 if simulation or self.privacy.dp == "client" else 10.0),
            min_replies=unless_auto(federation.min_replies, 1.0 if simulation else 0.5),
            min_clients=unless_auto(federation.min_clients, 0),
        )

    def test_cap(self, simulation: bool) -> float:
        """Return the largest number of test samples in pooled scores, as a multiple of the median; 0 = no limit.

        Parameters
        ----------
        simulation : all clients are the user's own, so `auto` has no limit.
        """
        return unless_auto(self.robustness.count_cap, 0.0 if simulation else 10.0)

    def numbers(self) -> frozenset[str]:
        """Return the names of all numbers that a client may send, besides the method's own."""
        scored = ["received", "trained", "unseen_received"]
        scored += ["tuned", "unseen_tuned"] if self.method_and_hparams()[0].client.tunes() else []
        scored += [f"unseen_{kind}@{n}" for n in self.evaluation.adaptations for kind in ("trained", "local")]
        parts = ["correct", "total", "loss-sum", "validation-correct", "validation-total", "balanced"]
        parts += [evaluation.column(m) for m in self.evaluation.further_metrics]
        parts += [CONFUSION] if self.evaluation.confusion else []
        ours = ("num-examples", "train-loss", "steps", "train-seconds", "seconds", "restarted", "update-clipped")
        spent = ("dp-epsilon", "dp-releases") if self.privacy.dp != "none" else ()
        return frozenset((*ours, *spent, *(f"{p}-{part}" for p in scored for part in parts)))

    def balanced_in(self, server_round: int) -> bool:
        """Return whether round `server_round` measures the balanced score."""
        every = self.evaluation.balanced_every or int(self.data.dataset == "digits")
        return every > 0 and server_round % every == 0

    def method_and_hparams(self) -> tuple[Method, BaseHParams]:
        """Return the method to run and its hyperparameters."""
        method, hparams = registry.configured(self.federation.method, self.federation.method_args)
        if self.privacy.dp == "example":
            method = dataclasses.replace(method, client=noised_client(method, hparams))
        if frozen.of(self.model.model, self.model).scaled:
            method = with_scaling(method, hparams)
        return method, hparams

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of rounds 1, 2, ...; empty = `lr` in all."""
        training = self.training
        rounds = self.federation.num_server_rounds
        return round_rates(training.lr, training.lr_schedule, training.warmup_rounds, rounds) if rounds else ()


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
    class-names bodies clip-update robust robust-f count-cap secure-sum secure-dropout secure-colluders dp dp-epsilon
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
