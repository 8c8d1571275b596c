"""Settings that would void the (epsilon, delta) guarantee of a run with `dp`, each refused with a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedapp.config.keys import DEFAULTS, RunConfig
from fedapp.core.noise import STEPS
from fedapp.core.privacy import Privacy, step_of
from fedapp.core.secure_sum import noise_share
from fedapp.data.datasets import published
from fedapp.errors import BadRequest, counted
from fedapp.method import BaseHParams, Method

CLIENTS = 1000
"""Number of clients in a round from which noise on the updates of whole clients is recommended."""


def check(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    """Refuse settings that contradict `dp`.

    Parameters
    ----------
    config : a `RunConfig`, not resolved yet.

    Raises
    ------
    BadRequest : says what would break the statement, and what to do.
    """
    unit, name = config.privacy.dp, config.federation.method
    if unit == "none":
        keys = ("dp-epsilon", "dp-delta", "dp-noise", "dp-clip", "dp-test")
        given = [k for k in keys if config.to_flat()[k] != DEFAULTS[k]]
        if given:
            raise BadRequest(f"{given[0]} is for runs with noise: choose dp = 'example', 'sgd' or 'client' too")
        return
    if unit == "example" and getattr(hparams, "base", "none") != "none":
        raise BadRequest(
            f"dp = 'example': the base method '{getattr(hparams, 'base', '')}' sends whole models without noise: give "
            "method-args base=none, and weights that were trained on other data"
        )
    if unit not in method.units(hparams):
        units = method.units(hparams)
        other = f"dp = '{units[0]}'" if units else "a method that has one (docs/privacy.md)"
        raise BadRequest(
            f"dp = '{unit}': {name} with these method-args has no form with noise on the whole payload: take {other}"
        )
    _check_common(config)
    if unit != "sgd" and config.privacy.dp_clip != DEFAULTS["dp-clip"]:
        raise BadRequest("dp-clip is for dp = 'sgd': leave it out")
    if unit == "sgd":
        _check_sgd(config)
        return
    if unit == "client":
        if not config.robustness.clip_update:
            raise BadRequest("dp = 'client' needs the norm that updates are clipped to: give clip-update, such as 1.0")
        return
    _check_example(config, method, hparams)


def _refused(config: RunConfig, text: str) -> BadRequest:
    return BadRequest(f"dp = '{config.privacy.dp}': {text}")


def _check_common(config: RunConfig) -> None:
    if config.storage.lost_state == "restart":
        raise _refused(config, "lost-state = 'restart' may begin with an empty ledger: put the state folder back")
    if config.storage.warm_start:
        raise _refused(config, "warm-start begins from states that were made without noise: leave it out")
    if config.evaluation.select == "validation":
        raise _refused(config, "select = 'validation' chooses a round by exact scores: leave it at last")
    if config.federation.patience:
        raise _refused(config, "patience ends a run by exact training losses: leave it at 0")
    if config.data.normalise in ("data", "client"):
        raise _refused(
            config,
            f"normalise = '{config.data.normalise}' moves every sample if one is added: take none, or auto with "
            "weights or a published data set",
        )
    if config.data.normalise == "auto" and not config.model.weights and published(config.data.dataset) is None:
        raise _refused(
            config,
            "normalise = 'auto' takes mean and deviation of your own data: take normalise = 'none', or torchvision's "
            "weights",
        )


def _check_sgd(config: RunConfig) -> None:
    if config.training.precision != "fp32":
        raise _refused(config, "the gradient of each sample is computed in float32: take precision = 'fp32'")
    if config.training.class_weights == "balanced":
        raise _refused(config, "class-weights = 'balanced' counts the samples: give numbers, or none")
    if config.secure.secure_sum:
        raise _refused(
            config,
            "each client's noise is for itself, so that a hidden sum would not change epsilon: leave secure-sum out",
        )
    if config.robustness.clip_update:
        raise _refused(config, "dp-clip bounds each sample's gradient: leave clip-update out")


def _check_example(config: RunConfig, method: Method, hparams: BaseHParams) -> None:
    threshold = method.class_threshold(hparams)
    least = getattr(hparams, threshold, 1) if threshold else 1
    if least > 1:
        raise _refused(config, f"{threshold} is a threshold on true counts: leave it at 1, all classes are sent")
    for (key, value), why in hparams.exact.items():
        if getattr(hparams, key) == value:
            raise _refused(config, f"{key}={str(value).lower()} {why}")
    if config.robustness.robust != "none":
        raise _refused(config, "robust compares single clients, whose statistics are mostly noise: leave it out")
    if len(set(config.model.names)) > 1:
        raise _refused(
            config,
            "bodies stay as they are given, and means over different bodies have no meaning: give one model",
        )


def check_node(config: RunConfig) -> None:
    """Refuse settings with which real nodes would send more than their noised numbers.

    Raises
    ------
    BadRequest : noise of a seed, or scores.
    """
    if config.privacy.dp_test:
        raise BadRequest("dp-test takes noise from the seed, which protects no one: leave it out on real nodes")
    if config.privacy.dp != "none" and set(config.evaluation.measured) != {"global"}:
        raise BadRequest(f"dp = '{config.privacy.dp}': real nodes send no exact scores: set protocols = 'global'")


def check_names(names: Iterable[str]) -> None:
    """Refuse statistics of BatchNorm in updates with noise: a variance below 0 is none.

    Raises
    ------
    BadRequest : says what to set.
    """
    found = next((n for n in names if n.endswith(("running_mean", "running_var"))), None)
    if found is not None:
        raise BadRequest(
            f"dp = 'client': '{found}' is a running statistic of BatchNorm, which noise can make NaN: set "
            "buffers = 'local', or choose a model without BatchNorm"
        )


def stated(privacy: Privacy, size: int, clients: int, rounds: int, sum_of: tuple[int, int] | None = None) -> str:
    """Return the line that a run prints first: how much noise there is, and against what.

    Parameters
    ----------
    size : numbers that a client sends.   clients : in a round.   rounds : releases of each client.
    sum_of : with secure sums: t and m, the fewest clients of a sum and those that may help the server.
    """
    if privacy.test:
        head = "TEST NOISE, no privacy: "
    else:
        head = f"epsilon = {privacy.epsilon:g}, delta = {privacy.delta:g} for each {privacy.unit}: "
    shares = ""
    if sum_of is not None:
        privacy = replace(privacy, summed=clients, share=noise_share(clients, *sum_of))
        shares = (
            f"; a sum of {sum_of[0]} clients, {sum_of[1]} of whom may help the server, has {privacy.noise:g} times "
            f"the effect of one {privacy.unit}"
        )
    if privacy.sgd:
        own = f"of {privacy.noise:.4g} times that" if privacy.noise else "in which each training spends its share"
        return (
            f"{head}DP-SGD in {counted(rounds, 'round')}; each step of a client clips the gradient of every sample to "
            f"the norm {privacy.bound:g} and adds noise {own}"
        )
    if privacy.unit == "example":
        each = (
            f"{head}noise of {privacy.own:.4g} times the effect of one sample, once, at each of "
            f"{counted(clients, 'client')}"
        )
        return each + shares
    sigma = STEPS * step_of(size, privacy.bound, privacy.own)
    ratio = sigma * size**0.5 / privacy.bound
    # In a sum each client's noise is the less, the more clients there are.
    enough = int(ratio**2 if sum_of is None else ratio * clients**0.5) + 1
    advice = f"; it is recommended from {CLIENTS} clients in a round" if clients < CLIENTS and not shares else shares
    return (
        f"{head}in each of {counted(rounds, 'round')} the noise of a client is {ratio:.3g} times as long as the "
        f"longest update of {size} numbers, and in the mean of {counted(clients, 'client')} {ratio / clients**0.5:.3g} "
        f"times; from {enough} clients in a round on it would be shorter than the update{advice}"
    )
