"""The kinds of reduction that a method declares, and the object from which its server reads them.

`Method.reduces` names the reductions of each exchange (`train`, `prepare` or `query.<kind>`):

=============  =================================================================
``Mean``       the mean of named arrays, weighted by n_k or uniform
``ClassMean``  for each class the mean over the clients that have it
``Rows``       one row for each class of a client, client by client
``Total``      the sum of arrays that are sums over a client's samples
``Gaussians``  counts, means and covariances of classes, pooled over clients
``Each``       the arrays of each client by themselves
=============  =================================================================

From this declaration follow the form of a reply, the reference of robust rules, and the template of secure sums. The
run chooses the form, plain, robust or with noise, and a method does not see it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedapp.core import gaussian
from fedapp.core.averages import RunningMean
from fedapp.core.classmeans import problem_of
from fedapp.core.gaussian import ClassMoments
from fedapp.core.names import prefixed, under
from fedapp.core.privacy import Squares
from fedapp.core.robust import RobustMean, weaker
from fedapp.errors import Impossible
from fedapp.method import Array, Arrays, Payload, Permits, Reduction, Reply, ServerContext, ServerState, Size, Sums

Of: TypeAlias = Callable[[ServerContext, ServerState], Arrays]
"""Gives the arrays of a reduction from the state that the clients were sent, for a query from its payload's common
arrays. Their names, shapes and dtypes are those of a reply, and robust rules measure changes from their values."""

Float64: TypeAlias = npt.NDArray[np.float64]
LABELS = "labels"
"""Name of the array of a reply with the classes of its rows."""
Weights: TypeAlias = Literal["samples", "uniform"]


def weights_of(average: str) -> Weights:
    """Return the weights for a hyperparameter `average`: n_k for `samples`, else uniform."""
    return "samples" if average == "samples" else "uniform"


def shared_model(context: ServerContext, state: ServerState) -> Arrays:
    """Return the shared arrays in a state."""
    model: Arrays = state["model"]
    return model


def form_problem(arrays: Arrays, form: Arrays) -> str | None:
    """Return why arrays do not have the names, shapes and kinds of numbers of others, or None."""
    for name, like in form.items():
        if name not in arrays:
            return Impossible(f"'{name}' is missing")
        array = arrays[name]
        if array.shape != like.shape or array.dtype.kind not in ("f" if like.dtype.kind == "f" else "iu"):
            return Impossible(f"'{name}' is {array.dtype} {array.shape}, expected {like.dtype} {like.shape}")
    return None


@dataclass(frozen=True)
class Mean(Reduction):
    """The mean over the clients that replied of the arrays that `of` names.

    Attributes
    ----------
    weights : `samples`, n_k, or `uniform`.
    read : makes these arrays of a reply's, which then have another form: `read(arrays of the reply, of)`.
    """

    of: Of = shared_model
    weights: Weights = "samples"
    read: Callable[[Arrays, Arrays], Arrays] | None = None

    def form(self, context: ServerContext, state: ServerState) -> Arrays | None:
        """Return the arrays of `of`; None where replies have another form."""
        return None if self.read else self.of(context, state)

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return why arrays do not have the names, shapes and kinds of numbers of others, or None."""
        return form_problem(reply.arrays, form)

    @property
    def permits(self) -> Permits:
        """Weighted arrays add up, and updates of clients can be noised, unless they must be decoded first."""
        sums, units = (None, ()) if self.read else (Sums(self.weights), ("client",))
        return Permits(sums, ("rules", "count-cap"), units)


USUAL: Mapping[str, Reduction] = {"model": Mean()}
"""Reductions of the training of a method that declares none."""


