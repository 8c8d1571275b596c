"""Building a method on another one: the outer method's classes added to the base's, once per pair.

Both sides of an outer method are classes that call `super()` throughout. `on` puts them before the base's classes in
the order of inheritance, with the outer method's settings and the base's own hyperparameters as class attributes;
`built_on` does so for a whole method. `PostHoc` is the server side of a method that repairs the base's model at the
end; its client side is `clients/posthoc.py`. The base `none` trains nothing: the repair is then made for the model as
the run gives it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from clients.posthoc import Untrained
from fedapp.core import heads
from fedapp.errors import BadRequest, hyperparameters, named_values
from fedapp.method import (
    ALL,
    Array,
    Arrays,
    BaseHParams,
    Method,
    Payload,
    Reply,
    Scored,
    ServerContext,
    ServerState,
)
from fedapp.models import is_own
from fedapp.reduce.spec import Query, Reduced
from strategies.base import Strategy

BASES = ("base=fedavg", "base=fedprox", "base=fedavgm", "base=moon")
"""Named in the message for an unsuitable base; all other methods with one global model are suitable too."""
FEW_ROWS = 0.25
"""Rows, as a multiple of the features' width, below which second moments of a single node are warned of."""
RANDOM = "random: drawn from the seed and never trained"
"""The summary's text for a body of fedapp's own that was not trained and got no weights."""


def _on(outer: Any, base: Any, settings: BaseHParams, base_hparams: BaseHParams) -> Any:
    """Return a class that inherits from `outer` and `base`; the same class for the same arguments.

    Parameters
    ----------
    outer, base : two subclasses of one class, both cooperative.
    settings, base_hparams : become class attributes of these names.
    """
    space = {"settings": settings, "base_hparams": base_hparams, "__module__": outer.__module__}
    return type(f"{outer.__name__}On{base.__name__}", (outer, base), {**space, "__doc__": outer.__doc__})


on: Callable[..., Any] = functools.lru_cache(maxsize=128)(_on)


def built_on(outer: Method, settings: Any, lookup: Callable[[str], Method]) -> Method:
    """Return the method `settings.base` with `outer` added on both sides; it shares the same arrays as the base.

    Parameters
    ----------
    settings : hyperparameters of `outer`; its `base` and `base_args` name the base method.
    lookup : finds a method by its id.

    Raises
    ------
    BadRequest : the base is unknown, leaves no head of one global model, or does not take its arguments.
    """
    base = NONE if settings.base == NONE.id else lookup(settings.base)
    values = named_values("method-args", settings.base_args, "")
    inner: BaseHParams = hyperparameters(base.id, base.hparams, values, "base.")
    if not leaves_one_head(base, inner):
        raise BadRequest(
            f"{outer.id} calibrates the head of one global model, and {base.id} does not leave one: "
            f"take {', '.join(BASES[:-1])} or {BASES[-1]}"
        )

    def warn(hparams: BaseHParams, optimizer: str, augment: str) -> str | None:
        found = [m.warn(h, optimizer, augment) for m, h in ((base, inner), (outer, hparams)) if m.warn]
        if base.client.private_logits:
            found.append(
                f"clients of {base.id} add personal logits that were trained for the head before {outer.id}: their own "
                "scores may be worse than without it; the global model's is the one that counts"
            )
        return "; ".join(text for text in found if text) or None

    return dataclasses.replace(
        outer,
        title=f"{outer.title} after {base.title}",
        strategy=on(outer.strategy, base.strategy, settings, inner),
        client=on(outer.client, base.client, settings, inner),
        shared=base.shared_prefixes(inner),
        up=base.up,
        extra_up=(*base.extra_up, *outer.extra_up),
        same_width=base.same_width,
        defaults=base.defaults,
        metrics=(*base.columns, *base.metrics, *outer.metrics),
        queries=(*base.queries, *outer.queries),
        columns=(*base.columns, *outer.columns),
        reduces={**base.reductions(inner), **outer.reductions(settings)},
        resolve=None,
        warn=warn,
    )


def leaves_one_head(base: Method, hparams: BaseHParams) -> bool:
    """Whether a method ends with one global model, sent whole to the clients, whose logits are its linear head's."""
    return base.resolve is None and base.global_model and base.linear and set(ALL) <= set(base.shared_prefixes(hparams))


