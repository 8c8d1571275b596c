"""Checks of a client before it trains, functions of earlier versions, and facts that are the same at all clients."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from fedapp.core.fourier import digest
from fedapp.errors import BadRequest
from fedapp.lazy import nn
from fedapp.learning import dp_sgd
from fedapp.learning.training import Phase, batch_slices, needs_two, step_rates
from fedapp.method import Scalar
from fedapp.models import frozen, weights

if TYPE_CHECKING:
    from fedapp.models import SplitModel

MOVED = {
    "reply_metrics": "the numbers that `after_training` returns",
    "reference": "the attribute `self.reference`, set in `receive`",
    "initial_seed": "`build_model` with `with_common_seed(spec)`",
    "on_gradients": "the field of that name of a `Phase`, in `phases`",
    "scored": "the attribute `self.model`",
    **dict.fromkeys(("parameters", "views", "phase_epochs", "epochs_in", "trained_models"), "`phases`"),
    **dict.fromkeys(("optimise", "train_spec", "adam_betas"), "the optimizer and settings of a `Phase`, in `phases`"),
}
"""Functions of clients of earlier versions, and what to write now."""


def check_training(client: Any) -> None:
    """Refuse settings that do not fit this client's data; called before anything is trained.

    Raises
    ------
    BadRequest : says what to change, such as batches of one image for a model whose BatchNorm needs two.
    """
    _ = client.class_weights
    held_out = 0 if client.task.x_validation is None else len(client.task.x_validation)
    few = (
        "leave out validation, or give it more rows (in a simulation: a larger min-samples)"
        if held_out
        else ("give it more (in a simulation: min-samples = 2 or more)")
    )
    for phase in client.planned():
        spec, rate, rows = phase.spec, phase.rate or client.rate, client.task.num_samples
        if phase.rows is not None:
            rows = len(phase.rows[1])
        if spec.batch_size == client.training.batch_size == 1:
            _refuse_single(client, phase, "batch-size is 1", "give batch-size = 2 or more")
        elif phase.rows is not None and 1 in (rows, spec.batch_size):
            _refuse_single(client, phase, f"a batch of the {phase.draws} rows holds one row", "give more")
        elif rows == 1:
            since = f", since validation holds out {held_out}" if held_out else ""
            _refuse_single(client, phase, f"it has one row to train on{since}", few)
        trained = (p for m in models_of(phase) for n, p in m.named_parameters() if n.startswith(phase.prefixes))
        if spec.local_epochs and not any(p.requires_grad for p in trained):
            part = "head" if "head." in phase.prefixes else "body"
            raise BadRequest(
                f"{client.method.id} trains the {part} by itself, and here no {part} is trained: take a model with "
                "both, or freeze fewer layers, or choose a method that trains both together, such as fedavg"
            )
        step_rates(spec, rate, spec.local_epochs * len(batch_slices(rows, spec.batch_size)))


def _refuse_single(client: Any, phase: Phase, what: str, remedy: str) -> None:
    """Raise `BadRequest` if a model of a phase needs two images in a batch; `what` says why there is only one."""
    for model in models_of(phase):
        if needs_two(model, client.task.inputs):
            raise BadRequest(
                f"{what}, and BatchNorm in '{model.name}' needs two rows in a batch: "
                f"{remedy}, or choose a model without BatchNorm"
            )


def check_private(client: Any) -> None:
    """Refuse what DP-SGD does not cover, before any image is used.

    Raises
    ------
    BadRequest : a model or a setting with which one image changes more than its own gradient.
    RuntimeError : the method has a loss of its own.
    """
    if client.adds_to_loss():
        raise RuntimeError(f"{client.method.id} has a loss of its own, for which DP-SGD is not described")
    if client.task.train.augment == "strong" and client.task.inputs.kind == "table":
        raise BadRequest(
            "dp = 'sgd': augment = 'strong' takes values of a row from other rows, so that no clipping bounds what "
            "one of them changes: take augment = 'weak' or 'none'"
        )
    for model in itertools.chain.from_iterable(map(models_of, client.planned())):
        dp_sgd.check(model, model.name, client.task.inputs.shape)


def models_of(phase: Phase) -> list[SplitModel]:
    """Return the models that a phase of `planned` trains."""
    several = isinstance(phase.model, nn.ModuleList)
    models: Any = phase.model if several else [phase.model]
    return list(models)


def facts_of_the_body(client: Any) -> dict[str, Scalar]:
    """Return checksums of unsent arrays that are equal everywhere: frozen layers, a body, random directions."""
    stored = client.task.settings.weights
    found: dict[str, Scalar] = {"weights": weights.checksum(stored)} if stored and client.task.settings.freeze else {}
    args = frozen.of(client.task.model, client.task.settings)
    if args.random_features:
        found["random-features"] = digest(args.matrix(client.task.inputs.shape[0])[0])
    # Layers of its own translate the features of any body: an adapter, or the whole model.
    shared = (*client.down_names(), *client.up_names(), *client.method.extra_up)
    common = [n for n in shared if n.startswith("features.") or client.task.model != frozen.ADAPTER]
    apart = not common
    return found | ({"body": client.task.inputs.body} if client.task.inputs.body and not apart else {})
