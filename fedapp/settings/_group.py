"""The base of the groups of settings, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Auto = Literal["auto"]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]


class Group(BaseModel):
    """A group of settings. In files and on the command line hyphens replace the underscores of the names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, alias_generator=lambda n: n.replace("_", "-"),
        populate_by_name=True, protected_namespaces=(),
    )  # fmt: skip

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values, by their Python names."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})
