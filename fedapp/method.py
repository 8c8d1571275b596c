"""The data types that describe a federated method; strategies, clients and the registry share them.

This module imports no other module of the project, so both sides of a method can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
Scalar: TypeAlias = bool | int | float | str
Size: TypeAlias = Literal["feature", "features", "products", "losses"]
"""The size of numbers in a reply, with M for `max-abs`: that of one feature (at most M), or that of a sum over the n
samples of a client, of features (n M), of products of two (n M^2) or of losses (at least 0, without an upper limit)."""
Scored: TypeAlias = Mapping[int, Mapping[str, Any]]
"""What each client measured, by client id."""
ServerState: TypeAlias = dict[str, Any]
"""A server's state: a nested dict of numpy arrays and JSON scalars, so that one checkpoint format fits every method."""

ALL = ("features.", "head.")
HEAD = ("head.",)
NONE: tuple[str, ...] = ()
LARGEST = 1e8
"""Largest value of a reply's arrays that have no other `Size`."""
SECOND = "small/"
"""Beginning of the names of the arrays of a second model."""


class BaseHParams(BaseModel):
    """Hyperparameters of a method: frozen and typed; unknown names are refused. Field descriptions document them.

    The run reads `base`, `small`, `totals`, `wire` and `random_features` where a method has them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    auto_with_noise: ClassVar[Mapping[str, Any]] = {}
    """The values that `auto` stands for in a run with `dp`, by name, where they are others."""
    exact: ClassVar[Mapping[tuple[str, Any], str]] = {}
    """Names and values that a run with `dp = example` refuses, with the reason."""

    def settled(self, given: bool = False) -> Self:
        """Return them with a value for each `auto`.

        Parameters
        ----------
        given : the data are features, and the model is its head alone.
        """
        return self


@dataclass(frozen=True)
class TrainDefaults:
    """The values that `auto` stands for in a run configuration.

    Attributes
    ----------
    lr : float
        Learning rate per step; `lr_digits` on the 8 x 8 digits, whose small models take larger steps. A method's own
        rate holds with its own optimizer and momentum; with others it is the common one.
    clip : float
        Largest gradient norm, 0 = no clipping.
    augment : str
        `none`, `weak` or `strong`.
    """

    lr: float = 0.01
    lr_digits: float = 0.05
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0
    augment: str = "none"


@dataclass
class Payload:
    """What the server sends to one client.

    Attributes
    ----------
    arrays : named arrays for this client only.
    common : named arrays that all clients get. If every payload holds the *same* array objects, they are encoded and
        stored once.
    scalars : plain values (bool, int, float, str).
    sum_bits : n > 0: the answers to this query are sums of multiples of 2^-n, which are exact.
    """

    arrays: Arrays = field(default_factory=dict)
    common: Arrays = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    sum_bits: int = 0

    def all(self) -> Arrays:
        """Return both kinds of arrays in one dict."""
        return {**self.common, **self.arrays}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are held here (before `wire-dtype`)."""
        return sum(a.nbytes for a in self.common.values()) + sum(a.nbytes for a in self.arrays.values())


@dataclass
class Reply:
    """A checked reply of one client.

    Attributes
    ----------
    client : stable client id.
    num_samples : number of training samples of the client, > 0.
    arrays : named arrays; the names are those that the method declares for replies.
    metrics : numbers or lists of numbers.
    bytes_up : bytes of the arrays on the wire.
    kind : type of the message that the reply answers: `train` or `query.<kind>`.
    arrival : position in the order in which replies arrived, from 0.
    members : instead of one client's, this reply stands for these clients' (`secure-sum`): `arrays` are their weighted
        means and their sums, `num_samples` is the sum of theirs, and they have no arrays.
    lost : most by which each number of such sums may differ from the exact one.
    """

    client: int
    num_samples: int
    arrays: Arrays
    metrics: dict[str, Any]
    bytes_up: int = 0
    kind: str = "train"
    arrival: int = 0
    members: tuple[Reply, ...] = ()
    lost: float = 0.0

    @property
    def singles(self) -> tuple[Reply, ...]:
        """The replies of single clients that this one stands for."""
        return self.members or (self,)


@dataclass(frozen=True)
class ClientInfo:
    """What a client states about itself when it registers. Class counts are never part of it.

    Attributes
    ----------
    shapes : shape of every array that the client would send or receive, by name.
    common : facts that must be equal at all clients, such as a checksum of the public images.
    largest : largest absolute value of a feature of the training rows; None = not stated.
    """

    client: int
    num_samples: int
    model: str
    num_classes: int
    shapes: Mapping[str, tuple[int, ...]]
    common: Mapping[str, Any] = field(default_factory=dict)
    largest: float | None = field(default=None, kw_only=True)

    @property
    def body(self) -> str:
        """SHA-256 of the pretrained body whose features the client has, where they must be equal; else empty."""
        return str(self.common.get("body", ""))


