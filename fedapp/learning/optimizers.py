"""PyTorch's optimizers and learning-rate schedulers by name, their arguments checked against their signatures.

A wrong name is refused before PyTorch is loaded: the classes are first looked up in the text of its `optim` package.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapp.errors import BadRequest, counted, named_values, plain_value, suggest, suggest_choice
from fedapp.lazy import nn, torch

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

REFUSED_OPTIMIZERS = {
    "lbfgs": "it computes the loss several times in each step",
    "muon": "it optimises matrices alone, and models also have biases and convolutions",
    "sparseadam": "it takes sparse gradients, and those of the models are dense",
}
REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": "it needs a score after each step, and all rates are known before the first",
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), "it takes a function, which a line of text cannot give"),
    **dict.fromkeys(("SequentialLR", "ChainedScheduler"), "it takes other schedulers"),
}
WHOLE = ("T_max", "total_iters", "total_steps")
"""Arguments of schedulers that by default are the number of rates, so that a schedule fills the run or the round."""

_ELSEWHERE = {
    **{name: f"it is the key {name.replace('_', '-')}" for name in ("lr", "weight_decay", "momentum")},
    "last_epoch": "a resumed run goes on by itself",
    **{f"{which}_momentum": "a schedule sets the learning rate only" for which in ("cycle", "base", "max")},
    **dict.fromkeys(("epochs", "steps_per_epoch"), "give total_steps"),
}
"""Arguments that are not set here, and why."""


@functools.cache
def _written(files: str, base: str) -> dict[str, Path]:
    """Return the files of `torch.optim` by the name of each class in them that inherits from `base` or a heir of it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    heirs: dict[str, tuple[str, Path]] = {}
    for file in sorted((Path(spec.origin).parent / "optim").glob(files)):
        text = file.read_text(encoding="utf-8")
        heirs |= {name: (of, file) for name, of in re.findall(r"^class ([A-Z]\w*)\((\w+)\):", text, re.MULTILINE)}
    return {name: file for name, (of, file) in sorted(heirs.items()) if of == base or heirs.get(of, ("",))[0] == base}


@functools.cache
def optimizers() -> dict[str, str]:
    """Return the optimizers that can train here: the names of their classes by the same in lower case."""
    names = sorted(_written("*.py", "Optimizer"), key=str.lower)
    return {name.lower(): name for name in names if name.lower() not in REFUSED_OPTIMIZERS}


@functools.cache
def schedulers() -> list[str]:
    """Return the names of the schedulers that can be used here."""
    return [name for name in _written("lr_scheduler.py", "LRScheduler") if name not in REFUSED_SCHEDULERS]


def parameters_of(cls: type[Any]) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a constructor by name, without the first: the parameters or the optimizer."""
    return dict(list(inspect.signature(cls).parameters.items())[1:])


def check_optimizer(name: str) -> None:
    """Refuse a name that is not a class of `torch.optim`, in lower case.

    Raises
    ------
    BadRequest : there is none, or it cannot train here; the message has the reason.
    """
    if name in optimizers():
        return
    why = REFUSED_OPTIMIZERS.get(name.lower())
    if why:
        raise BadRequest(f"optimizer = '{name}' cannot be used: {why}; choose from {', '.join(optimizers())}")
    raise BadRequest(f"unknown optimizer '{name}'{suggest_choice(name, optimizers())}")


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of `torch.optim` that has this name in lower case.

    Raises
    ------
    BadRequest : there is none, or it cannot train here; the message has the reason.
    """
    check_optimizer(name)
    found: type[Optimizer] = getattr(torch.optim, optimizers()[name])
    return found


