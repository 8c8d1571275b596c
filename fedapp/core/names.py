"""Names of arrays: which are under a prefix, and how a payload is split by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fedapp.method import Array, Arrays, Payload

RUNNING_STATISTICS = (".running_mean", ".running_var")
"""How PyTorch names the floating-point buffers of its normalisation layers."""


def matches(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether `name` is under one of `prefixes` (whole dotted components: `head.` never matches `header.x`)."""
    return any(not p or name.startswith(p if p.endswith(".") else p + ".") or name == p for p in prefixes)


def numbered(prefix: str, number: int, name: str) -> str:
    """Return the name of an array of one of several models in a payload: `<prefix><number>/<name>`."""
    return f"{prefix}{number}/{name}"


def prefixed(prefix: str, arrays: Mapping[str, Array]) -> Arrays:
    """Return the arrays with `prefix` before their names."""
    return {prefix + name: array for name, array in arrays.items()}


def under(prefix: str, arrays: Mapping[str, Array]) -> Arrays:
    """Return the arrays whose names begin with `prefix`, by their names without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def split(payload: Payload, prefix: str) -> tuple[Payload, Arrays]:
    """Split a payload into the arrays outside `prefix`, and those under it by their names without it.

    A client's `receive` and `reference` treat every array of a payload as part of the model. A method that sends other
    arrays too removes them first.
    """
    common, arrays = (
        {name: array for name, array in part.items() if not name.startswith(prefix)}
        for part in (payload.common, payload.arrays)
    )
    return replace(payload, arrays=arrays, common=common), under(prefix, payload.all())


def split_numbered(prefix: str, payload: Payload) -> tuple[Payload, list[Arrays]]:
    """Split a payload into the arrays outside `prefix`, and the models under it in numeric order."""
    rest, found = split(payload, prefix)
    models: dict[int, Arrays] = {}
    for name, array in found.items():
        number, inner = name.split("/", 1)
        models.setdefault(int(number), {})[inner] = array
    return rest, [models[number] for number in sorted(models)]