@dataclass(frozen=True)
class ClassMean(Reduction):
    """For each class the mean over the clients that have it.

    A reply holds one row for each of its classes, with their labels. With `summed` it holds a row for every class
    instead, the sum over the client's samples of that class, with their counts.

    Attributes
    ----------
    rows : name of the array (S, d); with `summed` (C, d).
    of : gives the class means (C, d) that the clients were sent. Robust rules measure changes from them.
    counts : name of the sample counts (S,), which then weigh the rows; empty = every client counts once.
    named : whether the server must know which client has which class.
    """

    rows: str
    of: Callable[[ServerContext, ServerState], Array]
    counts: str = ""
    named: bool = False
    summed: bool = False
    least: str | None = field(default="", kw_only=True)

    @property
    def sizes(self) -> Mapping[str, Size]:
        """Rows are means of representations, or sums of these."""
        return {self.rows: "features" if self.summed else "feature"}

    def form(self, context: ServerContext, state: ServerState) -> Arrays:
        """Return a reply of a client that has all classes."""
        shape = (context.num_classes, context.width)
        if self.summed:
            return {self.rows: np.zeros(shape, np.float32), self.counts: np.zeros(shape[0], np.int64)}
        whole = dict.fromkeys((LABELS, self.counts) if self.counts else (LABELS,), np.zeros(shape[0], np.int32))
        return {self.rows: np.zeros(shape, np.float32), **whole}

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return why arrays are not one row for each of some classes, with counts where these are sent, or None."""
        arrays = reply.arrays
        if self.summed:
            return form_problem(arrays, form)
        if missing := form.keys() - arrays.keys():
            return Impossible(f"'{min(missing)}' is missing")
        classes, width = form[self.rows].shape
        labels, counts = arrays[LABELS], arrays.get(self.counts)
        problem = problem_of(arrays[self.rows], labels, width, classes)
        if problem or counts is None:
            return problem
        if counts.shape != labels.shape or counts.dtype.kind not in "iu" or (counts < 1).any():
            return "counts must hold one positive whole number per class"
        if counts.sum() > reply.num_samples:
            return f"counts of {counts.sum()} samples from a client of {reply.num_samples}"
        return None

    @property
    def permits(self) -> Permits:
        """Rows add up class by class, unless the server must know the classes of each client."""
        sums = Sums("", (self.rows, self.counts)) if self.summed else Sums("", (), self.rows, self.counts)
        return Permits(None if self.named else sums, ("rules", "count-cap"))


@dataclass(frozen=True)
class Rows(Reduction):
    """One row for each of a client's classes, with their labels, client by client.

    Attributes
    ----------
    rows : name of the array (S, d).
    outputs : whether rows are outputs of a model, (S, C), and not representations.
    further : names of other arrays of a reply, which the method checks.
    counted : name of that of them with the samples (S,) of each class; empty = there is none.
    noised : prefix of noised counts and sums of all classes, which a reply holds instead in a run with `dp = example`;
        empty = the rows have no form with noise.
    """

    rows: str
    outputs: bool = False
    further: tuple[str, ...] = ()
    counted: str = ""
    noised: str = ""
    least: str | None = field(default="", kw_only=True)

    @property
    def sizes(self) -> Mapping[str, Size]:
        """Rows are means of representations, or outputs."""
        return {self.rows: "feature"}

    def form(self, context: ServerContext, state: ServerState) -> Arrays:
        """Return a reply of a client that has all classes."""
        classes, width = context.num_classes, context.num_classes if self.outputs else context.width
        return {self.rows: np.zeros((classes, width), np.float32), LABELS: np.zeros(classes, np.int32)}

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return why arrays are not one row for each of some classes, or None."""
        classes, width = form[self.rows].shape
        return problem_of(reply.arrays.get(self.rows), reply.arrays.get(LABELS), width, classes)

    @property
    def permits(self) -> Permits:
        """Representations can be screened, which outputs cannot; counts and sums of all classes noised."""
        guards = () if self.outputs else ("own", "count-cap") if self.counted else ("own",)
        return Permits(None, guards, ("example",) if self.noised else ())


@dataclass(frozen=True)
class Total(Reduction):
    """The sum over clients of arrays that are sums over their samples.

    Attributes
    ----------
    prefix : beginning of the names of these arrays in a reply; functions get them without it.
    arrays : gives the arrays of a client without samples.
    check : `check(context, arrays, lost)` returns why arrays cannot be such sums; each number may have been rounded by
        at most `lost`.
    samples : gives the number of samples behind sums. Without it the arrays are losses; the first belongs to the
        smallest factor (`core.sums.capped_losses`).
    terms : the kind of the terms of sums, by name; other sums are at most `LARGEST`.
    read : decodes the sum over all clients.
    apart : whether the server needs each client's own as well.   capped : whether `count-cap` bounds them.
    moments : second moments of the form with noise, see `core.privacy.Joint`; None = the sums have no form with noise.
    remade : gives the result of `read` from noised counts, sums and second moments of all clients.
    """

    prefix: str
    arrays: Callable[[ServerContext], Arrays]
    check: Callable[[ServerContext, Arrays, float], str | None]
    samples: Callable[[Arrays], float] | None = None
    read: Callable[[ServerContext, Arrays], Arrays] = lambda context, arrays: arrays
    apart: bool = False
    capped: bool = True
    terms: Mapping[str, Size] = field(default_factory=dict, hash=False)
    moments: Squares | None = None
    remade: Callable[[Float64, Float64, Float64 | None], Arrays] | None = None

    @property
    def sizes(self) -> Mapping[str, Size]:
        """Sums have `terms`; without a number of samples they are losses."""
        return (
            {self.prefix + name: size for name, size in self.terms.items()} if self.samples else {self.prefix: "losses"}
        )

    def form(self, context: ServerContext, state: ServerState) -> Arrays:
        """Return a reply of a client without samples."""
        return prefixed(self.prefix, self.arrays(context))

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return why arrays cannot be sums over so many samples, or None."""
        arrays = under(self.prefix, reply.arrays)
        problem = self.check(context, arrays, reply.lost)
        found = self.samples(arrays) if self.samples and not problem else 0
        if found > reply.num_samples:
            return Impossible(f"sums of {found:g} samples from a client of {reply.num_samples}")
        return problem

    @property
    def permits(self) -> Permits:
        """Sums add up, unless the server needs each client's own; `remade` makes the result from noised ones."""
        sums, guards = None if self.apart else Sums("", (self.prefix,)), ("count-cap",) if self.capped else ()
        return Permits(sums, guards, () if self.moments is None else ("example",))


