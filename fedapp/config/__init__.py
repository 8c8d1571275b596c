"""The run configuration: one frozen, validated object made from Flower's flat run-config.

`keys` says what there is, `checks` what contradicts each other; here is the way in, from a file, a command line or a
context of Flower. Unknown keys, wrong types, values out of range and contradictions raise a `BadRequest` that says what
to do.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedapp import registry
from fedapp.config.checks import (
    check,
    check_liars,
    check_node,
    check_rates,
    check_simulation,
    check_sums,
    check_training,
)
from fedapp.config.keys import DEFAULTS, FIELDS, GROUPS, KEYS, OTHER_NAMES, RunConfig
from fedapp.data.datasets import published
from fedapp.data.names import absent
from fedapp.errors import BadRequest, faults, named_values, suggest, suggest_choice
from fedapp.files import atomic
from fedapp.learning.optimizers import check_optimizer, takes
from fedapp.method import TrainDefaults
from fedapp.models import IDENTITY, default_model, frozen
from fedapp.settings import unless_auto

__all__ = [
    "DEFAULTS", "FIELDS", "GROUPS", "KEYS", "RunConfig", "check_continued", "check_liars", "check_node",
    "check_simulation", "check_sums", "for_nodes",
]  # fmt: skip
SHOWN = 80
"""Characters of a value that a message shows."""
FORMER = ("cuda-graphs", "compile")
"""Removed keys, which earlier versions wrote into every `config.toml`; files that have them are read without them."""
CHANGEABLE = ("num-server-rounds", "lost-state", "track", "out", "resume", "wait-timeout", "round-timeout")
"""Keys that may have other values when a run is resumed."""
DECIDED = ("clients", "model", "partition", "dp-noise")
"""Keys that data, clients or the budget decide where their value is 0 or auto."""
OWN_SETTINGS = (
    "lr", "optimizer", "momentum", "weight-decay", "clip", "augment", "local-epochs", "batch-size", "model",
    "precision", "buffers", "wire-dtype", "optimizer-args", "lr-schedule", "warmup-rounds", "lr-schedule-steps",
    "class-weights",
)  # fmt: skip
"""Run-config keys that one method of a comparison may have for itself; all others are common to its runs."""


def from_flat(values: Mapping[str, Any]) -> RunConfig:
    """Validate a flat run-config and replace every `auto` that depends on method and data set alone.

    This is the only way in: every `RunConfig` that travels through the program is valid, resolved and frozen.

    Raises
    ------
    BadRequest : unknown key, wrong type, value out of range, or contradicting keys; one line each.
    """
    config = _with_features(validated(expanded(values)))
    check(config)
    config = _resolved(config)
    check_training(config)
    return config


def validated(values: Mapping[str, Any]) -> RunConfig:
    """Check the names, types and ranges of a flat run-config, each by itself; `auto` stays.

    Raises
    ------
    BadRequest : unknown key, wrong type or value out of range; one line each.
    """
    unknown = [k for k in values if k not in KEYS]
    if unknown:
        raise BadRequest("; ".join(unknown_key(k, values[k]) for k in unknown))
    groups, lines = {}, defaultdict[str, list[str]](list)
    for name, settings in GROUPS.items():
        keys = values.keys() & {field.alias for field in settings.model_fields.values()}
        try:
            groups[name] = settings.model_validate({key: values[key] for key in keys})
        except ValidationError as e:
            for of in faults(e):
                lines[of.place.partition(".")[0]].append(of.reason)
    if lines:
        wrong = {k: lines[k] for k in KEYS if k in lines}
        text = "; ".join(f"{k} = {shown(repr(values[k]))}: {' or '.join(dict.fromkeys(v))}" for k, v in wrong.items())
        raise BadRequest(text)
    return RunConfig(**groups)


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat run-config in which `method = "fedprox(mu=0.1 lr=0.01)"` is an id, `method-args` and keys.

    Raises
    ------
    BadRequest : brackets that do not match, an unknown name, or a value that is given twice.
    """
    method = values.get("method")
    if not isinstance(method, str) or "(" not in method:
        return dict(values)
    name, inside = in_brackets("method", method)
    args, settings = told_apart("method", name, inside)
    given = named_values("method-args", str(values.get("method-args") or ""), "")
    for key, value in {**args, **settings}.items():
        before = given.get(key, value) if key in args else values.get(key, value)
        if before != value:
            raise BadRequest(
                f"{key} is given twice: method = '{method}' has {value}, else it is {before}; give it once"
            )
    text = " ".join(f"{key}={value}" for key, value in {**given, **args}.items())
    return {**values, **settings, "method": name, "method-args": text}


