"""The scores, with their clients and rounds."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from fedapp.errors import BadRequest, is_number, listed
from fedapp.settings._group import Auto, Group

PROTOCOLS = ("received", "trained", "global")
ALWAYS = ("accuracy", "loss")
CONFUSION = "confusion"
"""What `metrics` may name too: a matrix of each client, of its last scores in a simulation."""


class EvaluationSettings(Group):
    """The scores, with their clients and rounds."""

    protocols: str = Field("received,trained,global", description="scores to measure")
    metrics: str = Field(
        "accuracy,loss",
        description="metrics of each client's own test rows in evaluations of all clients: accuracy, loss, "
        "balanced, macro_f1, auc, ece; in a simulation also confusion (the last evaluation only) and your own, "
        "package.module:function(y_true, probabilities)",
    )
    balanced_every: int = Field(
        0, ge=-1, description="rounds between scores on all classes; 0 = never (digits: 1), -1 = never"
    )
    evaluate_every: int = Field(
        0, ge=0, description="rounds between evaluations of all clients; 0 = after the last only"
    )
    final_training: bool = Field(
        True,
        description="before scores of all clients, each trains its next model for one more round; nothing is kept",
    )
    final_clients: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description="clients that train again, and fine-tune, for scores of all clients; the others are scored as "
        "they receive; auto = all, but in simulations of more than 500 five rounds' worth of clients, at least 500",
    )
    balanced_clients: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description="clients of the all-class score in evaluations of all clients; auto = all, but in simulations of "
        "more than 100 as many as cost a tenth of the training, at least 100, on at least 500 rows",
    )
    unseen: str = Field(
        "",
        description="clients that take no part in the training and are scored after it: a share such as 0.3, drawn by "
        "partition-seed, or ids such as 3,7, or names as the data card prints them (a name that is a number: name:7)",
    )
    adapt_epochs: str = Field(
        "0,2", description="for unseen clients: numbers of local epochs after which they are scored; 0 = as received"
    )
    select: Literal["last", "validation"] = Field(
        "last",
        description="round of the final scores: the last, or the evaluated one (evaluate-every, here 1 by default) "
        "with the best mean validation accuracy of received",
    )
    keep_models: bool | Auto = Field(
        "auto",
        description="in a simulation: keep the final models of every client for fedapp.load, as scored and as "
        "received; auto = up to 100 clients",
    )

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """The scores that are measured."""
        return tuple(listed(self.protocols))

    @cached_property
    def adaptations(self) -> tuple[int, ...]:
        """The numbers of local epochs after which unseen clients are scored, besides their received models."""
        return tuple(sorted({n for n in whole_numbers("adapt-epochs", self.adapt_epochs) if n > 0}))

    @cached_property
    def further_metrics(self) -> tuple[str, ...]:
        """The metrics that are measured besides accuracy and loss, which are always there; with `auc` its classes."""
        names = dict.fromkeys(n for m in listed(self.metrics) for n in ((m, "auc_classes") if m == "auc" else (m,)))
        return tuple(m for m in names if m not in (*ALWAYS, CONFUSION))

    @property
    def confusion(self) -> bool:
        """Whether the last evaluation measures confusion matrices."""
        return CONFUSION in listed(self.metrics)

    @property
    def names_unseen(self) -> bool:
        """Whether unseen clients are given by name, which the data must have."""
        return share_of(self.unseen) is None and not all(is_id(part.strip()) for part in self.unseen.split(","))

    def keeps_models(self, clients: int) -> bool:
        """Return whether a simulation with that many clients keeps their final models."""
        return clients <= 100 if self.keep_models == "auto" else self.keep_models


def share_of(text: str) -> float | None:
    """Return a share such as 0.3; None if a text is none, as ids and names of clients."""
    return float(text) if "." in text and is_number(text) else None


def is_id(text: str) -> bool:
    """Whether a text is the id of a client."""
    return text.isascii() and text.isdigit()


def whole_numbers(key: str, text: str) -> list[int]:
    """Return the whole numbers of a text with commas between them.

    Raises
    ------
    BadRequest : it holds something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(map(is_id, parts)):
        raise BadRequest(f"{key} = '{text}': give whole numbers from 0 with commas between them")
    return [int(part) for part in parts]