@dataclass(frozen=True)
class ServerContext:
    """What a strategy knows when it starts.

    Attributes
    ----------
    initial : the server's initial values of every shared model array, by wire name, float32.
    initial_from : draws another initial model, for methods that keep several models: `initial_from(k)` is what
        `initial` would be with the k-th seed (`initial_from(0)` equals `initial`).
    clients : the known clients, sorted by id.
    num_classes, width : classes C and feature width d of the (common) head.
    rng : seeded generator, `rng(purpose, *numbers)`.
    score : returns the accuracy in [0, 1], on the central test set, of the model with these arrays (and the scalars
        that a payload would carry); None if there is no central test set.
    shape : of one sample of the clients' data as a model takes it, for strategies that build their own model; empty =
        unknown.
    weights : file of stored weights that the initial values come from; empty = they were drawn.
    nodes : whether clients are real nodes, whose answers have no noise.
    totals : sums of an earlier run, see `strategies._sums.HeadFromSums.union`; None = there are none.
    warn : shows a line to the user and notes it in the summary.
    """

    seed: int
    clients: tuple[ClientInfo, ...]
    num_classes: int
    width: int
    initial: Arrays
    initial_from: Callable[[int], Arrays]
    rng: Callable[..., np.random.Generator]
    score: Callable[[Mapping[str, Array], Mapping[str, Scalar]], float | None] = lambda arrays, scalars: None
    shape: tuple[int, ...] = ()
    weights: str = ""
    nodes: bool = False
    totals: ServerState | None = None
    warn: Callable[[str], None] = lambda text: None

    def ids(self) -> tuple[int, ...]:
        """Return the sorted client ids."""
        return tuple(c.client for c in self.clients)


Blend: TypeAlias = tuple[list[int], NDArray[np.float64], str]
"""Client ids, A (n, n) with A[i, j] the share of client j in the next payload of client i, and the rule in words."""


@dataclass(frozen=True)
class Sums:
    """How the replies of all clients to a message may be replaced by one that holds weighted means and sums.

    A method has this if its server makes the same of that one reply as of all of them.

    Attributes
    ----------
    weights : weights of averaged arrays: `samples`, n_k, or `uniform`, all alike; empty where none are.
    totals : prefixes of arrays that are not averaged but add up: sums over samples.
    rows : name of an array with one row for each class in `labels`, averaged class by class over the clients that have
        it; empty = there is none.   counts : name of the counts by which it is averaged; empty = clients are equal.
    """

    weights: str = "samples"
    totals: tuple[str, ...] = ()
    rows: str = ""
    counts: str = ""


class Permits(NamedTuple):
    """The forms other than the plain one in which a run may read the arrays of a reduction.

    Attributes
    ----------
    sums : how they may be summed before the server sees them; None = it needs those of each client.
    guards : measures against malicious clients: `rules` for averages, an `own` rule, `count-cap` where sample counts
        are weights.
    units : the values of `dp`, `example` or `client`, for which they have a form with noise.
    cap : the value of `count-cap = auto` on real nodes, as a multiple of the median.
    """

    sums: Sums | None = None
    guards: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    cap: float = 10.0


@dataclass(frozen=True)
class Reduction:
    """A reduction of the same arrays of all replies. The kinds stand in `fedapp/reduce/spec.py`.

    Attributes
    ----------
    least : the hyperparameter that leaves out classes with fewer samples; empty = there is none; None = the arrays say
        nothing of single classes.
    fixed : names of arrays that must be equal in all answers of a client to queries.
    features : names of arrays whose numbers are as large as features.
    """

    least: str | None = field(default=None, kw_only=True)
    fixed: tuple[str, ...] = field(default=(), kw_only=True)
    features: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def sizes(self) -> Mapping[str, Size]:
        """The sizes of the numbers of arrays, by their names or by beginnings of these."""
        return dict.fromkeys(self.features, "feature")

    def form(self, context: ServerContext, state: ServerState) -> Arrays | None:
        """Return arrays of the names, shapes and dtypes in a reply, or None where the method alone knows them."""
        return None

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return the problem of a reply that should have this form, or None."""
        return None

    @property
    def permits(self) -> Permits:
        """The further forms of these arrays."""
        return Permits()


Reductions: TypeAlias = Mapping[str, Mapping[str, Reduction]]
"""Reductions by exchange (`train`, `prepare` or `query.<kind>`), and in it by a name of the method's choice."""

