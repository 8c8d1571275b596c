"""The runs behind the ledger of claims, read from `studies.toml`; its head says what a study is."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedapp.errors import BadRequest, suggest
from fedapp.experiments.jobs import common_public
from fedapp.experiments.shipped import Entry, Value, read

FOLDER = Path(__file__).parent


class StudyVariant(Entry):
    """A method with hyperparameters and run-config keys of its own, and the published accuracy in %.

    Attributes
    ----------
    seeds : how many, from 0; None = as many as its study.
    """

    method: str
    args: str = ""
    settings: dict[str, Value] = Field(default_factory=dict)
    paper: str = "-"
    seeds: int | None = Field(None, ge=1)


class Base(Entry):
    """Run-config keys that several studies share, and in words what differs from their paper."""

    scaled: str
    settings: dict[str, Value]


class Study(Entry):
    """One setting with its variants.

    Attributes
    ----------
    id : name of its folder.   like : the base whose settings come first.
    settings : run-config keys that all variants share. Public images that one of them needs are held back from all.
    scaled : what differs from the paper, if not as in the base.
    seeds : how many, from 0, for a variant that does not say.
    """

    id: str
    title: str
    like: str
    scaled: str = ""
    settings: dict[str, Value] = Field(default_factory=dict)
    seeds: int = Field(3, ge=1)
    variants: dict[str, StudyVariant]


class Studies(Entry):
    """The file."""

    base: dict[str, Base]
    study: tuple[Study, ...]


@functools.cache
def studies() -> dict[str, Study]:
    """Return all studies by id, each with what it takes from its base.

    Raises
    ------
    BadRequest : the file is not as it should be.
    """
    path = FOLDER / "studies.toml"
    file = read(path, Studies)
    found: dict[str, Study] = {}
    for study in file.study:
        if study.like not in file.base:
            raise BadRequest(f"{path}: study {study.id} is like '{study.like}'{suggest(study.like, file.base)}")
        own = [name for name, variant in study.variants.items() if "public-data" in variant.settings]
        if own:
            raise BadRequest(f"{path}: public-data of {study.id}/{own[0]} concerns all variants: give it to the study")
        base = file.base[study.like]
        settings = common_public(
            {**base.settings, **study.settings}, ((v.method, v.args) for v in study.variants.values())
        )
        found[study.id] = study.model_copy(update={"settings": settings, "scaled": study.scaled or base.scaled})
    return found


@dataclass(frozen=True)
class RunKey:
    """One run of the ledger."""

    study: str
    variant: str
    seed: int

    @property
    def folder(self) -> str:
        """Its folder below the output directory."""
        return f"{self.study}/{self.variant}-s{self.seed}"


def settings_of(key: RunKey, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the flat run-config of one run."""
    study = studies()[key.study]
    variant = study.variants[key.variant]
    own = {"method": variant.method, "method-args": variant.args, "seed": key.seed}
    return {**study.settings, **variant.settings, **(extra or {}), **own}


def keys_of(pairs: Iterable[tuple[str, str]]) -> list[RunKey]:
    """Return all seeds of the named (study, variant) pairs."""
    return [
        RunKey(s, v, seed) for s, v in pairs for seed in range(studies()[s].variants[v].seeds or studies()[s].seeds)
    ]