class PostHoc(Strategy):
    """The base's strategy, with a repair of its one global model after the last round.

    The state keeps the model as the base trained it. The arrays that replace parts of it are kept apart, under the
    method's id. So a second repair, or further training after a repair, starts from the trained model.

    `settings` and `base_hparams` are set where a subclass is added to the base's. `queries` are those of this method.
    """

    settings: ClassVar[Any] = None
    base_hparams: ClassVar[BaseHParams] = BaseHParams()
    queries: ClassVar[tuple[str, ...]] = ()

    def __init__(self, method: Method, hparams: Any, **flower: Any) -> None:
        super().__init__(method, self.base_hparams, **flower)

    def repair(self, state: ServerState) -> Payload:
        """Return the arrays that replace trained ones, and the scalars that go with them."""
        return Payload(common=state[self.method.id]["head"])

    def repaired(self, state: ServerState) -> Payload:
        """Return the repair, or an empty payload before it."""
        return self.repair(state) if self.method.id in state else Payload()

    def untouched(self, state: ServerState) -> ServerState:
        """Return the base's state alone."""
        return {name: value for name, value in state.items() if name != self.method.id}

    def trained(self, state: ServerState) -> Arrays:
        """Return the global model as the base left it."""
        arrays = super().global_arrays(state)
        assert arrays is not None, "only bases with one global model are admitted"
        return arrays

    def global_arrays(self, state: ServerState) -> Arrays:
        """Return the global model, repaired if that was done."""
        return {**self.trained(state), **self.repaired(state).common}

    def score(self, state: ServerState) -> float | None:
        """Return the accuracy of the global model on the central test set, or None without one."""
        return self.context.score(self.global_arrays(state), self.repaired(state).scalars)

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        """Return the base's payload; after the repair, with the repaired arrays instead of the trained ones."""
        payload, new = super().send(state, server_round, client), self.repaired(state)
        own = {n: a for n, a in payload.arrays.items() if n not in new.common}
        return Payload(own, {**payload.common, **new.common}, {**payload.scalars, **new.scalars})

    # Not the base's own `send_each`, which may compute several payloads together: each must carry the repair.
    send_each = Strategy.send_each

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Update as the base does; training continues from the trained model, not from the repaired one."""
        return super().update(self.untouched(state), server_round, reduced)

    def finalize(self, state: ServerState, query: Query) -> ServerState:
        """Finish as the base does; subclasses start their repair from here."""
        return super().finalize(self.untouched(state), query)

    def calibrated(
        self, state: ServerState, entry: ServerState, replies: Sequence[Reply], counts: Array, **found: Any
    ) -> ServerState:
        """Return the state with `entry`, the repair, and with its text for the summary.

        Parameters
        ----------
        entry : holds at least the new `head`.   replies : to the query that measured `received`.
        counts : N_c, samples behind the repair, (C,).   found : the method's entries besides the common ones.
        """
        replies = [single for reply in replies for single in reply.singles]
        samples, before = int(counts.sum()), self.trained(state)
        new = {**state, self.method.id: {**entry}}
        given = self.settings.base == NONE.id
        new[self.method.id]["calibration"] = {
            "before": self.score(state),
            "after": self.score(new),
            "score": "global",
            "received_before": mean_accuracy(r.metrics for r in replies),
            **({"extractor": self.extractor()} if given else {}),
            "deployable": True,
            "clients": len(replies),
            "samples": samples,
            # Noise and count-cap change counts too, where no threshold leaves samples out.
            "samples_left_out": sum(r.num_samples for r in replies) - samples if self.settings.min_count > 1 else 0,
            "classes_unseen": np.flatnonzero(counts == 0).tolist(),
            "head_norm_ratio": [heads.norm_ratio(h["head.weight"][counts > 0]) for h in (before, entry["head"])],
            **found,
        }
        return new

    def warn_of_few_rows(self, replies: Sequence[Reply]) -> None:
        """Warn of the node with the fewest rows behind its second moments, if so few show the rows.

        Parameters
        ----------
        replies : those with second moments. A simulation does not warn.
        """
        alone = [reply for reply in replies if not reply.members]
        least = min(alone, key=lambda reply: reply.num_samples, default=None)
        if self.context.nodes and least is not None and least.num_samples < FEW_ROWS * self.context.width:
            self.context.warn(
                f"{self.method.id}: client {least.client} sent second moments of {least.num_samples} rows of "
                f"{self.context.width} features, which nearly are the rows: take secure-sum, or leave out clients with "
                f"fewer than {FEW_ROWS * self.context.width:g} rows"
            )

    def init(self, context: ServerContext) -> ServerState:
        """Return the base's first state; warn of features that nothing has trained."""
        state = super().init(context)
        if self.settings.base == NONE.id and self.extractor() == RANDOM:
            models = ", ".join(sorted({c.model for c in context.clients}))
            context.warn(
                f"base=none trains nothing, and no weights were given: the head is made from the features of {models} "
                "with random values. Give weights=FILE, or set model=identity where the data are features already"
            )
        return state

    def extractor(self) -> str:
        """Return where the features come from that nothing in this run trains, for the summary."""
        if self.context.weights:
            return self.context.weights
        if not any(name.startswith("features.") for name in self.context.initial):
            return "none: the head is on the data's features"
        own = sorted({c.model for c in self.context.clients if is_own(c.model)})
        return f"as {', '.join(own)} makes it: not trained here" if own else RANDOM

    def report(self, state: ServerState, final: Scored) -> dict[str, Any]:
        """Return `calibration`: the accuracy before and after, and which score it is."""
        found = dict(state.get(self.method.id, {}).get("calibration", {}))
        before = found.pop("received_before", None)
        if found and found["after"] is None:
            found |= {"before": before, "after": mean_accuracy(final.values()), "score": "received, mean over clients"}
        return {**super().report(state, final), "calibration": found}

    def check(self, state: ServerState, reply: Reply) -> str | None:
        """Check a reply as the base does; an answer to a query of this method has the form of its reduction."""
        return None if reply.kind.removeprefix("query.") in self.queries else super().check(state, reply)


def mean_accuracy(metrics: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over clients of the accuracy of what they received, on their own test splits; None without test images."""
    shares = [m["received-correct"] / m["received-total"] for m in metrics if m.get("received-total")]
    return float(np.mean(shares)) if shares else None


class _Untrained(Strategy):
    """Sends the model as it was given, and gets nothing back."""

    def update(self, state: ServerState, server_round: int, reduced: Reduced) -> ServerState:
        """Keep the state."""
        return state


NONE = Method(
    id="none",
    title="no training",
    paper="",
    strategy=_Untrained,
    client=Untrained,
    up=(),
    reduces={"train": {}},
    global_model=True,
)
"""The base that trains nothing; it is not a method of its own."""