UNTESTED: Mapping[str, tuple[str, ...]] = {
    "secure-sum": ("scaffold",),
    "dp": ("ditto", "fedetf", "fedrod", "feduv"),
}
"""Methods whose reductions would permit secure sums or `dp = client`: refused until they have a test of their own."""


@dataclass(frozen=True)
class Method:
    """One federated method.

    Attributes
    ----------
    id : name in `method = "..."`.
    title, paper : for tables and pages.
    strategy, client : classes of the two sides.
    hparams : the hyperparameter class.
    shared : dotted prefixes of the model arrays that travel (or a function of the hyperparameters that gives them).
        Names outside it never appear in a reply.
    up : prefixes of model arrays in replies, if they differ from `shared` (None: the same).
    extra_up : names (or prefixes ending in `/`) of further arrays in replies, such as class means.
    heterogeneous : whether clients may have different architectures.
    same_width : whether different architectures need a common feature width, because heads or representations are
        compared.
    global_model : whether there is one global model, scored on the central test set.
    deploy_as : the model that is the method's product, whose score is the headline: `received`, as the server sends it,
        or `trained`, after local training. A method with a fine-tuning of its own has `tuned` before `trained`.
    travels : one line for the table of methods.
    defaults : the values that `auto` stands for.
    queries : kinds of `query` that the client answers.
    resolve : for methods that wrap another one: `resolve(hparams, lookup) -> Method` returns the method to run.
    public_share : share of the training images that is held back from the clients as the public set of a method that
        needs one, unless `public-data` says otherwise; 0 = the method uses no public data.
    reduces : reductions of each exchange, or a function of the hyperparameters that gives them. None: the
        mean of the shared arrays.
    held_out : `held_out(hparams, rows)` returns how many of its rows a client holds out where the run holds out none.
    columns : numbers of `after_training` that rounds.csv (mean over clients) and clients.csv have a column for.
    metrics : its other numbers. The server refuses a reply with a number that neither names.
    linear : whether logits are the linear head's, on what `head_input` makes of a representation; only such a head can
        be calibrated by another method.
    head : facts of the head for the server, in an app whose layers have other names: `shape`, its classes C and
        width d; `names`, which arrays are the head's; `none`, for a server that treats all layers alike.
    warn : `warn(hparams, optimizer, augment)` returns a warning if the settings are known not to work together, else
        None.
    """

    id: str
    title: str
    paper: str
    strategy: type[Any]
    client: type[Any]
    hparams: type[BaseHParams] = BaseHParams
    shared: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = ALL
    up: tuple[str, ...] | None = None
    extra_up: tuple[str, ...] = ()
    heterogeneous: bool = False
    same_width: bool = True
    global_model: bool = False
    deploy_as: Literal["received", "trained"] = "trained"
    travels: str = "the whole model, both ways"
    defaults: TrainDefaults = field(default_factory=TrainDefaults)
    queries: tuple[str, ...] = ()
    resolve: Callable[[Any, Callable[[str], Method]], Method] | None = None
    public_share: float = 0.0
    reduces: Reductions | Callable[[Any], Reductions] | None = None
    held_out: Callable[[Any, int], int] = lambda hparams, rows: 0
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    linear: bool = True
    head: Literal["shape", "names", "none"] = "shape"
    warn: Callable[[Any, str, str], str | None] | None = None

    def shared_prefixes(self, hparams: BaseHParams) -> tuple[str, ...]:
        """Return the prefixes of the model arrays that travel with these hyperparameters."""
        return self.shared(hparams) if callable(self.shared) else self.shared

    def up_prefixes(self, hparams: BaseHParams) -> tuple[str, ...]:
        """Return the prefixes of the model arrays in replies."""
        return self.shared_prefixes(hparams) if self.up is None else self.up

    def expected(self, hparams: BaseHParams, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes, out of a client's `shapes`, of the arrays that every reply to `train` must hold."""
        prefixes = self.up_prefixes(hparams)
        return {n: s for n, s in shapes.items() if any(n.startswith(p) or n == p.rstrip(".") for p in prefixes)}

    def reductions(self, hparams: BaseHParams) -> Reductions:
        """Return the reductions by type of message: `train` or `query.<kind>`. A missing one brings single replies."""
        if self.reduces is None:
            usual: Reductions = self.strategy.usual_reductions()
            return usual
        found = self.reduces(hparams) if callable(self.reduces) else self.reduces
        return {"query.prepare" if exchange == "prepare" else exchange: of for exchange, of in found.items()}

    def guarded_by(self, hparams: BaseHParams) -> tuple[str, ...]:
        """Return the possible measures against malicious clients, with these hyperparameters.

        `rules` of `robust` for averages, the `own` rule of a method, and `count-cap` where sample counts are weights.
        Rules for averages are of no use where another exchange has no rule.
        """
        exchanges = [found for of in self.reductions(hparams).values() if (found := _guards(of.values()))]
        voted = all("rules" in found or "own" in found for found in exchanges)
        return tuple(dict.fromkeys(g for found in exchanges for g in found if g != "rules" or voted))

    def votes_on(self, hparams: BaseHParams) -> bool:
        """Return whether rules fit the averages of the training, with these hyperparameters."""
        return "rules" in _guards(self.reductions(hparams).get("train", {}).values())

    def usual_cap(self, hparams: BaseHParams) -> float:
        """Return the value of `count-cap = auto` on real nodes, as a multiple of the median."""
        return min((r.permits.cap for r in self._all(hparams)), default=Permits().cap)

    def class_threshold(self, hparams: BaseHParams) -> str | None:
        """Return the hyperparameter that leaves out of replies classes with fewer samples.

        It is empty where replies hold numbers of every class, and None where they hold none of single classes.
        """
        found = {r.least for r in self._all(hparams) if r.least is not None}
        return None if not found else found.pop() if len(found) == 1 else ""

    def sums(self, hparams: BaseHParams) -> Sums | None:
        """Return how replies may be summed before the server sees them, with these hyperparameters."""
        found = [r.permits.sums for r in self._all(hparams)]
        sums = [s for s in found if s is not None]
        asked = {f"query.{kind}" for kind in self.queries} - self.reductions(hparams).keys()
        if not found or len(sums) < len(found) or asked or self._untested("secure-sum"):
            return None
        weights, rows, counts = ({getattr(s, name) for s in sums} - {""} for name in ("weights", "rows", "counts"))
        if len(weights) > 1 or len(rows) > 1:
            return None  # a sum has one kind of weights and one array with a row for each class
        totals = tuple(dict.fromkeys(n for s in sums for n in s.totals))
        return Sums(next(iter(weights), "samples"), totals, next(iter(rows), ""), next(iter(counts), ""))

    def units(self, hparams: BaseHParams) -> tuple[str, ...]:
        """Return the values of `dp` for which all that clients send has noise, with these hyperparameters.

        `example`: all arrays of the training have a form with noise, and those of a query. `client`: the reply is one
        mean of model arrays, and the client's class is not of another package. `sgd`: the same, by a client that trains
        as that of FedAvg does.
        """
        train = [r.permits.units for r in self.reductions(hparams).get("train", {}).values()]
        every = [r.permits.units for r in self._all(hparams)]
        if ("example",) in every:
            return ("example",) if all(units == ("example",) for units in train) else ()
        known = self.client.__module__.startswith("clients.") and not self._untested("dp")
        if train != [("client",)] or every != train or self.extra_up or not known:
            return ()
        return ("sgd", "client") if self.client.trains_plainly() else ("client",)

    def _all(self, hparams: BaseHParams) -> list[Reduction]:
        """Return the reductions of all exchanges."""
        return [r for of in self.reductions(hparams).values() for r in of.values()]

    def _untested(self, what: str) -> bool:
        """Return whether this method, or the base that it was built on, is in `UNTESTED`."""
        kinds = (*self.strategy.__mro__, *self.client.__mro__)
        return not {self.id, *(c.__module__.rpartition(".")[2] for c in kinds)}.isdisjoint(UNTESTED[what])

    @property
    def headlines(self) -> tuple[str, ...]:
        """All scores in the order in which they make the headline: it is the first that a run has."""
        first = ("received",) if self.deploy_as == "received" else ()
        return tuple(dict.fromkeys((*first, "tuned", "trained", "received", "global")))

    @property
    def numbers(self) -> frozenset[str]:
        """The names of the method's own numbers in replies."""
        return frozenset((*self.columns, *self.metrics))

    def allows(self, name: str) -> bool:
        """Return whether `name` is one of the further arrays that the method declares for replies."""
        return is_one_of(name, self.extra_up)


def is_one_of(name: str, known: Iterable[str]) -> bool:
    """Return whether a name is one of others, or begins with one of them that ends in `/`."""
    return any(name == e or (e.endswith("/") and name.startswith(e)) for e in known)


def _guards(reductions: Iterable[Reduction]) -> list[str]:
    """Return the possible measures in an exchange; rules for averages must fit all its arrays."""
    found = [r.permits.guards for r in reductions]
    voted = all("rules" in guards for guards in found)
    return [g for guards in found for g in guards if g != "rules" or voted]
