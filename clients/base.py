"""`FedClient`: one round of one client, which exchanges only named, partial parameters.

The table lists the functions that a method's client may define, in the order in which a round calls them. They may
change `self.model`, `self.own` (private arrays) and attributes that they set themselves. Only `self.model` and
`self.own` are stored on disk after the round. Before the next one `self.own` is always restored, and what of the model
the server does not send. Where it sends the whole model, the stored one is read with `needs_state` only; without it,
the values are NaN until `receive` has replaced them.

| function                          | when                                     | default                         |
|-----------------------------------|------------------------------------------|---------------------------------|
| `build_model(spec, hparams)`      | whenever a model is built, on both sides | the model of the zoo            |
| `common_facts()`                  | when the client registers                | no facts to compare             |
| `trains_on(rows, held, hparams)`  | before that, in a simulation             | all of its training images      |
| `trained_models()`                | then too, to refuse batches of one image | the model                       |
| `restore(server_round, payload)`  | first                                    | the model as the client left it |
| `initial_seed()`                  | in `restore`, for a client without state | a seed of the client's own      |
| `receive(payload)`                | before the score `received`              | copies the shared arrays        |
| `configure_model(model, scalars)` | in `receive`, and on the server          | nothing                         |
| `before_training(payload)`        | after the score `received`               | nothing                         |
| `optimise(payload)`               | the local training                       | runs the phases                 |
| `phases()`                        | in `optimise`                            | one, the loop over `step_loss`  |
| `phase_epochs()`                  | when the client registers                | one phase, the run's settings   |
| `train_spec()`, `adam_betas()`    | in `optimise`                            | the run's settings              |
| `epochs_in(t, epochs, hparams)`   | when curves by local epochs are drawn    | the run's settings              |
| `parameters()`, `views`           | in `optimise`                            | all parameters, one view        |
| `step_loss(batch)`                | every step                               | mean cross-entropy              |
| `on_gradients(parameters)`        | every step, after the backward pass      | nothing                         |
| `after_epoch(epoch)`              | after every epoch                        | nothing                         |
| `after_training(payload)`         | before the score `trained`               | no further arrays               |
| `tuning()`                        | before the last score, on a copy         | no fine-tuning, no such score   |
| `scored(protocol)`                | for each score, and when a model is kept | the model                       |
| `score(x, y, probabilities)`      | for each score                           | the model's predictions         |
| `alone(hparams)`                  | when a stored model is used              | whether `score` is the default  |
| `reply_metrics()`                 | last                                     | no further numbers              |
| `reference(payload)`              | if updates are clipped                   | the arrays as received          |
| `feature_batches()`               | for statistics of features               | representations and labels      |
| `answer(kind, payload)`           | for each query of the server             | an error                        |

Only the arrays that the method declares as `shared` (or `up`) and `extra_up` leave the client.

The file is long because the whole contract of a client stands in it, in the order of the table.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from clients._flower import PositionalClient
from fedapp import process, sampling
from fedapp.core import names
from fedapp.errors import BadRequest
from fedapp.lazy import F, Tensor, nn, torch
from fedapp.learning import dp_sgd
from fedapp.learning.dp_sgd import NoisySteps
from fedapp.learning.evaluation import Scores, batched, confusion, evaluate, measured
from fedapp.learning.releases import Releaser
from fedapp.learning.state import ClientStore, Stored
from fedapp.learning.task import ModelSpec, Task
from fedapp.learning.training import (
    Batch,
    Phase,
    TrainReport,
    batch_slices,
    class_weights,
    needs_two,
    rate_in,
    step_rates,
    train,
    trained_alone,
)
from fedapp.method import Arrays, BaseHParams, Method, Payload, Scalar
from fedapp.models import build_model, is_own, selection, weights
from fedapp.models.copies import copied, redrawn
from fedapp.settings import TrainingSettings
from fedapp.settings.evaluation import CONFUSION

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from fedapp.models import SplitModel

ROWS = 4096
"""Images whose representations are held at a time."""


class FedClient(PositionalClient):
    """One client of a federation.

    Parameters
    ----------
    task : data, architecture and settings.
    method, hparams : the method and its hyperparameters.
    store : holds the private state between rounds; None stores nothing (for tests and other apps).
    """

    views: ClassVar[int] = 1
    """Number of independent augmentations of each image in a step."""
    private_logits: ClassVar[bool] = False
    """Whether a client adds logits of its own to those of the head."""
    needs_state: ClassVar[bool] = False
    """Whether the method needs its stored model even where the server sends it. `self.own` is always restored.

    Without it, an own `restore` or `receive` finds NaN in all that the server sends, if this is the whole model.
    """

    def __init__(self, task: Task, method: Method, hparams: Any, store: ClientStore | None = None) -> None:
        self.task = task
        self.method = method
        self.hparams = hparams
        self.store = store
        self.device = task.y_train.device
        self.own: Arrays = {}
        self.round = 0
        self.model: SplitModel
        self.tuned: SplitModel
        self.report = TrainReport()
        self.newcomer = False  # whether `meet` scores it, which says how many epochs it trains
        self.stored: Stored | None = None  # what `restore` has read, of which `self.own` is
        self._loaded: Stored | None = None
        self._starts_from_state = True
        self._unread: Collection[str] = ()  # names in the stored state that a round does not read
        self.releaser: Releaser | None = None  # with `dp`: the only way in which numbers leave
        self.scoring = False  # whether a training is for a score alone: nothing of it is stored or sent
        self.released = False  # whether what is sent is a copy of what was released before

    # ---- hooks ---------------------------------------------------------------------------------------------------

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the model of a specification; server and clients call the same function."""
        return build_model(**vars(spec))

    @classmethod
    def trains_plainly(cls) -> bool:
        """Return whether a client differs from that of FedAvg in the start of its model alone: DP-SGD covers it."""
        kinds = cls.__mro__[: cls.__mro__.index(FedClient)]
        own = {n for kind in kinds for n, value in vars(kind).items() if not n.startswith("_") or callable(value)}
        return own <= {"initial_seed"}

    @classmethod
    def initial_arrays(cls, spec: ModelSpec, method: Method, hparams: Any, buffers: str) -> Arrays:
        """Return the shared arrays of a new model, which the server starts from.

        Raises
        ------
        BadRequest : one of them is not finite, so that no reply with it would count.
        """
        model = cls.build_model(spec, hparams)
        arrays = selection.extract(model, cls.names_of(model, method, hparams, buffers))
        if odd := next((n for n, a in arrays.items() if not np.isfinite(a).all()), None):
            raise BadRequest(
                f"'{odd}' of the model '{spec.name}' has numbers that are not finite, and {method.id} sends it: change "
                "its initial values, or register a constant buffer with persistent=False, which is not sent"
            )
        return arrays

    @classmethod
    def configure_model(cls, model: SplitModel, scalars: Mapping[str, Scalar]) -> None:
        """Apply a payload's plain values to the model itself, not to its arrays; server and clients both call this."""

    def receive(self, payload: Payload) -> None:
        """Copy the shared model arrays that the server sent into the model."""
        selection.merge(self.model, payload.all())
        self.configure_model(self.model, payload.scalars)

    def before_training(self, payload: Payload) -> None:
        """Prepare the round, for example by copying what the loss refers to."""

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the loss of one batch, a scalar in nats: mean cross-entropy."""
        return self.cross_entropy(self.model(batch.x), batch.y)

    def on_gradients(self, parameters: list[Tensor]) -> None:
        """Change the gradients of a step of `optimise` in place.

        The order of a step is: backward pass, this function, clipping (`clip`), the optimizer, which adds weight decay.

        Parameters
        ----------
        parameters : all tensors that are trained, in the order of `parameters()`; `grad` is None where the loss does
            not depend on one.
        """

    @classmethod
    def adds_to_loss(cls) -> bool:
        """Whether the method has a loss of its own, so that `train-loss` is more than the mean cross-entropy."""
        return cls.step_loss is not FedClient.step_loss

    def parameters(self) -> ParamsT:
        """Return the parameters to optimise, in groups where they are clipped apart."""
        return self.model.parameters()

    def after_epoch(self, epoch: int) -> None:
        """Run after each local epoch, counted from 0."""

    @classmethod
    def epochs_in(cls, server_round: int, local_epochs: int, hparams: Any) -> int:
        """Return the epochs of a round, given `local-epochs`; for round 0 those that come before round 1."""
        return local_epochs if server_round else 0

    def train_spec(self) -> TrainingSettings:
        """Return the training settings of this round. Its learning rate is `rate`."""
        return self.task.train

    @property
    def rate(self) -> float:
        """Learning rate of this round, at its first step unless there is a schedule of steps."""
        return rate_in(self.round, self.task.rates, self.train_spec().lr)

    def after_training(self, payload: Payload) -> Arrays:
        """Return further arrays for the reply, named as the method's `extra_up` declares."""
        return {}

    def reference(self, payload: Payload) -> Arrays:
        """Return the arrays from which `clip-update` measures the change: the model arrays as received, by name."""
        return payload.all()

    @classmethod
    def alone(cls, hparams: Any) -> bool:
        """Whether the model alone predicts what `score` counts, so that it can be used without the client."""
        return cls.score is FedClient.score

    def reply_metrics(self) -> dict[str, Any]:
        """Return further numbers for the reply, each named in `Method.columns` or `Method.metrics`."""
        return {}

    def trained_models(self) -> list[SplitModel]:
        """Return the models that this client trains, with any values."""
        return [_skeleton(type(self), self.task.spec(0), self.hparams)]

    @classmethod
    def trains_on(cls, rows: int, held_out: int, hparams: Any) -> int:
        """Return how many training images a client states, of its own and those that it holds out for validation."""
        return rows

    def check_batches(self) -> None:
        """Refuse batches of one image for a model whose BatchNorm needs two; called before anything is trained.

        Raises
        ------
        BadRequest : says what to change.
        """
        if self.task.train.batch_size == 1:
            self.refuse_single("batch-size is 1", "give batch-size = 2 or more")
        if self.task.num_samples == 1:
            held_out = 0 if self.task.x_validation is None else len(self.task.x_validation)
            self.refuse_single(
                f"it has one image to train on{f', since validation holds out {held_out}' if held_out else ''}",
                "leave out validation, or give it more images (in a simulation: a larger min-samples)"
                if held_out
                else "give it more (in a simulation: min-samples = 2 or more)",
            )

    def snapshot(self, prefix: str = "") -> list[Tensor]:
        """Return copies of the parameters whose names begin with `prefix`, since training changes them in place."""
        return [p.detach().clone() for name, p in self.model.named_parameters() if name.startswith(prefix)]

    def check_training(self) -> None:
        """Refuse settings that do not fit this client's data; called before anything is trained.

        Raises
        ------
        BadRequest : says what to change.
        """
        self.check_batches()
        _ = self.class_weights
        spec = self.train_spec()
        for epochs in self.phase_epochs():
            step_rates(spec, self.rate, epochs * len(batch_slices(self.task.num_samples, spec.batch_size)))

    def refuse_single(self, what: str, remedy: str) -> None:
        """Raise `BadRequest` if one of the models needs two images in a batch; `what` says why there is only one."""
        for model in self.trained_models():
            if needs_two(model, self.task.inputs):
                raise BadRequest(
                    f"{what}, and BatchNorm in '{model.name}' needs two images in a batch: "
                    f"{remedy}, or choose a model without BatchNorm"
                )

    def common_facts(self) -> dict[str, Scalar]:
        """Return facts that must be equal at all clients, such as a checksum of public images."""
        return {}

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer the server's query `kind` with the model after `receive(payload)`.

        Returns
        -------
        The arrays and the numbers of the reply.
        """
        raise ValueError(f"the method '{self.method.id}' cannot answer 'query.{kind}': define answer() in its client")

    def phase_epochs(self) -> Sequence[int]:
        """Return the passes of each phase of a round, for `check_training`, which has no model yet."""
        return [self.train_spec().local_epochs]

    def adam_betas(self) -> tuple[float, float]:
        """Return the decay rates of the two moments, for Adam and its relatives."""
        return (0.9, 0.999)

    def phases(self) -> Sequence[Phase]:
        """Return the parts of the local training, in their order."""
        return [Phase(self.step_loss, self.train_spec())]

    def optimise(self, payload: Payload) -> TrainReport:
        """Run the local training of the round, phase after phase."""
        report = TrainReport()
        for phase in self.phases():
            report = report.then(self.run_phase(phase))
        return report

    def run_phase(self, phase: Phase) -> TrainReport:
        """Train what a phase names on the training split, and nothing else."""
        model = self.model if phase.model is None else phase.model
        with trained_alone(model, phase.prefixes) as held:
            return train(
                model,
                self.task.x_train,
                self.task.y_train,
                phase.spec,
                self.task.inputs,
                phase.loss,
                self.generator(phase.draws),
                parameters=self.parameters() if phase.parameters is None else phase.parameters,
                views=self.views,
                betas=self.adam_betas(),
                on_epoch=self.after_epoch,
                on_gradients=None if type(self).on_gradients is FedClient.on_gradients else self.on_gradients,
                held=held,
                private=self._private(phase.spec),
                rate=rate_in(self.round, self.task.rates, phase.spec.lr) if phase.rate is None else phase.rate,
            )

    def _private(self, spec: TrainingSettings) -> NoisySteps | None:
        """Return what makes the steps of a training private, after it is booked; None without DP-SGD."""
        count = len(batch_slices(len(self.task.y_train), spec.batch_size))
        if self.releaser is None or not self.releaser.privacy.sgd or not count or spec.local_epochs < 1:
            return None
        self.check_private()
        numbers = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return self.releaser.training(count, spec.local_epochs, numbers, booked=not self.scoring)

    def check_private(self) -> None:
        """Refuse what DP-SGD does not cover, before any image is used.

        Raises
        ------
        BadRequest : a model or a setting with which one image changes more than its own gradient.
        RuntimeError : the method has a loss of its own.
        """
        if type(self).step_loss is not FedClient.step_loss:
            raise RuntimeError(f"{self.method.id} has a loss of its own, for which DP-SGD is not described")
        if self.task.train.augment == "strong" and self.task.inputs.kind == "table":
            raise BadRequest(
                "dp = 'sgd': augment = 'strong' takes values of a row from other rows, so that no clipping bounds what "
                "one of them changes: take augment = 'weak' or 'none'"
            )
        for model in self.trained_models():
            dp_sgd.check(model, model.name, self.task.inputs.shape)

    def tuning(self) -> Sequence[Phase]:
        """Return the parts of the fine-tuning of what was received, before the score `tuned` after the last round.

        A method that defines this has that score, and it is the headline. The phases draw from a purpose of their own.
        """
        return ()

    @classmethod
    def tunes(cls) -> bool:
        """Whether clients fine-tune a copy of what they received before their last score."""
        return cls.tuning is not FedClient.tuning

    def scored(self, protocol: str) -> SplitModel:
        """Return the model that a score is of; that of `trained` is also the one that is stored and used later.

        Parameters
        ----------
        protocol : name of the score, such as `received`, `trained` or `unseen_trained@2`.
        """
        return self.model

    def initial_seed(self) -> int:
        """Return the seed of a new client's model, of which the arrays count that the server does not send."""
        return sampling.derived_seed(self.task.seed, "model", self.task.client)

    # ---- one exchange --------------------------------------------------------------------------------------------

    def train_round(
        self, payload: Payload, server_round: int, *, balanced: bool = False
    ) -> tuple[Arrays, int, dict[str, Any]]:
        """Evaluate the received model, train it, evaluate the trained model, store the state, and reply.

        Parameters
        ----------
        server_round : number of the round from 1.
        balanced : also measure the balanced score.

        Returns
        -------
        The reply's arrays, n_k, and its metrics.
        """
        self.round = server_round
        self.restore(server_round, payload)
        self.receive(payload)
        metrics: dict[str, Any] = {}
        if "received" in self.task.protocols:
            metrics.update(self.measure("received", balanced))
        scores, extras = self._train(payload, balanced)
        metrics.update(scores)
        # Nobody changes the model after this: it is sent and stored from its own memory.
        arrays = {**selection.views(self.model, self.up_names(), sent=True), **extras}
        if not math.isnan(self.report.loss):
            metrics["train-loss"] = self.report.loss
        metrics["steps"] = self.report.steps
        metrics["train-seconds"] = self.report.seconds
        metrics.update(self.reply_metrics())
        if self.store is not None:
            self.store.save(server_round, self.state(), self._unread)
            head = self.scored("trained").head.weight
            self.store.note_head_norms(server_round, head.detach().double().norm(dim=1).cpu().numpy())
        return arrays, self.task.num_samples, metrics

    def evaluate_round(
        self, payload: Payload, server_round: int, *, balanced: bool = True, train: bool = False
    ) -> dict[str, Any]:
        """Score the model as sent now (`received`); store nothing.

        Parameters
        ----------
        server_round : the round that the payload would begin.
        train : leave `trained` to `train_to_score`. Otherwise it is the score of the model as last trained, at whatever
            round that was; a client that has never trained reports the score of the received model under both names.
        """
        self.round = server_round
        self.restore(server_round, payload, always=not train)
        metrics: dict[str, Any] = {}
        trained = "trained" in self.task.protocols and not train
        if trained and self._loaded is not None:
            metrics.update(self.measure("trained", balanced, further=True))
            trained = False
        self.receive(payload)
        scored = trained or "received" in self.task.protocols
        received = self.measure("received", balanced, further=True) if scored else {}
        if "received" in self.task.protocols:
            metrics.update(received)
        if trained:
            metrics.update({k.replace("received", "trained", 1): v for k, v in received.items()})
        return metrics

    def train_to_score(self, payload: Payload, *, balanced: bool = True) -> dict[str, Any]:
        """Train once more after `evaluate_round` and score the result (`trained`); nothing is stored or sent."""
        self.scoring = True
        return self._train(payload, balanced, further=True)[0]

    def tune_to_score(self, protocol: str = "tuned", *, balanced: bool = True) -> dict[str, Any]:
        """Fine-tune a copy of the model after `evaluate_round` or `meet`, and score it; nothing is stored or sent.

        The model is as received again afterwards; the copy is `self.tuned`.
        """
        self.scoring = True
        received, self.model = self.model, copied(self.model)
        try:
            for phase in self.tuning():
                self.run_phase(phase)
            self.tuned = self.model
            return self.measure(protocol, balanced, further=True)
        finally:
            self.model = received

    def _train(self, payload: Payload, balanced: bool, further: bool = False) -> tuple[dict[str, Any], Arrays]:
        """Train and score the result; return the `trained` scores and the reply's further arrays."""
        extras = self._learn(payload)
        return (self.measure("trained", balanced, further) if "trained" in self.task.protocols else {}), extras

    def _learn(self, payload: Payload) -> Arrays:
        """Run the local training of a round; return the reply's further arrays."""
        if self.task.buffers == "drop":
            for module in (*self.model.modules(), *self.scored("trained").modules()):
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.reset_running_stats()
        self.before_training(payload)
        self.report = self.optimise(payload)
        return self.after_training(payload)

    def meet(self, payload: Payload, server_round: int, protocol: str, epochs: int) -> dict[str, Any]:
        """Score this client as one that the server has never heard of; nothing is stored or sent.

        Parameters
        ----------
        payload : what the server sends a newcomer in `server_round`.
        protocol : name of the score.   epochs : of local training before it; 0 = the model as received.
        """
        self.round = server_round
        self.newcomer = self.scoring = True
        self.restore(server_round, payload)
        self.receive(payload)
        if epochs:
            # Not in the task: KT-pFL has epochs of its own, and unseen clients of all methods train equally long.
            spec = self.train_spec().replaced(local_epochs=epochs)
            self.train_spec = lambda: spec  # type: ignore[method-assign]
            self._learn(payload)
        return self.measure(protocol, balanced=True, further=True)

    def answer_query(self, kind: str, payload: Payload, server_round: int) -> tuple[Arrays, int, dict[str, Any]]:
        """Answer one query of the server; return the arrays, n_k and the metrics of the reply."""
        self.round = server_round
        self.restore(server_round, payload)
        self.receive(payload)
        arrays, metrics = self.answer(kind, payload)
        return arrays, self.task.num_samples, metrics

    # ---- pieces --------------------------------------------------------------------------------------------------

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the supervised loss of local training: cross-entropy in nats, weighted by `class-weights`.

        With weights it is the sum of w_y CE divided by the number of samples, and not by the sum of their weights as
        PyTorch's weighted mean: batches then add up to the mean over the training split, whatever their classes.

        Parameters
        ----------
        logits : (B, C).   y : (B,) labels.
        """
        if self.class_weights is None:
            return F.cross_entropy(logits, y)
        return F.cross_entropy(logits, y, self.class_weights, reduction="sum") / len(y)

    @functools.cached_property
    def class_weights(self) -> Tensor | None:
        """The weights of the classes, (C,) float32, or None without weights."""
        return class_weights(self.task.train.class_weights, self.task.y_train, self.task.num_classes)

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator that depends only on seed, purpose, round and client."""
        return sampling.torch_generator(self.task.seed, purpose, self.round, self.task.client)

    def measure(self, protocol: str, balanced: bool = False, further: bool = False) -> dict[str, Any]:
        """Score the current model on the client's own test split, as sums and counts.

        `balanced` adds the balanced score, `further` the metrics that the run measures beside accuracy and loss.
        """
        kept, self.model = self.model, self.scored(protocol)
        try:
            return self._measured(protocol, balanced, further)
        finally:
            self.model = kept

    def _measured(self, protocol: str, balanced: bool, further: bool) -> dict[str, Any]:
        names = self.task.metrics if further else ()
        matrix = further and self.task.confusion and not self.newcomer
        more = {"probabilities": True} if names or matrix else {}
        scores = self.score(self.task.x_test, self.task.y_test, **more)
        metrics: dict[str, Any] = {
            f"{protocol}-correct": int(scores.correct.sum()),
            f"{protocol}-total": scores.n,
            f"{protocol}-loss-sum": scores.loss_sum,
        }
        if more:
            labels = self.task.y_test.cpu().numpy()
            found = measured(names, labels, scores.probabilities)
            metrics |= {f"{protocol}-{name}": value for name, value in found.items()}
            if matrix:
                metrics[f"{protocol}-{CONFUSION}"] = confusion(labels, scores.probabilities).ravel()
        if self.task.x_validation is not None and self.task.y_validation is not None:
            held_out = self.score(self.task.x_validation, self.task.y_validation)
            metrics[f"{protocol}-validation-correct"] = int(held_out.correct.sum())
            metrics[f"{protocol}-validation-total"] = held_out.n
        if balanced and self.task.x_union is not None and self.task.y_union is not None:
            metrics[f"{protocol}-balanced"] = self.score(self.task.x_union, self.task.y_union).balanced
        return metrics

    def score(self, x: Tensor, y: Tensor, probabilities: bool = False) -> Scores:
        """Score the current model on images x, (n, H, W, C) uint8, with labels y, (n,).

        `probabilities` : keep those of every image, (n, num_classes), for metrics beside accuracy and loss.
        """
        return evaluate(
            self.model, x, y, self.task.inputs, self.task.num_classes,
            precision=self.task.train.precision, probabilities=probabilities,
        )  # fmt: skip

    def representations(self, x: Tensor | None = None) -> Tensor:
        """Return (n, width) float32 representations of the training split or of `x`, with the test transform."""
        self.model.eval()
        return batched(self.model.represent, self.task.x_train if x is None else x, self.task.inputs)

    def feature_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features (n, d) and labels (n,) of the training split, `ROWS` images at a time."""
        for start in range(0, self.task.num_samples, ROWS):
            part = slice(start, start + ROWS)
            yield self.representations(self.task.x_train[part]), self.task.y_train[part]

    def restore(self, server_round: int, payload: Payload, always: bool = False) -> None:
        """Build the model as this client left it before `server_round`; a new client gets its seeded initial model."""
        skeleton = _skeleton(type(self), self.task.spec(0), self.hparams)
        covered = self._covered(payload)
        self._loaded = None
        self._starts_from_state = always or self.needs_state or not covered
        self._unread = () if always else self._replaced(payload)
        if self.store is not None and self._starts_from_state:
            self.stored = self._loaded = self.store.load(server_round, without=self._unread)
        elif self.store is not None:
            # The server sends the whole model, so only the private arrays are read from the stored state.
            self.stored = self.store.load(server_round, "own/", needed=False)
            if self.stored is not None:
                self.own = names.under("own/", self.stored.arrays)
        begins = self._loaded is None and not covered
        unread = self._looks() and not self._starts_from_state
        blank = () if self._looks() and not unread else payload.all().keys()
        self.model = self._new(skeleton) if begins else copied(skeleton, blank)
        if unread:  # a method that looks at it would else find an untrained model, the same at all clients
            state = self.model.state_dict()
            for name in payload.all().keys() & state.keys():
                state[name].fill_(math.nan)
        if self._loaded is not None:
            selection.merge(self.model, names.under("model/", self._loaded.arrays))
            self.own = names.under("own/", self._loaded.arrays)
        if self.device.type != "cpu":
            self.model.to(self.device)

    def _replaced(self, payload: Payload) -> set[str]:
        """Return the names, in a stored state, of what `receive` replaces before a method can have looked at it."""
        if self.needs_state or (self._looks() and self._starts_from_state):
            return set()
        return {f"model/{name}" for name in payload.all()}

    def _looks(self) -> bool:
        """Whether the method may look at the model before it has what the server sent."""
        kind = type(self)
        return kind.restore is not FedClient.restore or kind.receive is not FedClient.receive

    def _new(self, skeleton: SplitModel) -> SplitModel:
        """Return this client's own initial model; `skeleton` is another one of its form."""
        spec = self.task.spec(self.initial_seed())
        # To find that out takes longer than one model, and the process of a real node makes no other.
        if not process.real_node() and _redraws(type(self), self.task.spec(0), self.hparams):
            return redrawn(skeleton, spec.seed)
        return self.build_model(spec, self.hparams)

    def state_facts(self) -> dict[str, Scalar]:
        """Return what the server must know of the state that a round has stored, to recognise it in the next one.

        Returns
        -------
        `state` : its digest.   `state-from` : digest of the last state that the server knew of, from which it was made.
        `state-binds` : whether the next training starts from it.   `state-lost` : why the client began anew.
        """
        if self.store is None:
            return {}
        facts: dict[str, Scalar] = {
            "state": self.store.written,
            "state-from": "" if self.store.lost else self.store.expected.digest,
            "state-binds": self._starts_from_state or bool(self.own),
        }
        return facts | ({"state-lost": self.store.lost} if self.store.lost else {})

    def _covered(self, payload: Payload) -> bool:
        """Return whether the payload holds every parameter and floating-point buffer of the model."""
        return _names(type(self), self.task.spec(0), self.hparams) <= payload.all().keys()

    def state(self) -> Arrays:
        """Return everything that is stored after the round."""
        trained = self.scored("trained")
        model = {f"model/{name}": a for name, a in selection.views(trained, trained.state_dict()).items()}
        return {**model, **{f"own/{name}": np.asarray(a) for name, a in self.own.items()}}

    def down_names(self) -> list[str]:
        """Return the names of the model arrays that the server sends, in state-dict order."""
        return self.names_of(self._model_or_skeleton(), self.method, self.hparams, self.task.buffers)

    def up_names(self) -> list[str]:
        """Return the names of the model arrays in this client's replies, in state-dict order."""
        prefixes = self.method.up_prefixes(self.hparams)
        return selection.shared_names(self._model_or_skeleton(), prefixes, self.task.buffers) if prefixes else []

    @staticmethod
    def names_of(model: nn.Module, method: Method, hparams: BaseHParams, buffers: str) -> list[str]:
        """Return the names of the shared arrays of a model under a method."""
        prefixes = method.shared_prefixes(hparams)
        return selection.shared_names(model, prefixes, buffers) if prefixes else []

    def _model_or_skeleton(self) -> nn.Module:
        return self.model if hasattr(self, "model") else _skeleton(type(self), self.task.spec(0), self.hparams)

    def register(self) -> tuple[dict[str, Any], dict[str, Scalar]]:
        """Return what this client states about itself: sample count, model and shared shapes, never class counts."""
        self.check_training()
        model = _skeleton(type(self), self.task.spec(0), self.hparams)
        state = model.state_dict()
        shapes = {n: list(state[n].shape) for n in [*self.down_names(), *self.up_names()]}
        info: dict[str, Scalar] = {
            "client": self.task.client,
            "model": self.task.model,
            "num-classes": self.task.num_classes,
            "shape": json.dumps(self.task.inputs.shape),
            "width": model.width,
            "shapes": json.dumps(shapes),
            "common": json.dumps({**self.common_facts(), **self._weights()}),
        }
        return {"num-examples": self.task.num_samples, "test-examples": len(self.task.y_test)}, info

    def _weights(self) -> dict[str, Scalar]:
        """Return the checksum of the stored weights: layers that are not sent must be the same everywhere."""
        stored = self.task.settings.weights
        return {"weights": weights.checksum(stored)} if stored and self.task.settings.freeze else {}