@dataclass(frozen=True)
class Gaussians(Reduction):
    """Counts, means and covariances of single classes, pooled over clients.

    Attributes
    ----------
    prefix : beginning of the names of these arrays in a reply.   cov : their form, see `core.gaussian.to_arrays`.
    centres : entry of the state with the class means (C, d) that the sums of the form `sums` are around.
    """

    prefix: str
    cov: gaussian.Mode
    centres: str = ""

    @property
    def sizes(self) -> Mapping[str, Size]:
        """Means of representations, or sums of these and of their products."""
        of: Mapping[str, Size] = (
            {"sum": "features", "square": "products"} if self.cov == "sums" else {"mean": "feature"}
        )
        return {self.prefix + name: size for name, size in of.items()}

    def form(self, context: ServerContext, state: ServerState) -> Arrays:
        """Return the sums of a client without samples; other forms have as many rows as the client has classes."""
        c, d = context.num_classes, context.width
        if self.cov != "sums":
            return {}
        sums = {"count": np.zeros(c, np.int64), "sum": np.zeros((c, d)), "square": np.zeros((c, d * (d + 1) // 2))}
        return prefixed(self.prefix, sums)

    def problem(self, context: ServerContext, reply: Reply, form: Arrays) -> str | None:
        """Return why arrays cannot be statistics of so many samples, or None."""
        arrays = under(self.prefix, reply.arrays)
        problem = gaussian.problem_of(arrays, self.cov, context.num_classes, context.width)
        if problem is None and arrays["count"].sum() > reply.num_samples:
            return f"statistics of {arrays['count'].sum()} samples from a client of {reply.num_samples}"
        return problem

    @property
    def permits(self) -> Permits:
        """Only sums add up, and they do not show class means, which can be screened."""
        sums, own = (Sums("", (self.prefix,)), ()) if self.cov == "sums" else (None, ("own",))
        # The counts of five classes out of ten that one client makes up outweigh four honest clients with 10.
        return Permits(sums, (*own, "count-cap"), ("example",), cap=2.0)


@dataclass(frozen=True)
class Each(Reduction):
    """The arrays of each client that no other reduction of the exchange names.

    Attributes
    ----------
    share : gives the shares of the classes in a reply, (C,), by which the server weighs its arrays class by class.
    cap : whether sample counts are weights.
    grouped : whether the server averages the arrays within groups that it forms meanwhile, by `Reduced.mean`.
    sampled : whether they hold a representation of each sample.
    """

    share: Callable[[Arrays], Float64] | None = None
    cap: bool = True
    grouped: bool = False
    sampled: bool = False

    @property
    def permits(self) -> Permits:
        """Within groups any rule for averages, with shares a rule of its own, and a cap on the weights."""
        rule = ("rules",) if self.grouped else ("own",) if self.share else ()
        return Permits(guards=(*rule, "count-cap") if self.cap else rule)


@dataclass
class ClassMeans:
    """Means of single classes.

    Attributes
    ----------
    values : (C, d) float64; only rows of classes that a client sent have a meaning.   seen : (C,), which these are.
    owned : classes (S,) int32 of each client, ascending, where replies are those of single clients.
    """

    values: Float64
    seen: npt.NDArray[np.bool_]
    owned: dict[int, npt.NDArray[np.int32]]


@dataclass
class Totals:
    """The sum over all clients, and each client's arrays where the server needs them."""

    sums: Arrays
    parts: list[Arrays]


@dataclass
class ClassRows:
    """The rows of one client.

    Attributes
    ----------
    reply : where they come from.   labels : (S,) int64, ascending.   rows : (S, d) float64.
    """

    reply: Reply
    labels: npt.NDArray[np.int64]
    rows: Float64


class Share(NamedTuple):
    """A reply, and its weights in the classes: `samples` n_k, times the share (C,) of each class in `classes`."""

    reply: Reply
    samples: float
    classes: Float64


class Reducer:
    """Takes the replies of an exchange one at a time."""

    def add(self, reply: Reply) -> None:
        """Take a reply."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the reduction of all replies that were added."""
        raise NotImplementedError

    def note(self, noted: dict[str, Any]) -> None:
        """Add a record of robust rules to an entry of the state; without rules there is none."""

    def audit(self, fit: Callable[[ClassMoments], Arrays], whole: Arrays) -> dict[str, Any]:
        """Return the effect of single clients, see `Reduced.audit`."""
        return {}


class Reduced:
    """The replies to one exchange, reduced as they arrive in the order of the client ids.

    A reply passes through all reductions once and is then dropped. So all of them see the same replies, and the server
    may read them in any order.
    """

    def __init__(
        self,
        replies: Iterable[Reply],
        reducers: Mapping[str, Reducer],
        mean: Callable[[Arrays], RunningMean | RobustMean],
        shares: Callable[[Iterator[Reply]], Iterator[Share]],
    ) -> None:
        self._replies = iter(replies)
        self._mean, self._shares = mean, shares
        self._groups: dict[int, RunningMean | RobustMean] = {}
        self._reducers = reducers
        self._clients: list[Reply] = []
        self._results: dict[str, Any] = {}

    def each(self) -> Iterator[Reply]:
        """Yield the replies as they arrive, with all arrays."""
        for reply in self._replies:
            for reducer in self._reducers.values():
                reducer.add(reply)
            self._clients.append(dataclasses.replace(reply, arrays={}))
            yield reply

    def __iter__(self) -> Iterator[Reply]:
        """Yield the replies as they arrive."""
        return self.each()

    def shares(self) -> Iterator[Share]:
        """Yield the replies with their weights in the classes, as `Each.share` gives them."""
        return self._shares(self.each())

    @property
    def clients(self) -> list[Reply]:
        """All replies without their arrays; empty if no client replied."""
        self.drain()
        return self._clients

    def drain(self) -> None:
        """Reduce the replies that are left."""
        for _ in self.each():
            pass

    def arrays(self, name: str) -> Arrays:
        """Return the mean `name`; without replies the arrays of `Mean.of` themselves."""
        found: Arrays = self._result(name)
        return found

    def classes(self, name: str) -> ClassMeans:
        """Return the means of single classes `name`."""
        found: ClassMeans = self._result(name)
        return found

    def mean(self, previous: Arrays, group: int | None = None) -> RunningMean | RobustMean:
        """Return an empty mean of models, in the form that the run requires.

        Parameters
        ----------
        previous : the model that the clients were sent.   group : number of the group of clients, None for all.
        """
        mean = self._mean(previous)
        if group is not None:
            self._groups[group] = mean
        return mean

    def totals(self, name: str) -> Totals:
        """Return the sums `name` over all clients; zeros without replies."""
        found: Totals = self._result(name)
        return found

    def rows(self, name: str) -> list[ClassRows]:
        """Return the rows `name` of all clients."""
        found: list[ClassRows] = self._result(name)
        return found

    def moments(self, name: str) -> ClassMoments:
        """Return the Gaussians `name`, pooled over clients."""
        found: ClassMoments = self._result(name)
        return found

    def audit(self, name: str, fit: Callable[[ClassMoments], Arrays], whole: Arrays) -> dict[str, Any]:
        """Return the effect of single clients on a fit to Gaussians, for the summary; only the screened form has one.

        Parameters
        ----------
        fit : makes arrays of statistics.   whole : the same of the statistics of all clients.
        """
        self._result(name)
        return self._reducers[name].audit(fit, whole)

    def noted(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of robust rules so far, for the state.

        Parameters
        ----------
        before : the same before this exchange.
        """
        found = copy.deepcopy(dict(before))
        for name in self._results:
            self._reducers[name].note(found)
        note_weaker(found, weaker(self._groups))
        return found

    def _result(self, name: str) -> Any:
        if name not in self._results:
            self.drain()
            self._results[name] = self._reducers[name].result()
        return self._results[name]


Query: TypeAlias = Callable[[str, Payload], Reduced]
"""`query(kind, payload)` sends one `query.<kind>` message to every client and returns the checked replies, to be read
one at a time or reduced."""


def note_weaker(noted: dict[str, Any], used: Mapping[int, str]) -> None:
    """Count by rule, and by class or group, the rounds in which it took the place of the run's, which needs more."""
    for group, rule in used.items():
        groups = noted.setdefault(rule, {})
        groups[group] = groups.get(group, 0) + 1
