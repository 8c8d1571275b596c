"""Escape cells of CSV files that a spreadsheet would run as formulas, and read the original text back."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from fedapp.errors import is_number
from fedapp.lazy import pd

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet takes for a formula."""


def cell(value: Any) -> Any:
    """Write floats so that they read back to the same bits; NaN is an empty cell; text never becomes a formula.

    A spreadsheet runs what begins with one of `FORMULA`, so an apostrophe is put before it. Text that has apostrophes
    there already gets one more, so that `uncelled` finds what it was.
    """
    if isinstance(value, float):
        return "" if math.isnan(value) else (int(value) if value.is_integer() and abs(value) < 2**53 else repr(value))
    return f"'{value}" if _formula(value) and not is_number(value) else value


def uncelled(value: Any) -> Any:
    """Return the text from which `cell` made a cell; everything else as it is."""
    return value[1:] if isinstance(value, str) and value.startswith("'") and _formula(value) else value


def _formula(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip("'").startswith(FORMULA)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as a CSV file whose text and names of columns are not formulas.

    Raises
    ------
    OSError : the file cannot be written.
    """
    safe = mapped(table, cell)
    text: str = safe.to_csv(index=False, lineterminator="\n")
    if "\r" in text:  # Python writes it without quotes, and readers begin a new line there, perhaps with a formula
        text = safe.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    path.write_text(text, encoding="utf-8", newline="")


def mapped(table: pd.DataFrame, change: Any) -> pd.DataFrame:
    """Return a table with its text and the names of its columns changed; numbers stay as they are."""
    texts = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    new = {name: table[name].map(change, na_action="ignore") for name in texts}
    return table.assign(**new).rename(columns=change)
