"""Building a method on another one: the outer method's classes added to the base's, once per pair.

Both sides of an outer method are classes that call `super()` throughout. `on` puts them before the base's classes in
the order of inheritance, with the outer method's settings and the base's own hyperparameters as class attributes.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from pydantic import ValidationError

from clients.base import FedClient
from fedapp.errors import BadRequest
from fedapp.method import ALL, BaseHParams, Method
from fedapp.text import suggest

T = TypeVar("T")


def on(outer: type[T], base: type[Any], settings: BaseHParams, base_hparams: BaseHParams) -> type[T]:
    """Return the class that does what `base` does, with `outer` added; the same class for the same arguments.

    Parameters
    ----------
    outer, base : two subclasses of one class, both cooperative.
    settings, base_hparams : become class attributes of these names.
    """
    pair: tuple[Any, Any] = (outer, base)
    made: type[T] = _on(pair, settings, base_hparams)
    return made


@functools.lru_cache(maxsize=128)
def _on(pair: tuple[Any, Any], settings: BaseHParams, base_hparams: BaseHParams) -> Any:
    outer, base = pair
    space = {"settings": settings, "base_hparams": base_hparams, "__module__": outer.__module__}
    return type(f"{outer.__name__}On{base.__name__}", pair, {**space, "__doc__": outer.__doc__})


def base_hparams(base: Method, text: str) -> BaseHParams:
    """Parse the base's hyperparameters, "name=value name=value" without the prefix `base.`.

    Raises
    ------
    BadRequest : an unknown name, or a value that does not fit; says which.
    """
    values = dict(part.partition("=")[::2] for part in text.split())
    fields = base.hparams.model_fields
    for name in values:
        if name not in fields:
            takes = ", ".join(f"base.{f}" for f in fields) or "no hyperparameters"
            raise BadRequest(f"method-args: {base.id} has no 'base.{name}'{suggest(name, fields)}; it takes {takes}")
    try:
        return base.hparams.model_validate(values)
    except ValidationError as e:
        lines = [f"base.{'.'.join(map(str, x['loc'])) or base.id} = {x['input']!r}: {x['msg']}" for x in e.errors()]
        raise BadRequest("method-args: " + "; ".join(lines)) from e


def leaves_one_linear_head(base: Method, hparams: BaseHParams) -> bool:
    """Whether a method ends with one global model, shared whole, that classifies by a plain linear head."""
    hooks = ("build_model", "configure_model")
    plain = all(_function(base.client, hook) is _function(FedClient, hook) for hook in hooks)
    return base.resolve is None and base.global_model and set(base.shared_prefixes(hparams)) == set(ALL) and plain


def _function(cls: type[Any], name: str) -> Any:
    """Return the function behind a class method."""
    return getattr(getattr(cls, name), "__func__", None)
