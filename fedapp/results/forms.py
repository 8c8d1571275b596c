"""What the files of a run directory hold.

A damaged one is told where it is read, before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from fedapp.lazy import pd

Form: TypeAlias = "str | list[Form] | dict[str, Form]"
"""A kind of value, a list of values of one form, or the forms of an object's values by patterns of their names."""
NUMBER, WHOLE, TEXT, SINGLE = "a number", "a whole number", "text", "one value"
SUMMARY: dict[str, Form] = {
    "accuracy": {"*": {"*": NUMBER}},
    "metrics": {"*": {"*": {"*": NUMBER}}},
    "pooled": {"*": NUMBER},
    "test_sizes": {"*": NUMBER},
    "calibration": {"before": NUMBER, "after": NUMBER, "oracle": NUMBER},
    "headline": {"score": TEXT, "value": NUMBER},
    "privacy": {"epsilon": NUMBER, "delta": NUMBER},
    "warnings": [SINGLE],
    "wdr": [NUMBER],
    "bytes_*": NUMBER,
    "seconds": NUMBER,
    **dict.fromkeys(("clients", "rounds", "round", "seed", "dropped"), WHOLE),
}
CARD: dict[str, Form] = {
    "classes": [SINGLE], "names": [SINGLE], "left_out": [SINGLE],
    "train": [[WHOLE]], "test": [[WHOLE]], "train_sizes": [WHOLE], "test_sizes": [WHOLE],
    "majority": [NUMBER],
    "majority_mean": NUMBER,
}  # fmt: skip
OPTIONAL = ("pooled", "test_sizes", "calibration", "headline", "privacy", "warnings", "wdr", "majority")
"""Lists and objects that may be null."""
VERSIONS: dict[str, Form] = {"*": SINGLE}
CONFIG: dict[str, Form] = {"seed": WHOLE, "fraction-train": NUMBER, "*": SINGLE}
WORDS = ("stage", "reason", "name")
"""Columns of text in the tables of a run."""


def wrong(value: Any, form: Form, name: str = "") -> str:
    """Say where a value differs from its form, or return an empty string; None stands for a number without value."""
    if value is None and isinstance(form, str):
        return ""
    if isinstance(form, dict) and isinstance(value, Mapping):
        parts = [(k, v, _form_of(k, form)) for k, v in value.items() if v is not None or k not in OPTIONAL]
        return next(filter(None, (wrong(v, f, f"{name}.{k}".lstrip(".")) for k, v, f in parts if f)), "")
    if isinstance(form, list) and isinstance(value, list):
        whole = form != [WHOLE] or None not in value
        said = (wrong(inner, form[0], f"an entry of {name}") for inner in value)
        return next(filter(None, said), "") if whole else f"an entry of {name} is missing"
    wanted = form if isinstance(form, str) else "a list" if isinstance(form, list) else "an object"
    return "" if isinstance(form, str) and _is(value, form) else f"{name} is not {wanted}"


def _form_of(key: str, form: Mapping[str, Form]) -> Form | None:
    return form.get(key) or next((inner for pattern, inner in form.items() if fnmatchcase(key, pattern)), None)


def _is(value: Any, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if kind == SINGLE:
        return not isinstance(value, (list, dict))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if kind == WHOLE else isinstance(value, float) or abs(value) < 2**1023


def wrong_card(card: Mapping[str, Any]) -> str:
    """Say where a data card differs from its form, or where its parts have different lengths."""
    if said := wrong(card, CARD):
        return said
    rows = card.get("train", [])
    if {len(row) for row in rows} - {len(card.get("classes", ()))}:
        return "train does not have as many columns as there are classes"
    lengths = {len(card.get(name) or ()) for name in ("train_sizes", "test_sizes", "majority")}
    return "" if not rows or lengths == {len(rows)} else "its lists do not have one entry for each client"


def wrong_table(table: pd.DataFrame, whole: Collection[str], words: Collection[str] = WORDS) -> str:
    """Say where a table has text in place of numbers, or lacks a column.

    Parameters
    ----------
    whole : columns that it must have, of which each row has a whole number.   words : columns that may hold text.
    """
    for name in whole if len(table.columns) else ():
        if name not in table:
            return f"no column {name}"
        if not pd.api.types.is_numeric_dtype(table[name]) or not (table[name].abs() < 2**63).all():
            return f"not every row has a number in the column {name}"
    texts = [c for c in table if c not in words and not pd.api.types.is_numeric_dtype(table[c])]
    return f"text in the column {texts[0]}" if texts else ""