def in_brackets(what: str, text: str) -> tuple[str, list[str]]:
    """Read `id` or `id(name=value name=value)`; returns the id and the parts in the brackets.

    Parameters
    ----------
    what : the key or option, for messages.

    Raises
    ------
    BadRequest : it is neither.
    """
    found = re.fullmatch(r"\s*([\w-]+)\s*(?:\(([^()]*)\))?\s*", text)
    if found is None:
        said = f"'{text.strip()}' is neither an id nor id(name=value name=value)"
        raise BadRequest(f"{what}: {said}, or its brackets do not match")
    return found[1], (found[2] or "").split()


def told_apart(what: str, method: str, inside: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Separate a method's hyperparameters from run-config keys, in the parts of its brackets.

    A name is a hyperparameter of the method; where the method has none of that name, it is one of the run-config keys
    :data:`OWN_SETTINGS`. `config.lr` always means the key (CCVR has an `lr` of its own).

    Raises
    ------
    BadRequest : a part is not name=value, a name is unknown or given twice, or the key is not a method's own.
    """
    fields = registry.get(method).hparams.model_fields
    args: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for part in inside:
        name, sep, value = part.partition("=")
        if not sep or not name or not value:
            raise BadRequest(f"{what}: '{part}' in {method}(...) is not name=value (a blank between two)")
        field, key = name.replace("-", "_"), name.removeprefix("config.").replace("_", "-")
        if field in args or key in settings:
            raise BadRequest(f"{what}: {method}(...) names {name} twice")
        if field in fields or (name.startswith("base.") and "base_args" in fields):
            args[field] = value
        elif key in OWN_SETTINGS:
            settings[key] = parse_value(key, value)
        elif key in KEYS:
            raise BadRequest(
                f"{what}: {key} is common to all runs of a comparison; give it with --set {key}={value}. "
                f"A method may have its own {', '.join(OWN_SETTINGS)}"
            )
        else:
            choice = suggest_choice(name, [*fields, *OWN_SETTINGS])
            raise BadRequest(f"{what}: {method} has no '{name}'{choice}")
    return args, settings


def unknown_key(key: str, value: object, give: str = "method = ", method: str = "") -> str:
    """Return the message for an unknown run-config key: the nearest key, or methods that have it.

    Parameters
    ----------
    give, method : of :func:`hyperparameter_text`.
    """
    text = f"unknown key '{key}'"
    if key in FORMER:
        return f"{text}: it was removed; leave it out"
    meant = key_of(key)
    text += f", did you mean '{meant}'?" if meant is not None else suggest(key, KEYS)
    if found := hyperparameter_text(key, value, give, method):
        text += f"{' It' if text.endswith('?') else ': it'} is {found}"
    return text


def key_of(name: str) -> str | None:
    """Return the run-config key that a name stands for, also one that other programs have for it; None = no key."""
    key = name.lower().replace("_", "-")
    return key if key in KEYS else OTHER_NAMES.get(key)


def hyperparameter_text(name: str, value: object, give: str, method: str = "") -> str:
    """Return the methods with a hyperparameter of this name, and how to set it; empty if there are none.

    Parameters
    ----------
    give : text before the method and its values, such as `--method `.   method : the chosen method, if known.
    """
    field = name.replace("-", "_")
    owners = [m.id for m in registry.discover().values() if field in m.hparams.model_fields]
    if not owners:
        return ""
    owner = method if method in owners else owners[0]
    return f'a hyperparameter of {", ".join(owners)}: give it as {give}"{owner}({field}={shown(value)})"'


def shown(value: object) -> str:
    """Return a value as a message shows it; a long one, such as an array, is cut."""
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def known_partition(partition: str, dataset: str) -> str:
    """Return what `auto` stands for where the name of the data set decides it; the user's own data must be read."""
    return "dirichlet" if partition == "auto" and published(dataset) is not None else partition


def _resolved(config: RunConfig) -> RunConfig:
    """Replace every `auto` that depends only on method and data set by its value."""
    method, _ = config.method_and_hparams()
    d = method.defaults

    optimizer = unless_auto(config.training.optimizer, d.optimizer)
    check_optimizer(optimizer)
    momentum = unless_auto(config.training.momentum, d.momentum if optimizer == "sgd" else 0.0)
    # A method's own rate belongs to its own steps: with other ones it would be too large or too small.
    rates = d if (optimizer, momentum) == (d.optimizer, d.momentum) else TrainDefaults()
    # The user's own data decide the model when they are read.
    known = published(config.data.dataset)
    model = "auto" if known is None else default_model(known.shape)
    return config.replaced(
        model=",".join(model if n == "auto" else n for n in config.model.names),
        lr=unless_auto(config.training.lr, rates.lr_digits if config.data.dataset == "digits" else rates.lr),
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=unless_auto(
            config.training.weight_decay, d.weight_decay if takes(optimizer, "weight_decay") else 0.0
        ),
        clip=unless_auto(config.training.clip, d.clip),
        partition=known_partition(config.data.partition, config.data.dataset),
        augment=unless_auto(config.training.augment, d.augment),
        evaluate_every=max(int(config.evaluation.select == "validation"), config.evaluation.evaluate_every),
    )


def _with_features(config: RunConfig) -> RunConfig:
    """Replace `auto` where the model `identity` or `dp` decides it: of hyperparameters, and of `normalise`.

    Mean and variance of all rows are for gradients; heads from statistics and runs with noise need none. A round in
    which nothing is trained is left out.
    """
    settings = config.federation
    method = registry.get(settings.method)
    asked = registry.parse_args(method, settings.method_args)
    given, private = set(config.model.names) == {IDENTITY}, config.privacy.dp != "none"
    noised = {n: v for n, v in asked.auto_with_noise.items() if private and getattr(asked, n) == "auto"}
    found = asked.model_copy(update=noised).settled(given)
    new = {name: value for name, value in found if value != getattr(asked, name)}
    if all(value == getattr(method.hparams().settled(), name) for name, value in new.items()):
        new = {}  # what they stand for in most runs
    kept = (part for part in settings.method_args.split() if part.partition("=")[0].replace("-", "_") not in new)
    args = [*kept, *(f"{name}={value}" for name, value in new.items())]
    trains = getattr(found, "base", "") != "none"
    if (count := getattr(found, "random_features", 0)) and "random-features" not in config.model.model_args:
        config = config.replaced(model_args=f"random-features={count} {config.model.model_args}".rstrip())
    plain = given and (private or not trains or frozen.of(config.model.model, config.model).scaled)
    return config.replaced(
        method_args=" ".join(filter(None, args)),
        normalise=unless_auto(config.data.normalise, "none" if plain else "auto"),
        num_server_rounds=settings.num_server_rounds if trains else 0,
    )


def for_nodes(config: RunConfig) -> RunConfig:
    """Return the configuration with `normalise = auto` of given features as real nodes can do it: by an exchange.

    In a simulation it stands for mean and deviation of all rows; nodes send the sums from which these follow.
    """
    model, data = config.model, config.data
    asked = data.normalise == "auto" and "standardise" not in model.model_args
    if not asked or set(model.names) != {IDENTITY} or data.bodies or published(data.dataset):
        return config
    return config.replaced(model_args=f"{model.model_args} standardise=true".lstrip(), normalise="none")


_KNOWN: OrderedDict[str, RunConfig] = OrderedDict()
"""Configurations that this process has validated, by the text of their flat form; the newest last."""


def for_context(config: RunConfig) -> dict[str, Any]:
    """Return the flat run-config for Flower's contexts in this process; :func:`from_context` then knows it as valid."""
    flat = config.to_flat()
    _remember(_text(flat), config)
    return flat


def from_context(run_config: Mapping[str, Any], *, nodes: bool = False) -> RunConfig:
    """Return the configuration of a Flower context, as real `nodes` need it if it is for them.

    Every message brings it, and a process validates it once.
    """
    text = _text(run_config)
    if text not in _KNOWN:
        _remember(text, from_flat(json.loads(text)))
    return for_nodes(_KNOWN[text]) if nodes else _KNOWN[text]


def _text(flat: Mapping[str, Any]) -> str:
    return json.dumps(dict(flat), sort_keys=True)


def _remember(text: str, config: RunConfig) -> None:
    _KNOWN[text] = config
    while len(_KNOWN) > 16:
        _KNOWN.popitem(last=False)


def check_continued(config: RunConfig, stored: Path, done: int) -> None:
    """Refuse to continue a run with other settings than its own.

    Parameters
    ----------
    stored : its `config.toml`.   done : its complete rounds.

    Raises
    ------
    BadRequest : names the keys that have other values now, or says why its number of rounds must stay.
    """
    earlier = from_flat(read_toml(stored))
    before, now = earlier.to_flat(), config.to_flat()
    now = from_flat({**now, **{key: before[key] for key in _left_open(now)}}).to_flat()
    other = [key for key in KEYS if key not in {*CHANGEABLE, *_left_open(before)} and before[key] != now[key]]
    if text := "; ".join(f"{key} = {shown(repr(before[key]))}, not {shown(repr(now[key]))}" for key in other):
        raise BadRequest(f"a resumed run keeps its settings ({text}): give the former ones, or start a new run")
    noise, other_noise = (c.mechanism.noise if c.mechanism else 0.0 for c in (earlier, config))
    if noise != other_noise:
        raise BadRequest(f"dp-noise = auto depends on the number of rounds: give dp-noise = {noise!r}, or that number")
    check_rates(config, earlier, done)


def _left_open(flat: Mapping[str, Any]) -> list[str]:
    return [key for key in DECIDED if "auto" in str(flat[key] or "auto").split(",")]


def without_former(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat run-config of an earlier version without its :data:`FORMER` keys."""
    return {key: value for key, value in values.items() if key not in FORMER}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of run-config keys, without :data:`FORMER` ones.

    Raises
    ------
    BadRequest : the file does not exist, cannot be read, or is not TOML.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as e:
        raise absent(path, "check the path") from e
    except OSError as e:
        raise BadRequest(f"{path} cannot be read ({e.strerror})") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadRequest(f"{path} is not TOML: {e}") from e
    return without_former(data)


def write_toml(path: Path, config: RunConfig) -> None:
    """Write a configuration as the TOML file that `fedapp run FILE.toml` reads."""
    with atomic(path, durable=True, mode=0o644) as part:
        part.write_text(tomli_w.dumps(config.to_flat()), encoding="utf-8")


def parse_value(key: str, text: str) -> Any:
    """Turn the text of `--set key=value` into the type of the key.

    Raises
    ------
    BadRequest : the key is unknown, or the text is not of its type.
    """
    if key not in KEYS:
        raise BadRequest(unknown_key(key, text))
    kind = f"{FIELDS[key].annotation}{FIELDS[key].metadata}".lower()
    if text == "auto" and "auto" in kind:
        return text
    readers: dict[str, tuple[Callable[[str], Any], str]] = {
        "bool": ({"true": True, "false": False}.__getitem__, "true or false"),
        "int": (int, "a whole number"),
        "float": (float, "a number"),
    }
    for name, (read, wanted) in readers.items():
        if name in kind:
            try:
                return read(text.lower())
            except (ValueError, KeyError) as e:
                raise BadRequest(f"{key} = '{text}': must be {wanted}{' or auto' if 'auto' in kind else ''}") from e
    return text