@functools.cache
def takes(name: str, argument: str) -> bool:
    """Return whether an optimizer's constructor has this argument."""
    check_optimizer(name)
    cls = optimizers()[name]
    text = _written("*.py", "Optimizer")[cls].read_text(encoding="utf-8")
    (body,) = (n.body for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == cls)
    (made,) = (f.args for f in body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    return argument in [a.arg for a in (*made.args, *made.kwonlyargs)]


@functools.lru_cache(maxsize=64)
def optimizer_arguments(name: str, text: str) -> Mapping[str, Any]:
    """Return the arguments "name=value name=value" of an optimizer (`optimizer-args`).

    Raises
    ------
    BadRequest : unknown name or wrong type; the message lists the names.
    """
    return _arguments("optimizer-args", name, optimizer_class(name), text)


def parse_schedule(key: str, text: str) -> tuple[type[LRScheduler], dict[str, Any]]:
    """Read "Name name=value name=value": a class of `torch.optim.lr_scheduler` and its arguments.

    Parameters
    ----------
    key : the run-config key, for messages.

    Raises
    ------
    BadRequest : unknown or unsuitable class, unknown name or wrong type; the message lists what there is.
    """
    name, _, rest = text.strip().partition(" ")
    if name not in schedulers():
        why = REFUSED_SCHEDULERS.get(name)
        if why:
            raise BadRequest(f"{key}: '{name}' cannot be used: {why}; choose from {', '.join(schedulers())}")
        raise BadRequest(f"{key}: no scheduler '{name}'{suggest_choice(name, schedulers())}")
    cls: type[LRScheduler] = getattr(torch.optim.lr_scheduler, name)
    return cls, _arguments(key, name, cls, rest)


@functools.lru_cache(maxsize=256)
def scheduled(key: str, text: str, lr: float, count: int) -> tuple[float, ...]:
    """Return `count` learning rates, made by stepping PyTorch's own scheduler from `lr`.

    Arguments that say how long the schedule is (:data:`WHOLE`) default to `count`.

    Raises
    ------
    BadRequest : the schedule is not valid, or a rate is negative or not finite.
    """
    cls, arguments = parse_schedule(key, text)
    known = parameters_of(cls)
    arguments |= {name: count for name in WHOLE if name in known and name not in arguments}
    rates: list[float] = []
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
        scheduler = cls(optimizer, **arguments)
        with warnings.catch_warnings():
            # PyTorch warns of a scheduler whose optimizer takes no step; this one has nothing to optimise.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step", category=UserWarning)
            while len(rates) < count:
                rates.append(float(optimizer.param_groups[0]["lr"]))
                if len(rates) < count:
                    scheduler.step()
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as e:
        raise BadRequest(f"{key} = '{text}' cannot give {count} rates: {e}") from e
    for i, rate in enumerate(rates, start=1):
        if not (math.isfinite(rate) and rate >= 0):
            raise BadRequest(f"{key} = '{text}': rate {i} of {count} is {rate}; rates must be finite and at least 0")
    return tuple(rates)


@functools.lru_cache(maxsize=64)
def round_rates(lr: float, schedule: str, warmup: int, rounds: int) -> tuple[float, ...]:
    """Return the learning rate of each round; empty without schedule and warm-up.

    Round t of n warm-up rounds has t / (n + 1) of the rate that follows them; the schedule begins after the warm-up and
    fills the rounds that are left.

    Raises
    ------
    BadRequest : the schedule is not valid, or the warm-up leaves no round.
    """
    if not schedule and not warmup:
        return ()
    left = rounds - warmup
    if left < 1:
        raise BadRequest(
            f"warmup-rounds = {warmup} leaves none of the {counted(rounds, 'round')}: give fewer, or more rounds"
        )
    rates = scheduled("lr-schedule", schedule, lr, left) if schedule else (lr,) * left
    return tuple(rates[0] * t / (warmup + 1) for t in range(1, warmup + 1)) + rates


# ---- arguments as text -----------------------------------------------------------------------------------------------


def _arguments(key: str, name: str, cls: type[Any], text: str) -> dict[str, Any]:
    """Read "name=value name=value" for a constructor, each value as its annotation says."""
    known = parameters_of(cls)
    settable = {n: p for n, p in known.items() if n not in _ELSEWHERE and "Callable" not in str(p.annotation)}
    listing = f"{name} takes: {', '.join(map(_shown, settable.values()))}" if settable else f"{name} takes no arguments"
    found: dict[str, Any] = {}
    for argument, written in named_values(key, text, listing).items():
        if argument not in settable:
            why = _ELSEWHERE.get(argument) if argument in known else None
            reason = f"'{argument}' is not set here: {why}" if why else f"{name} has no argument '{argument}'"
            raise BadRequest(f"{key}: {reason}{'.' if why else suggest(argument, settable) or '.'} {listing}")
        value = plain_value(written)
        annotation = settable[argument].annotation
        wanted = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if not _fits(value, wanted, settable[argument].default):
            raise BadRequest(f"{key}: {argument} = '{written}' is not {_words(wanted)}. {listing}")
        # An argument such as `milestones` is a sequence even if it has one element.
        found[argument] = (value,) if re.fullmatch(r".*Iterable\[\w+\]", wanted) and _number(value) else value
    if missing := [n for n, p in settable.items() if p.default is p.empty and n not in found and n not in WHOLE]:
        raise BadRequest(f"{key}: {name} needs {', '.join(f'{n}=...' for n in missing)}. {listing}")
    return found


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty or (parameter.default is None and parameter.name in WHOLE):
        return parameter.name
    return f"{parameter.name} (default {_text(parameter.default)})"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fits(value: Any, wanted: str, default: Any) -> bool:
    """Return whether a value is of the annotated type; of a tuple also whether its length is the default's."""
    if isinstance(value, tuple):
        several = re.search(r"tuple\[|list\[|Iterable\[", wanted)
        length = len(default) if isinstance(default, tuple) else len(value)
        return bool(several) and len(value) == length and all(v is None or _number(v) for v in value)
    if isinstance(value, str):
        return f"'{value}'" in wanted
    single = re.sub(r"(tuple|list)\[.*?\]", "", wanted)  # "tuple[float, float]" is no single number
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in single
    return _number(value) and ("float" in single or ("int" in single and isinstance(value, int)))


def _words(wanted: str) -> str:
    """Return an annotation in plain words."""
    if choices := re.findall(r"'(\w+)'", wanted):
        return f"one of {', '.join(choices)}"
    kinds = {"tuple[": "numbers with commas between them", "Iterable[": "whole numbers with commas between them",
             "bool": "true or false", "float": "a number", "int": "a whole number"}  # fmt: skip
    return next((word for kind, word in kinds.items() if kind in wanted), "of the right type")
