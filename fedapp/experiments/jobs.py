"""The runs of a comparison: a method with values of its own, on one setting, with one seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedapp import registry
from fedapp.config import RunConfig
from fedapp.errors import BadRequest
from fedapp.results.runs import RunResult, folder_of


def common_public(values: Mapping[str, Any], methods: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return run-config keys with which the methods of a comparison train on the same images.

    If one of them needs public images and `public-data` names none, its share is held back from the clients of all.

    Parameters
    ----------
    methods : pairs of an id and its `method-args`, on which it may depend whether images are needed.
    """
    share = max((_public_share(name, args) for name, args in methods), default=0.0)
    if share and not str(values.get("public-data") or "").strip():
        return {**values, "public-data": str(share)}
    return dict(values)


def _public_share(name: str, args: str) -> float:
    method = registry.get(name)
    try:
        return registry.resolve(method, registry.parse_args(method, args)).public_share
    except BadRequest:
        return method.public_share  # the check of its runs refuses the arguments, together with those of other runs


@dataclass(frozen=True)
class Variant:
    """A method with hyperparameters and settings of its own.

    Attributes
    ----------
    label : as it was written, `fedavg` or `fedprox(mu=0.1)`; names it in tables and folders.
    args : hyperparameters, name -> text.   settings : run-config keys of its own, typed.
    family : in a search the label of the variant that it is a point of.
    """

    label: str
    method: str
    args: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    family: str = ""

    @property
    def folder(self) -> str:
        """Beginning of its runs' folders."""
        return folder_of(self.label)

    @property
    def title(self) -> str:
        """Name in tables."""
        return registry.title_of(self.label)


@dataclass(frozen=True)
class Job:
    """One run of a comparison.

    Attributes
    ----------
    setting : folder of its setting, empty where there is one.   sweep : the values of `--sweep`, in words.
    """

    variant: Variant
    setting: str
    seed: int
    config: RunConfig
    sweep: str = ""

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.storage.out)

    @cached_property
    def result(self) -> RunResult:
        """Its run directory; each file is read once, so ask only when the run has ended."""
        return RunResult(self.out, self.variant.label)

    @property
    def name(self) -> str:
        """Short name in messages."""
        return f"{self.setting} {self.variant.label} s{self.seed}".strip()
