"""Reads the TOML files of `fedapp/conf` that hold tables of data (papers, studies, claims) and checks their form."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedapp import config
from fedapp.errors import BadRequest, faults

FOLDER = Path(__file__).parents[1] / "conf"
Value: TypeAlias = bool | int | float | str
"""A value of a run-config key."""


class Entry(BaseModel):
    """A table of such a file: unknown keys are refused, and read values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


_File = TypeVar("_File", bound=Entry)


def read(path: Path, kind: type[_File]) -> _File:
    """Read a file as `kind`.

    Raises
    ------
    BadRequest : the file cannot be read, or is not of this form; the message names every place that is wrong.
    """
    try:
        return kind.model_validate(config.read_toml(path))
    except ValidationError as e:
        raise BadRequest(f"{path}: {'; '.join(map(str, faults(e)))}") from e