@functools.lru_cache(maxsize=16)
def _skeleton(client: type[FedClient], spec: ModelSpec, hparams: Any) -> SplitModel:
    """Build a model once per process; clients work on copies, so nothing is carried over from one to the next."""
    return client.build_model(spec, hparams)


@functools.lru_cache(maxsize=16)
def _redraws(client: type[FedClient], spec: ModelSpec, hparams: Any) -> bool:
    """Return whether new random values make another client's initial model of a skeleton, tried with two seeds.

    A user's own function may do anything with its random numbers, so its models are always made by it.
    """
    if is_own(spec.name):
        return False
    skeleton = _skeleton(client, spec, hparams)
    pairs = ((client.build_model(replace(spec, seed=k), hparams), redrawn(skeleton, k)) for k in (1, 2))
    return all(_same(a, b) for a, b in pairs)


def _same(a: nn.Module, b: nn.Module) -> bool:
    values = (x.state_dict().values() for x in (a, b))
    return all(torch.equal(u, v) and u.stride() == v.stride() for u, v in zip(*values, strict=True))


@functools.lru_cache(maxsize=16)
def _names(client: type[FedClient], spec: ModelSpec, hparams: Any) -> frozenset[str]:
    """Return the names of all that a model's state consists of and that may be sent."""
    return frozenset(selection.shared_names(_skeleton(client, spec, hparams), ("",)))
