"""`FedClient`: one round of one client, which exchanges only named, partial parameters.

The table lists the functions that a method's client may define, in the order in which a round calls them. They may
change `self.model`, `self.own` (private arrays) and attributes that they set themselves. Only `self.model` and
`self.own` are stored on disk after the round. Before the next one `self.own` is always restored, and what of the model
the server does not send. Where it sends the whole model, the stored one is read with `needs_state` only; without it,
the values are NaN until `receive` has replaced them. An evaluation scores the stored model as `trained` before
`receive`, but after it where the server sends nothing of the model.

| function                          | when                                     | default                         |
|-----------------------------------|------------------------------------------|---------------------------------|
| `build_model(spec, hparams)`      | whenever a model is built, on both sides | the model of the zoo            |
| `common_facts()`                  | when the client registers                | no facts to compare             |
| `receive(payload)`                | before the score `received`              | copies the shared arrays        |
| `configure_model(model, scalars)` | in `receive`, and on the server          | nothing                         |
| `before_training(payload)`        | after the score `received`               | nothing                         |
| `phases()`                        | local training; at registration as well  | one, the loop over `step_loss`  |
| `step_loss(batch)`                | every step                               | mean cross-entropy              |
| `after_step(batch)`               | after the optimizer's step               | nothing                         |
| `after_epoch(epoch)`              | after every epoch                        | nothing                         |
| `after_training(payload)`         | before the score `trained`               | no further arrays and numbers   |
| `tuning()`                        | before the last score, on a copy         | no fine-tuning, no such score   |
| `score(x, y, probabilities)`      | for each score                           | the model's predictions         |
| `answer(kind, payload)`           | for each query of the server             | an error                        |
| `answer_prepare(payload)`         | for the query before round 1             | an error                        |
| `feature_batches(exchange)`       | where statistics of features are made    | the representations             |

It may also state the values `needs_state`, `alone`, `block`, `computed` and `private_logits`. A method replaces nothing
else of `FedClient`.

Only the arrays that the method declares as `shared` (or `up`) and `extra_up` leave the client.

The file is long because the whole contract of a client stands in it, in the order of the table.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from clients._checks import MOVED, check_private, check_training, facts_of_the_body
from clients._flower import PositionalClient
from clients._initial import all_names, initial_model, shared_names, skeleton
from fedapp import sampling
from fedapp.core import names
from fedapp.lazy import F, Tensor, nn, torch
from fedapp.learning.dp_sgd import NoisySteps
from fedapp.learning.evaluation import BATCH, Scores, batched, confusion, evaluate, measured
from fedapp.learning.releases import Releaser
from fedapp.learning.state import ClientStore, Stored
from fedapp.learning.task import ModelSpec, Task
from fedapp.learning.training import (
    Batch,
    Phase,
    TrainReport,
    batch_slices,
    class_weights,
    rate_in,
    taking_representations,
    train,
    trained_alone,
)
from fedapp.method import Arrays, Method, Payload, Scalar
from fedapp.models import build_model, selection
from fedapp.models.copies import copied, drop_statistics
from fedapp.settings import TrainingSettings
from fedapp.settings.evaluation import CONFUSION

if TYPE_CHECKING:
    from fedapp.models import SplitModel


class FedClient(PositionalClient):
    """One client of a federation.

    Parameters
    ----------
    task : data, architecture and settings.
    method, hparams : the method and its hyperparameters.
    store : holds the private state between rounds; None stores nothing (for tests and other apps).
    """

    block: ClassVar[int] = BATCH
    """Samples of a block of `feature_batches`."""
    computed: ClassVar[tuple[str, ...]] = ()
    """Names of arrays that every client computes: a payload without them can be the whole model."""
    private_logits: ClassVar[bool] = False
    """Whether a client adds logits of its own to those of the head."""
    alone: ClassVar[bool] = True
    """Whether the stored model alone makes the predictions of `score`, so that it can be used without the client.

    A class with a `score` of its own has False, unless it states True.
    """
    needs_state: bool = False
    """Whether the method needs its stored model even where the server sends it. `self.own` is always restored.

    Without it, an own `receive` finds NaN in all that the server sends, if this is the whole model.
    """

    def __init__(self, task: Task, method: Method, hparams: Any, store: ClientStore | None = None) -> None:
        self.task = task
        self.method = method
        self.hparams = hparams
        self.store = store
        self.device = task.y_train.device
        self.own: Arrays = {}
        self.reference: Arrays = {}  # the arrays as received, from which `clip-update` measures the change
        self.round = 0
        self.model: SplitModel
        self.tuned: SplitModel
        self.report = TrainReport()
        self._renewed: set[Any] | None = None  # modules whose running statistics this training has reset
        self.newcomer = False  # whether `meet` scores it
        self.newcomer_epochs: int | None = None  # of local training, which `meet` gives
        self.stored: Stored | None = None  # the state that `restore` has read, with `self.own`
        self.starts_from_state = True
        self.begins = False  # whether the model is this client's own initial one
        self._unread: Collection[str] = ()  # names in the stored state that a round does not read
        self.releaser: Releaser | None = None  # with `dp`: the only way in which numbers leave
        self.scoring = False  # whether an exchange is for scores alone: nothing of it is stored or sent
        self.released = False  # whether the reply repeats an earlier release

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if old := next((name for name in MOVED if name in vars(cls)), ""):
            raise TypeError(f"{cls.__name__}.{old} is never called: write {MOVED[old]}")
        if "score" in vars(cls) and "alone" not in vars(cls):
            cls.alone = False

    # ---- hooks ---------------------------------------------------------------------------------------------------

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the model of a specification; server and clients call the same function."""
        return build_model(**{name: value for name, value in vars(spec).items() if name != "common"})

    @classmethod
    def trains_plainly(cls) -> bool:
        """Return whether a client differs from that of FedAvg in its model alone: DP-SGD covers it."""
        kinds = cls.__mro__[: cls.__mro__.index(FedClient)]
        own = {n for kind in kinds for n, value in vars(kind).items() if not n.startswith("_") or callable(value)}
        return own <= {"build_model"}

    @classmethod
    def configure_model(cls, model: SplitModel, scalars: Mapping[str, Scalar]) -> None:
        """Apply a payload's plain values to a model before its arrays are copied; server and clients both call this."""

    def receive(self, payload: Payload) -> None:
        """Copy the shared model arrays that the server sent into the model.

        Where the model starts from other arrays than these, it sets `self.reference` to them.
        """
        self.reference = payload.all()
        self.configure_model(self.model, payload.scalars)
        selection.merge(self.model, self.reference)

    def before_training(self, payload: Payload) -> None:
        """Prepare the round, for example by copies for the loss."""

    def step_loss(self, batch: Batch) -> Tensor:
        """Return the loss of one batch, a scalar in nats: mean cross-entropy."""
        return self.cross_entropy(self.model(batch.x), batch.y)

    def after_step(self, batch: Batch) -> None:
        """Run after each step of the optimizer, on the batch of the step."""

    def after_epoch(self, epoch: int) -> None:
        """Run after each local epoch, counted from 0."""

    @property
    def training(self) -> TrainingSettings:
        """Settings of local training: the run's, but for the epochs of a newcomer."""
        epochs = self.newcomer_epochs
        return self.task.train if epochs is None else self.task.train.replaced(local_epochs=epochs)

    @property
    def rate(self) -> float:
        """Learning rate of this round, at its first step unless there is a schedule of steps."""
        return rate_in(self.round, self.task.rates, self.training.lr)

    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Return further arrays and numbers for the reply.

        Returns
        -------
        Arrays, named as `Method.extra_up` declares, and numbers, each named in `Method.columns` or `Method.metrics`.
        """
        return {}, {}

    def snapshot(self, prefix: str = "") -> list[Tensor]:
        """Return copies of the parameters whose names begin with `prefix`, since training changes them in place."""
        return [p.detach().clone() for name, p in self.model.named_parameters() if name.startswith(prefix)]

    def planned(self) -> Sequence[Phase]:
        """Return the phases of a round as they are before anything has been received, each with a model."""
        client = copy.copy(self)
        client.model = skeleton(type(self), self.task.spec(0), self.hparams)
        return [replace(p, model=client.model if p.model is None else p.model) for p in client.phases()]

    def epochs(self) -> int:
        """Return the passes over the training split in a round, of all phases."""
        return sum(phase.spec.local_epochs for phase in self.planned() if phase.rows is None)

    def common_facts(self) -> dict[str, Scalar]:
        """Return facts that must be equal at all clients, such as a checksum of public images.

        `largest-feature`, the largest absolute value of a feature of the training rows, is each client's own. It is not
        sent in a run with `dp`.
        """
        return {}

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer the server's query `kind` with the model after `receive(payload)`.

        Returns
        -------
        The arrays and the numbers of the reply.
        """
        raise ValueError(f"the method '{self.method.id}' cannot answer 'query.{kind}': define answer() in its client")

    def answer_prepare(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Answer the server's query before round 1, as `answer` does."""
        return self.answer("prepare", payload)

    def feature_batches(self, exchange: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the features of the training split, for a method's statistics.

        Parameters
        ----------
        exchange : `train`, or the kind of a query.

        Yields
        ------
        Representations (n, width) float32 and labels (n,) of at most `block` samples, in evaluation mode and without
        augmentation.
        """
        for start in range(0, self.task.num_samples, self.block):
            part = slice(start, start + self.block)
            yield self.representations(self.task.x_train[part]), self.task.y_train[part]

    def phases(self) -> Sequence[Phase]:
        """Return the parts of the local training, in their order.

        They are also asked for when the client registers, with a model of any values and nothing received.
        """
        return [Phase(self.step_loss, self.training)]

    def train_locally(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Run the local training of the round; return `after_training()`. The report is in `self.report`."""
        self._renewed = set() if self.task.buffers == "drop" else None
        self.before_training(payload)
        self.report = self.run_phases()
        self._renewed = None
        return self.after_training(payload)

    def run_phases(self) -> TrainReport:
        """Run the phases of the round; return the report of those on the training split."""
        report = TrainReport()
        for phase in self.phases():
            done = self.run_phase(phase)
            report = report.then(done) if phase.rows is None else report
        return report

    def run_phase(self, phase: Phase) -> TrainReport:
        """Train only the parameters of a phase."""
        model = self.model if phase.model is None else phase.model
        x, y = (self.task.x_train, self.task.y_train) if phase.rows is None else phase.rows
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(trained_alone(model, phase.prefixes))
            if self._renewed is not None:
                drop_statistics(model, held, self._renewed)
            if once := self._trains_head_alone(phase, held):
                x = self.representations(x)
                stack.enter_context(taking_representations(self.model))
            rate = rate_in(self.round, self.task.rates, phase.spec.lr) if phase.rate is None else phase.rate
            whole = replace(phase, rate=rate, on_step=self.after_step, on_epoch=self.after_epoch)
            inputs, private = None if once else self.task.inputs, self._private(phase.spec, len(y))
            return train(model, x, y, whole, inputs, self.generator(phase.draws), held=held, private=private)

    def _trains_head_alone(self, phase: Phase, held: list[nn.Module]) -> bool:
        """Return whether all epochs of a phase see the same representations, and its loss depends on these alone."""
        from fedapp.models import SplitModel  # it loads PyTorch

        kind, spec = type(self), phase.spec
        plain = getattr(phase.loss, "__func__", None) is FedClient.step_loss and kind.after_step is FedClient.after_step
        fixed = phase.model is None and any(m is self.model.features for m in held)
        same = spec.local_epochs > 1 and spec.augment == "none" and spec.precision == "fp32" and self.releaser is None
        # Dropout outside the body is drawn in every epoch.
        net = type(self.model)
        bare = net.represent is SplitModel.represent and type(self.model.activation) in (nn.ReLU, nn.Identity)
        return plain and fixed and same and bare and net.forward is SplitModel.forward

    def _private(self, spec: TrainingSettings, rows: int) -> NoisySteps | None:
        """Book the steps of a training and return their DP-SGD mechanism; None without DP-SGD."""
        count = len(batch_slices(rows, spec.batch_size))
        if self.releaser is None or not self.releaser.privacy.sgd or not count or spec.local_epochs < 1:
            return None
        check_private(self)
        numbers = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return self.releaser.training(count, spec.local_epochs, numbers, booked=not self.scoring)

    def tuning(self) -> Sequence[Phase]:
        """Return the parts of the fine-tuning of the received model, before the score `tuned` after the last round.

        A method that defines this has that score, and it is the headline. The phases draw from a purpose of their own.
        """
        return ()

    @classmethod
    def adds_to_loss(cls) -> bool:
        """Whether the method has a loss of its own, so that `train-loss` is more than the mean cross-entropy."""
        return cls.step_loss is not FedClient.step_loss

    @classmethod
    def tunes(cls) -> bool:
        """Whether clients fine-tune a copy of the received model before their last score."""
        return cls.tuning is not FedClient.tuning

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
        self.scoring = False
        self.restore(server_round, payload)
        self.receive(payload)
        metrics: dict[str, Any] = {}
        if "received" in self.task.protocols:
            metrics.update(self.measure("received", balanced))
        extras, numbers = self.train_locally(payload)
        if "trained" in self.task.protocols:
            metrics.update(self.measure("trained", balanced))
        # Nothing changes the model after this: it is sent and stored from its own memory.
        sent = [name for name in self.up_names() if name not in extras]
        arrays = {**selection.views(self.model, sent, sent=True), **extras}
        if not math.isnan(self.report.loss):
            metrics["train-loss"] = self.report.loss
        metrics["steps"] = self.report.steps
        metrics["train-seconds"] = self.report.seconds
        metrics.update(numbers)
        if self.store is not None:
            self.store.save(server_round, self.state(), self._unread)
            head = self.model.head.weight
            self.store.note_head_norms(server_round, head.detach().double().norm(dim=1).cpu().numpy())
        return arrays, self.task.num_samples, metrics

    def evaluate_round(
        self, payload: Payload, server_round: int, *, balanced: bool = True, train: bool = False
    ) -> dict[str, Any]:
        """Score the model as sent now (`received`); nothing is stored or sent.

        Parameters
        ----------
        server_round : the round that the payload would begin.
        train : leave `trained` to `train_to_score`. Otherwise it is the score of the model as last trained, at whatever
            round that was; a client that has never trained reports the score of the received model under both names.
        """
        self.round = server_round
        self.scoring = True
        self.restore(server_round, payload, always=not train)
        own_model = not self.down_names()
        if own_model:
            self.receive(payload)
        metrics: dict[str, Any] = {}
        trained = "trained" in self.task.protocols and not train
        if trained and self.loaded is not None:
            metrics.update(self.measure("trained", balanced, further=True))
            trained = False
        if not own_model:
            self.receive(payload)
        scored = trained or "received" in self.task.protocols
        received = self.measure("received", balanced, further=True) if scored else {}
        if "received" in self.task.protocols:
            metrics.update(received)
        if trained:
            metrics.update({k.replace("received", "trained", 1): v for k, v in received.items()})
        return metrics

    def train_to_score(self, payload: Payload, *, balanced: bool = True) -> dict[str, Any]:
        """Train after `evaluate_round` and score the result (`trained`); nothing is stored or sent."""
        self.train_locally(payload)
        return self.measure("trained", balanced, further=True) if "trained" in self.task.protocols else {}

    def tune_to_score(self, protocol: str = "tuned", *, balanced: bool = True) -> dict[str, Any]:
        """Fine-tune a copy of the model after `evaluate_round` or `meet`, and score it; nothing is stored or sent.

        The model is as received again afterwards; the copy is `self.tuned`.
        """
        received, self.model = self.model, copied(self.model)
        try:
            for phase in self.tuning():
                self.run_phase(phase)
            self.tuned = self.model
            return self.measure(protocol, balanced, further=True)
        finally:
            self.model = received

    def meet(self, payload: Payload, server_round: int, protocol: str, epochs: int) -> dict[str, Any]:
        """Score this client as one that the server has never heard of; nothing is stored or sent.

        Parameters
        ----------
        payload : payload to a newcomer in `server_round`.
        protocol : name of the score.   epochs : of local training before it; 0 = the model as received.
        """
        self.round = server_round
        self.newcomer = self.scoring = True
        self.restore(server_round, payload)
        self.receive(payload)
        if epochs:
            # Not in the task: KT-pFL has epochs of its own, and unseen clients of all methods train equally long.
            self.newcomer_epochs = epochs
            self.train_locally(payload)
        return self.measure(protocol, balanced=True, further=True)

    def answer_query(self, kind: str, payload: Payload, server_round: int) -> tuple[Arrays, int, dict[str, Any]]:
        """Answer one query of the server; return the arrays, n_k and the metrics of the reply."""
        self.round = server_round
        self.restore(server_round, payload)
        self.receive(payload)
        arrays, metrics = self.answer_prepare(payload) if kind == "prepare" else self.answer(kind, payload)
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

        `balanced` adds the balanced score, `further` the run's metrics besides accuracy and loss.
        """
        names = self.task.metrics if further else ()
        matrix = further and self.task.confusion and not self.newcomer
        more = {"probabilities": True} if names or matrix else {}
        scores = self.score(self.task.x_test, self.task.y_test, **more)
        metrics: dict[str, Any] = {**scores.numbers}
        for name, of in {protocol: scores, **scores.further}.items():
            metrics |= {
                f"{name}-correct": int(of.correct.sum()),
                f"{name}-total": of.n,
                f"{name}-loss-sum": of.loss_sum,
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
            scores = self.score(self.task.x_union, self.task.y_union)
            metrics |= {f"{name}-balanced": of.balanced for name, of in {protocol: scores, **scores.further}.items()}
        return metrics

    def score(self, x: Tensor, y: Tensor, probabilities: bool = False) -> Scores:
        """Score the current model on images x, (n, H, W, C) uint8, with labels y, (n,).

        A method whose predictions are not those of the stored model sets `alone` to False.

        Parameters
        ----------
        probabilities : keep those of every image, (n, num_classes), for metrics besides accuracy and loss.
        """
        return evaluate(
            self.model, x, y, self.task.inputs, self.task.num_classes,
            precision=self.task.train.precision, probabilities=probabilities,
        )  # fmt: skip

    def representations(self, x: Tensor | None = None) -> Tensor:
        """Return (n, width) float32 representations of the training split or of `x`, with the test transform."""
        self.model.eval()
        return batched(self.model.represent, self.task.x_train if x is None else x, self.task.inputs)

    def restore(self, server_round: int, payload: Payload, always: bool = False) -> None:
        """Build the model as this client left it before `server_round`; a new client gets its seeded initial model."""
        made = skeleton(type(self), self.task.spec(0), self.hparams)
        names_sent = payload.all().keys() | set(self.computed)
        covered = all_names(type(self), self.task.spec(0), self.hparams) <= names_sent
        self.starts_from_state = always or self.needs_state or not covered
        # Names, in a stored state, of all that `receive` replaces before a method can have looked at it.
        read = always or self.needs_state or (self._looks() and self.starts_from_state)
        self._unread = set() if read else {f"model/{name}" for name in payload.all()}
        self.reference = payload.all()
        if self.store is not None and self.starts_from_state:
            self.stored = self.store.load(server_round, without=self._unread)
        elif self.store is not None:
            # The server sends the whole model, so only the private arrays are read from the stored state.
            self.stored = self.store.load(server_round, "own/", needed=False)
        if self.stored is not None:
            self.own = names.under("own/", self.stored.arrays)
        self.begins = self.loaded is None and not covered
        blank = () if self._looks() and self.starts_from_state else payload.all().keys()
        self.model = initial_model(self) if self.begins else copied(made, blank)
        if self._looks() and not self.starts_from_state:
            # Without NaN the method would find an untrained model there, the same at all clients.
            state = self.model.state_dict()
            for name in payload.all().keys() & state.keys():
                state[name].fill_(math.nan)
        if self.loaded is not None:
            selection.merge(self.model, names.under("model/", self.loaded.arrays))
        if self.device.type != "cpu":
            self.model.to(self.device)

    @property
    def loaded(self) -> Stored | None:
        """The stored state that the model starts from, or None."""
        return self.stored if self.starts_from_state else None

    def _looks(self) -> bool:
        """Whether the method may look at the model before it has the received arrays."""
        return type(self).receive is not FedClient.receive

    def state(self) -> Arrays:
        """Return everything that is stored after the round."""
        model = {f"model/{name}": a for name, a in selection.views(self.model, self.model.state_dict()).items()}
        return {**model, **{f"own/{name}": np.asarray(a) for name, a in self.own.items()}}

    def down_names(self) -> list[str]:
        """Return the names of the model arrays that the server sends, in state-dict order."""
        return self._names(self.method.shared_prefixes(self.hparams))

    def up_names(self) -> list[str]:
        """Return the names of the model arrays in this client's replies, in state-dict order."""
        return self._names(self.method.up_prefixes(self.hparams))

    def _names(self, prefixes: Iterable[str]) -> list[str]:
        spec, buffers = self.task.spec(0), self.task.buffers
        return list(shared_names(type(self), spec, self.hparams, tuple(prefixes), buffers))

    def register(self) -> tuple[dict[str, Any], dict[str, Scalar]]:
        """Return the registration of this client: sample count, model and shared shapes, never class counts."""
        check_training(self)
        model = skeleton(type(self), self.task.spec(0), self.hparams)
        state = model.state_dict()
        shapes = {n: list(state[n].shape) for n in [*self.down_names(), *self.up_names()]}
        info: dict[str, Scalar] = {
            "client": self.task.client,
            "model": self.task.model,
            "num-classes": self.task.num_classes,
            "shape": json.dumps(self.task.inputs.shape),
            "width": model.width,
            "shapes": json.dumps(shapes),
        }
        facts = {**self.common_facts(), **facts_of_the_body(self)}
        if (largest := facts.pop("largest-feature", None)) is not None and self.task.privacy is None:
            info["largest-feature"] = largest
        info["common"] = json.dumps(facts)
        return {"num-examples": self.task.num_samples, "test-examples": len(self.task.y_test)}, info
