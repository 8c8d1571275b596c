"""The base of the groups of settings, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Auto = Literal["auto"]
AUTO: Any = "auto"
T = TypeVar("T")
NonNegative = Annotated[float, Field(ge=0)]


class OrAuto:
    """Marks a field that takes `auto` too. Its type is that of the resolved value (`fedapp.config.resolved`)."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the number or `auto`."""
        return core_schema.union_schema([handler(source), core_schema.literal_schema(["auto"])])


def unless_auto(value: T, default: T) -> T:
    """Return a value, or its default where it is `auto`."""
    return default if value == "auto" else value


class Group(BaseModel):
    """A group of settings. In files and on the command line hyphens replace the underscores of the names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, alias_generator=lambda n: n.replace("_", "-"),
        populate_by_name=True, protected_namespaces=(),
    )  # fmt: skip

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values, by their Python names; nothing is checked again."""
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return cast("Self", type(self).model_construct(**{**kept, **changes}))
