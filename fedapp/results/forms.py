"""Forms of the files of a run directory: a damaged file is refused before anything is computed from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, create_model

from fedapp.errors import faults
from fedapp.lazy import pd


def _single(value: object) -> object:
    if isinstance(value, (list, dict)):
        raise ValueError("should be one value")
    return value


Number: TypeAlias = Annotated[float, Field(strict=True)] | None
"""A number, or None where it has no value."""
Whole: TypeAlias = Annotated[float, Field(strict=True, gt=-(2**63), lt=2**63)]
Single: TypeAlias = Annotated[Any, AfterValidator(_single)]
Numbers: TypeAlias = dict[str, Number]
Singles: TypeAlias = dict[str, Single]


def _form(**types: Any) -> Any:
    """Return the type of an object with these values, each optional."""
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types.items()}
    return create_model("Form", **fields)


SUMMARY = _form(
    accuracy=dict[str, Numbers],
    metrics=dict[str, dict[str, Numbers]],
    calibration=_form(before=Number, after=Number, oracle=Number) | None,
    headline=_form(score=str | None, value=Number) | None,
    privacy=_form(epsilon=Number, delta=Number) | None,
    sampled=_form(balanced=_form(images=Whole) | None) | None,
    warnings=list[Single] | None,
    wdr=list[Number] | None,
    seconds=Number,
    **dict.fromkeys(("pooled", "test_sizes"), Numbers | None),
    **dict.fromkeys(("clients", "rounds", "round", "seed", "dropped"), Whole | None),
)
CARD = _form(
    **dict.fromkeys(("classes", "names", "left_out"), list[Single]),
    **dict.fromkeys(("train", "test"), list[list[Whole]]),
    train_sizes=list[Whole],
    test_sizes=list[Whole] | None,
    majority=list[Number] | None,
    majority_mean=Number,
)
CONFIG = _form(**{"seed": Whole, "partition-seed": Whole, "fraction-train": Number})
WORDS = ("stage", "reason", "name")
"""Columns of text in the tables of a run."""


def wrong(form: Any, value: object) -> str:
    """Return the first place where a value differs from a type, and how; empty if it is of this type."""
    try:
        TypeAdapter(form).validate_python(value)
    except ValidationError as e:
        return str(faults(e)[0])
    return ""


def wrong_summary(summary: Mapping[str, Any]) -> str:
    """Return where a summary differs from its form."""
    traffic = {key: value for key, value in summary.items() if key.startswith("bytes_")}
    return wrong(SUMMARY, summary) or wrong(Numbers, traffic)


def wrong_config(flat: Mapping[str, Any]) -> str:
    """Return where a run-config differs from its form."""
    plain = {key: value for key, value in flat.items() if (key, value) != ("partition-seed", "auto")}
    return wrong(CONFIG, plain) or wrong(Singles, plain)


def wrong_card(card: Mapping[str, Any]) -> str:
    """Return where a data card differs from its form, or where the lengths of its parts differ."""
    if said := wrong(CARD, card):
        return said
    rows = card.get("train", [])
    if {len(row) for row in rows} - {len(card.get("classes", ()))}:
        return "train does not have as many columns as there are classes"
    lengths = {len(card.get(name) or ()) for name in ("train_sizes", "test_sizes", "majority")}
    return "" if not rows or lengths == {len(rows)} else "its lists do not have one entry for each client"


def wrong_table(table: pd.DataFrame, whole: Collection[str], words: Collection[str] = WORDS) -> str:
    """Return the column of numbers that holds text or is missing.

    Parameters
    ----------
    whole : columns that it must have, with a whole number in each row.   words : columns that may hold text.
    """
    for name in whole if len(table.columns) else ():
        if name not in table:
            return f"no column {name}"
        if not pd.api.types.is_numeric_dtype(table[name]) or not (table[name].abs() < 2**63).all():
            return f"not every row has a number in the column {name}"
    texts = [c for c in table if c not in words and not pd.api.types.is_numeric_dtype(table[c])]
    return f"text in the column {texts[0]}" if texts else ""
