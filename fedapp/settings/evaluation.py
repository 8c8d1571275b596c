"""The scores, and the clients and rounds that they are of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedapp.settings._group import Auto, Group


class EvaluationSettings(Group):
    """The scores, and the clients and rounds that they are of."""

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
