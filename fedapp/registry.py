"""Discovery of methods: every public module of `strategies/` defines one `METHOD`; installed packages add theirs."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import traceback
from pathlib import Path

import strategies
from fedapp import plugins
from fedapp.errors import BadRequest, fields_text, hyperparameters, named_values, suggest
from fedapp.method import BaseHParams, Method
from strategies.base import Strategy

ORDER = [
    "fedclassavg", "cwfedavg", "fedgh", "ccvr", "local", "fedavg", "fedprox", "fedavgm", "fedyogi", "moon", "fedncm",
    "fed3r", "lda", "qda", "fedcof", "pccvr", "lgfedavg", "fedproto", "ktpfl", "fml", "fedkd", "fd", "fedamp",
    "fedfomo", "cfl", "ifca", "fednh", "feduv", "scaffold", "feddbe", "fedbabu", "fedetf", "fedtgp", "fedghg",
    "pfedfda", "fedper", "fedrep", "ditto", "fedrod", "fedpac",
]  # fmt: skip
"""The order in tables; methods of your own come after these."""


def discover() -> dict[str, Method]:
    """Import all methods, those of installed packages last; :func:`broken` holds those that fail."""
    rank = {name: number for number, name in enumerate(ORDER)}
    own = sorted(_files(), key=lambda name: (rank.get(name, len(ORDER)), name))
    every = [*own, *plugins.entries("methods", _files())]
    return {name: method for name in every if isinstance(method := _found(name), Method)}


def broken() -> dict[str, str]:
    """Return what gives no valid method: name -> one line with the file or the package and the reason."""
    files, packages = (
        {name: why for name in named if isinstance(why := _found(name), str)}
        for named in (_files(), plugins.entries("methods", _files()))
    )
    return files | plugins.problems("methods", _files()) | packages


def names() -> list[str]:
    """Return the ids of all methods, sorted; none is imported, so a broken file counts."""
    return sorted({*_files(), *plugins.entries("methods", _files())})


def forget() -> None:
    """Search for methods again; for programs that change where they are found."""
    for cached in (_files, _own, _of_package, configured):
        cached.cache_clear()


@functools.cache
def _of_package(entry: plugins.Entry) -> Method:
    """Import a method of an installed package; a `BadRequest` names the package and the fault."""
    method = entry.load()
    if not isinstance(method, Method):
        raise BadRequest(f"{entry}: {entry.target} is not METHOD = Method(...)")
    if method.id != entry.name:
        raise BadRequest(f"{entry}: METHOD.id = '{method.id}', it must be the entry point's name")
    return method


@functools.cache
def _files() -> tuple[str, ...]:
    """Return the names of the modules that are methods."""
    found = (module.name for module in pkgutil.iter_modules(strategies.__path__))
    return tuple(name for name in found if not name.startswith("_") and name != "base")


@functools.cache
def _own(name: str) -> Method | str:
    """Return the method that a file defines, or why it is invalid."""
    try:
        return _method_of(name)
    except Exception as e:
        return f"strategies/{name}.py {_reason(e)}"


def _found(name: str) -> Method | str | None:
    """Return a method, why it is invalid, or None for an unknown name.

    Nothing else is imported: 38 files take 0.14 s, and on a node the packages of others may not be imported.
    """
    if name in _files():
        return _own(name)
    entries = plugins.entries("methods", _files())
    if name in entries:
        try:
            return _of_package(entries[name])
        except BadRequest as e:
            return str(e)
    return plugins.problems("methods", _files()).get(name)


def _method_of(name: str) -> Method:
    """Import a module and return its `METHOD`; a `BadRequest` names the fault."""
    method = getattr(importlib.import_module(f"strategies.{name}"), "METHOD", None)
    if not isinstance(method, Method):
        raise BadRequest("states no METHOD = Method(...)")
    if method.id != name:
        raise BadRequest(f"states METHOD.id = '{method.id}'; it must be the file's name")
    return method


def _reason(error: Exception) -> str:
    """Return in one line why a file defines no valid method, with the line where its import failed."""
    if isinstance(error, BadRequest):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # its text holds file and line
        return f"cannot be imported: {text}"
    root = Path(__file__).parent.parent
    ours = (*map(Path, strategies.__path__), root / "clients", root / "fedapp")
    places = [
        f" ({path.parent.name}/{path.name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if (path := Path(frame.filename)) != Path(__file__) and any(path.is_relative_to(o) for o in ours)
    ]
    return f"cannot be imported: {text}" + (places[-1] if places else "")


def get(name: str) -> Method:
    """Return a method by its id.

    Raises
    ------
    BadRequest : the id is unknown (the message suggests one), or the method's file is broken (it gives the reason).
    """
    found = _found(name)
    if isinstance(found, Method):
        return found
    if found is not None:
        raise BadRequest(f"no method '{name}': {found}")
    raise BadRequest(f"unknown method '{name}'{suggest(name, names()) or '.'} See: fedapp methods")


def blending() -> list[str]:
    """Return the ids of the methods whose server reports a mixing matrix (`Strategy.blend`)."""
    return [method.id for method in discover().values() if method.strategy.blend is not Strategy.blend]


def parse_args(method: Method, text: str) -> BaseHParams:
    """Parse `method-args` ("name=value name=value") into the method's hyperparameters.

    Raises
    ------
    BadRequest : unknown name, wrong type, value out of range, or a name given twice; the message lists the fields.
    """
    values = named_values("method-args", text, fields_text(method.id, method.hparams))
    if "base_args" in method.hparams.model_fields:  # names such as `base.mu` are for the base of a wrapping method
        inner = [f"{name[5:]}={values.pop(name)}" for name in list(values) if name.startswith("base.")]
        values |= {"base_args": " ".join(inner)} if inner else {}
    return hyperparameters(method.id, method.hparams, values)


def resolve(method: Method, hparams: BaseHParams) -> Method:
    """Return the method to run: the method itself, or what a wrapping method makes of its base."""
    return method if method.resolve is None else method.resolve(hparams.settled(), get)


@functools.lru_cache(maxsize=64)
def configured(method_id: str, args: str) -> tuple[Method, BaseHParams]:
    """Return the method to run and its hyperparameters, of an id and its `method-args`; no `auto` is left."""
    method = get(method_id)
    hparams = parse_args(method, args).settled()
    return resolve(method, hparams), hparams


def method_title(method: str) -> str:
    """Return a method's title; its id where this version does not know it."""
    try:
        return get(method).title
    except BadRequest:
        return method


def exchanged(method: Method, rounds: float) -> str:
    """Return what the method exchanges; without rounds, that of the one exchange alone."""
    return method.travels if rounds else method.travels.rpartition("; once, ")[2]


def title_of(label: str) -> str:
    """Write a run's label with the method's title instead of its id: `FedProx (mu=1)` for `fedprox(mu=1)`."""
    method, _, own = label.partition("(")
    return f"{method_title(method)} ({own}" if own else method_title(method)
